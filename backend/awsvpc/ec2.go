// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"slices"
	"strconv"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

const (
	pageSize   = 100 // most tables or instances in one answer
	maxTargets = 100 // most values of a filter in one call; EC2 allows 200
)

// vpc implements cloud.Cloud for the VPC of this host.
type vpc struct {
	config    config
	networks  []netip.Prefix
	addresses []netip.Addr // of the external interface
	connect   func(context.Context) (*client, error)

	api  *client          // nil before the first connection
	own  networkInterface // of this host, as the last Join or Check has found it
	main *routeTable      // of the VPC; nil if it is not known since the last Tables
}

// instanceAnswer is the answer of DescribeInstances.
type instanceAnswer struct {
	Instances []instance `xml:"reservationSet>item>instancesSet>item"`
	NextToken string     `xml:"nextToken"`
}

type instance struct {
	ID         string             `xml:"instanceId"`
	State      string             `xml:"instanceState>name"`
	Interfaces []networkInterface `xml:"networkInterfaceSet>item"`
}

type networkInterface struct {
	ID              string   `xml:"networkInterfaceId"`
	Subnet          string   `xml:"subnetId"`
	VPC             string   `xml:"vpcId"`
	SourceDestCheck bool     `xml:"sourceDestCheck"`
	IPv4            []string `xml:"privateIpAddressesSet>item>privateIpAddress"`
	Public          []string `xml:"privateIpAddressesSet>item>association>publicIp"`
	IPv6            []string `xml:"ipv6AddressesSet>item>ipv6Address"`
}

func (n networkInterface) addresses() []netip.Addr {
	return access.Addresses(slices.Concat(n.IPv4, n.Public, n.IPv6)...)
}

// tableAnswer is the answer of DescribeRouteTables.
type tableAnswer struct {
	Tables    []routeTable `xml:"routeTableSet>item"`
	NextToken string       `xml:"nextToken"`
}

type routeTable struct {
	ID           string        `xml:"routeTableId"`
	VPC          string        `xml:"vpcId"`
	Associations []association `xml:"associationSet>item"`
	Routes       []route       `xml:"routeSet>item"`
}

// association tells whose packets follow a table: the packets of a subnet or, for the main table,
// those of all subnets of the VPC without a table of their own.
type association struct {
	Subnet string `xml:"subnetId"`
	Main   bool   `xml:"main"`
}

// route has one destination, and one target. The destination of a route to a VPC endpoint is a
// prefix list, so IPv4 and IPv6 are empty.
type route struct {
	IPv4      string `xml:"destinationCidrBlock"`
	IPv6      string `xml:"destinationIpv6CidrBlock"`
	Interface string `xml:"networkInterfaceId"`
	Instance  string `xml:"instanceId"`
	Gateway   string `xml:"gatewayId"`
	NAT       string `xml:"natGatewayId"`
	Transit   string `xml:"transitGatewayId"`
	Peering   string `xml:"vpcPeeringConnectionId"`
	Egress    string `xml:"egressOnlyInternetGatewayId"`
	Local     string `xml:"localGatewayId"`
	Carrier   string `xml:"carrierGatewayId"`
	Core      string `xml:"coreNetworkArn"`
	ODB       string `xml:"odbNetworkArn"`
	Address   string `xml:"ipAddress"`
	State     string `xml:"state"`
	Origin    string `xml:"origin"`
}

// state decodes EC2's RouteState. ok is false if the route is not in the table.
func state(text string) (s cloud.State, ok bool) {
	switch text {
	case "active":
		return cloud.Carrying, true
	case "filtered": // a route server has learned it, and EC2 has not taken it over
		return 0, false
	default: // blackhole, and what may come
		return cloud.Idle, true
	}
}

// find connects the client at the first call, and sets own.
func (v *vpc) find(ctx context.Context) (*client, error) {
	if err := access.Connect(ctx, &v.api, v.connect); err != nil {
		return nil, err
	}

	instances, err := describeInstances(ctx, v.api, url.Values{"InstanceId.1": {v.api.instance}})
	if isCode(err, "InvalidInstanceID.NotFound") { // the instance has just booted
		return nil, fmt.Errorf("%w about this instance yet: %w", cloud.ErrUnavailable, err)
	}
	if err != nil {
		return nil, err
	}

	for _, a := range v.addresses {
		for _, i := range instances {
			for _, n := range i.Interfaces {
				if slices.Contains(n.addresses(), a) {
					v.own = n
					return v.api, nil
				}
			}
		}
	}
	return nil, fmt.Errorf("no network interface of instance %s has an address of the external interface: EC2 does not know %v", v.api.instance, v.addresses)
}

// Join implements cloud.Cloud. It switches the source/dest check of the network interface off,
// because EC2 otherwise drops the packets of pods.
func (v *vpc) Join(ctx context.Context) (string, error) {
	api, err := v.find(ctx)
	if err != nil {
		return "", err
	}
	if v.own.SourceDestCheck {
		if err := api.call(ctx, "ModifyNetworkInterfaceAttribute", checkOff(v.own), nil); err != nil {
			return "", &cloud.DroppedError{Err: fmt.Errorf("switch off the source/dest check of %s: %w", v.own.ID, err)}
		}
	}
	return v.own.ID, nil
}

func checkOff(n networkInterface) url.Values {
	return url.Values{"NetworkInterfaceId": {n.ID}, "SourceDestCheck.Value": {"false"}}
}

// Followed implements cloud.Cloud.
func (v *vpc) Followed(ctx context.Context, hosts []cloud.Host) ([]string, error) {
	known := map[netip.Addr]string{} // ids of the subnets of network interfaces, by each address
	subnetOf := func(h cloud.Host) (id string) {
		for _, a := range h.Addresses {
			id = cmp.Or(id, known[a])
		}
		return id
	}

	for _, by := range []struct {
		filter string
		is4    bool
	}{{"addresses.private-ip-address", true}, {"addresses.association.public-ip", true}, {"ipv6-addresses.ipv6-address", false}} {
		var texts []string
		for _, h := range hosts {
			if subnetOf(h) != "" {
				continue
			}
			for _, a := range h.Addresses {
				if a.Is4() == by.is4 {
					texts = append(texts, a.String())
				}
			}
		}

		for some := range slices.Chunk(texts, maxTargets) {
			params := filterParams(map[string][]string{"network-interface." + by.filter: some, "vpc-id": {v.own.VPC}})
			instances, err := describeInstances(ctx, v.api, params)
			if err != nil {
				return nil, err
			}
			for _, i := range instances {
				for _, n := range i.Interfaces {
					for _, a := range n.addresses() {
						known[a] = n.Subnet
					}
				}
			}
		}
	}

	var subnets []string
	for _, h := range hosts {
		if id := subnetOf(h); id != "" {
			subnets = append(subnets, id)
		}
	}
	tables, err := v.tablesOf(ctx, subnets)
	if err != nil {
		return nil, err
	}
	followed := make([]string, len(hosts))
	for i, h := range hosts {
		followed[i] = tables[subnetOf(h)].ID
	}
	return followed, nil
}

// tablesOf returns the tables that packets of the subnets with these ids follow, by id.
func (v *vpc) tablesOf(ctx context.Context, subnets []string) (map[string]routeTable, error) {
	slices.Sort(subnets)
	subnets = slices.Compact(subnets)
	tables := map[string]routeTable{}
	for some := range slices.Chunk(subnets, maxTargets) {
		found, err := v.describeTables(ctx, filterParams(map[string][]string{"association.subnet-id": some}))
		if err != nil {
			return nil, err
		}
		for _, t := range found {
			for _, a := range t.Associations {
				if a.Subnet != "" {
					tables[a.Subnet] = t
				}
			}
		}
	}

	// The other subnets follow the main table of the VPC, even if it is not one of the chosen tables.
	for _, id := range subnets {
		if _, own := tables[id]; own {
			continue
		}
		if v.main == nil { // the main table stays so, unless an operator changes that
			found, err := v.describeTables(ctx, filterParams(map[string][]string{"vpc-id": {v.own.VPC}, "association.main": {"true"}}))
			if err != nil || len(found) == 0 {
				return tables, err
			}
			v.main = &found[0]
		}
		tables[id] = *v.main
	}
	return tables, nil
}

func describeInstances(ctx context.Context, api *client, params url.Values) (all []instance, err error) {
	err = access.Pages(params, "NextToken", func() (string, error) {
		var answer instanceAnswer
		err := api.call(ctx, "DescribeInstances", params, &answer)
		all = append(all, answer.Instances...)
		return answer.NextToken, err
	})
	return all, err
}

// Tables implements cloud.Cloud. It must be called after Join or Check.
func (v *vpc) Tables(ctx context.Context) ([]cloud.Table, error) {
	v.main = nil
	found, err := v.chosen(ctx)
	if err != nil {
		return nil, err
	}
	for i, t := range found {
		if t.main(v.own.VPC) {
			v.main = &found[i]
		}
	}
	own, err := v.followed(ctx, found)
	if err != nil {
		return nil, err
	}

	var tables []cloud.Table
	for _, t := range found {
		table := t.table()
		table.Own = t.ID == own
		tables = append(tables, table)
	}
	idle := func(r cloud.Route) bool { return r.State == cloud.Idle }
	return tables, cloud.Look(ctx, tables, v.networks, idle, v.running)
}

// running tells instances that are stopped from those that are gone: EC2 calls both routes a blackhole.
func (v *vpc) running(ctx context.Context, ids []string) (map[string]bool, error) {
	running := map[string]bool{}
	for some := range slices.Chunk(ids, maxTargets) {
		instances, err := describeInstances(ctx, v.api, filterParams(map[string][]string{"network-interface.network-interface-id": some}))
		if err != nil {
			return nil, err
		}
		for _, i := range instances {
			for _, n := range i.Interfaces {
				running[n.ID] = false
			}
		}
	}
	return running, nil
}

func (t routeTable) main(vpc string) bool {
	return t.VPC == vpc && slices.ContainsFunc(t.Associations, func(a association) bool { return a.Main })
}

// followed returns the id of the table that packets of this host follow. It may return "" if that is none of the chosen
// ones.
func (v *vpc) followed(ctx context.Context, chosen []routeTable) (string, error) {
	if !v.config.choosesTables() {
		return chosen[0].ID, nil // the table of this host's subnet
	}

	for _, t := range chosen {
		if slices.ContainsFunc(t.Associations, func(a association) bool { return a.Subnet == v.own.Subnet }) {
			return t.ID, nil
		}
	}
	if v.main == nil {
		return "", nil
	}

	// The subnet may have a table of its own that was not chosen.
	tables, err := v.tablesOf(ctx, []string{v.own.Subnet})
	return tables[v.own.Subnet].ID, err
}

// chosen returns the tables that the configuration chooses. If it chooses none, that is the table that
// this host's subnet follows.
func (v *vpc) chosen(ctx context.Context) ([]routeTable, error) {
	switch {
	case len(v.config.RouteTableID) > 0:
		params := url.Values{}
		for i, id := range v.config.RouteTableID {
			params.Set("RouteTableId."+strconv.Itoa(i+1), id)
		}
		found, err := v.describeTables(ctx, params)
		if isCode(err, "InvalidRouteTableID.NotFound", "InvalidRouteTableId.Malformed") {
			return nil, fmt.Errorf("Backend.RouteTableID: %w", err)
		}
		return found, err

	case len(v.config.RouteTableFilter) > 0:
		filters := v.config.filters()
		if filters["vpc-id"] == nil {
			filters["vpc-id"] = []string{v.own.VPC}
		}
		found, err := v.describeTables(ctx, filterParams(filters))
		if err == nil && len(found) == 0 {
			return nil, fmt.Errorf("Backend.RouteTableFilter %q matches no route table of %s", v.config.RouteTableFilter, v.own.VPC)
		}
		return found, err
	}

	found, err := v.tablesOf(ctx, []string{v.own.Subnet})
	t, ok := found[v.own.Subnet]
	if err == nil && !ok {
		err = fmt.Errorf("%s has no route table for subnet %s, and no main table: set Backend.RouteTableID", v.own.VPC, v.own.Subnet)
	}
	return []routeTable{t}, err
}

// filterParams encodes filters, which have several values by name.
func filterParams(filters map[string][]string) url.Values {
	params := url.Values{"MaxResults": {strconv.Itoa(pageSize)}}
	for i, name := range slices.Sorted(maps.Keys(filters)) {
		key := "Filter." + strconv.Itoa(i+1)
		params.Set(key+".Name", name)
		for j, value := range filters[name] {
			params.Set(key+".Value."+strconv.Itoa(j+1), value)
		}
	}
	return params
}

func (v *vpc) describeTables(ctx context.Context, params url.Values) (all []routeTable, err error) {
	err = access.Pages(params, "NextToken", func() (string, error) {
		var answer tableAnswer
		err := v.api.call(ctx, "DescribeRouteTables", params, &answer)
		all = append(all, answer.Tables...)
		return answer.NextToken, err
	})
	return all, err
}

// table leaves out the routes whose destination is not a prefix.
func (t routeTable) table() cloud.Table {
	table := cloud.Table{ID: t.ID}
	for _, r := range t.Routes {
		dst, err := netip.ParsePrefix(cmp.Or(r.IPv4, r.IPv6))
		state, ok := state(r.State)
		if err != nil || !ok {
			continue
		}
		c := cloud.Route{Table: t.ID, Dst: dst.Masked(), State: state, ByCall: r.Origin == "CreateRoute", Target: cmp.Or(r.Interface, r.Instance)}
		if c.Target == "" {
			c.Target = cmp.Or(r.Gateway, r.NAT, r.Transit, r.Peering, r.Egress, r.Local, r.Carrier, r.Core, r.ODB, r.Address, "an unknown target")
			c.Foreign = "which leads to no instance"
		}
		table.Routes = append(table.Routes, c)
	}
	return table
}

func routeParams(table string, dst netip.Prefix) url.Values {
	key := "DestinationCidrBlock"
	if prefix.FamilyOf(dst.Addr()) == prefix.IPv6 {
		key = "DestinationIpv6CidrBlock"
	}
	return url.Values{"RouteTableId": {table}, key: {dst.String()}}
}

// Put implements cloud.Cloud. If there is no route to replace, Put creates it, because the caller may
// have decided to replace a route by an old description of the table.
func (v *vpc) Put(ctx context.Context, r cloud.Route, replace bool) error {
	params := routeParams(r.Table, r.Dst)
	params.Set("NetworkInterfaceId", r.Target)
	if replace {
		same := func(have cloud.Route) bool { return have.Dst == r.Dst && have.ByCall && have.Foreign != "" }
		if foreign, err := v.has(ctx, r.Table, same); err != nil || foreign {
			return cmp.Or(err, cloud.ErrExists)
		}

		// EC2 also answers InvalidParameterValue if there is no route to the destination.
		err := v.api.call(ctx, "ReplaceRoute", params, nil)
		if !isCode(err, "InvalidRoute.NotFound", "InvalidParameterValue") {
			return err
		}
	}

	err := v.api.call(ctx, "CreateRoute", params, nil)
	if !isCode(err, "RouteAlreadyExists") {
		return err
	}
	if replace { // ReplaceRoute did not see the route yet, for example after a lost answer
		return fmt.Errorf("%w about this route yet: %w", cloud.ErrUnavailable, err)
	}
	return cloud.ErrExists
}

// Remove implements cloud.Cloud. DeleteRoute takes no target. So Remove reads right before the call
// where the route leads, and makes the call only if that is the target of r.
func (v *vpc) Remove(ctx context.Context, r cloud.Route) error {
	same := func(have cloud.Route) bool {
		return have.Dst == r.Dst && have.Target == r.Target && have.ByCall && have.Foreign == ""
	}
	if found, err := v.has(ctx, r.Table, same); err != nil || !found {
		return err
	}
	err := v.api.call(ctx, "DeleteRoute", routeParams(r.Table, r.Dst), nil)
	if isCode(err, "InvalidRoute.NotFound") {
		return nil
	}
	return err
}

func (v *vpc) has(ctx context.Context, table string, is func(r cloud.Route) bool) (bool, error) {
	now, err := v.describeTables(ctx, url.Values{"RouteTableId.1": {table}})
	return slices.ContainsFunc(now, func(t routeTable) bool { return slices.ContainsFunc(t.table().Routes, is) }), err
}

// Check implements cloud.Cloud.
func (v *vpc) Check(ctx context.Context) error {
	api, err := v.find(ctx)
	if err != nil {
		return err
	}
	tables, err := v.Tables(ctx)
	if err != nil {
		return err
	}
	if err := cloud.CheckRanges(tables, v.networks, v.own.VPC, "EC2"); err != nil {
		return err
	}

	var rights cloud.Rights
	if v.own.SourceDestCheck {
		if err := rights.Note(api.try(ctx, "ModifyNetworkInterfaceAttribute", checkOff(v.own))); err != nil {
			return err
		}
	}

	for _, t := range tables {
		for _, action := range []string{"CreateRoute", "ReplaceRoute", "DeleteRoute"} {
			params := routeParams(t.ID, v.networks[0])
			if action != "DeleteRoute" {
				params.Set("NetworkInterfaceId", v.own.ID)
			}
			if err := rights.Note(api.try(ctx, action, params)); err != nil {
				return err
			}
		}
	}
	return rights.Missing(page)
}
