// SPDX-License-Identifier: Apache-2.0

package alivpc

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

const (
	pageSize     = 100 // most routes or instances in one answer
	maxInstances = 100 // ids in one call, which is the most that the API allows
)

// vpc implements cloud.Cloud for the VPC of this host. Its table is that of the vSwitch of the
// external interface.
type vpc struct {
	cluster   string
	networks  []netip.Prefix
	addresses []netip.Addr // of the external interface
	connect   func(context.Context) (*client, error)

	api *client // nil before the first connection
	// The last Join or Check has set these three.
	table string // id
	id    string // of the VPC
	own   string // target of routes to this host
	// unread contains the error that was logged last for a vSwitch of other hosts whose table cannot
	// be read, by the id of the vSwitch.
	unread map[string]string
}

// Join implements cloud.Cloud. It connects the client at the first call, and sets table, id and own. It changes nothing
// in the cloud, because instances of Alibaba Cloud always get packets with foreign addresses.
func (v *vpc) Join(ctx context.Context) (string, error) {
	if err := access.Connect(ctx, &v.api, v.connect); err != nil {
		return "", err
	}

	id, primary, err := v.api.ownVSwitch(ctx, v.addresses)
	if err != nil {
		return "", err
	}
	if !primary {
		return "", fmt.Errorf("the external interface is not the primary network interface of %s, to which routes to an instance lead: choose that one by --iface", v.api.instance)
	}

	answer, err := v.vSwitch(ctx, id)
	if err != nil {
		return "", err
	}
	if answer.Table.ID == "" {
		return "", fmt.Errorf("Alibaba Cloud knows no route table of vSwitch %s", id)
	}
	v.table = answer.Table.ID
	v.id = answer.VPC
	v.own = v.api.instance
	return v.own, nil
}

type vSwitch struct {
	VPC   string `json:"VpcId"`
	Table struct {
		ID string `json:"RouteTableId"`
	} `json:"RouteTable"`
}

func (v *vpc) vSwitch(ctx context.Context, id string) (s vSwitch, err error) {
	return s, v.api.call(ctx, v.api.vpc, "DescribeVSwitchAttributes", url.Values{"VSwitchId": {id}}, &s)
}

// note logs an error of reading a vSwitch of other hosts, unless it was logged last for it. nil ends
// the error.
func (v *vpc) note(ctx context.Context, id string, err error) {
	if err == nil {
		delete(v.unread, id)
		return
	}
	if v.unread == nil {
		v.unread = map[string]string{}
	}
	if text := oneline.Text(err); v.unread[id] != text {
		v.unread[id] = text
		klog.FromContext(ctx).Error(err, "cannot read which route table hosts follow, so it is unknown whether packets reach them", "vSwitch", id)
	}
}

// convert returns false if the destination of e is not a prefix.
func (v *vpc) convert(e entry) (cloud.Route, bool) {
	dst, err := netip.ParsePrefix(e.Dst)
	if err != nil {
		return cloud.Route{}, false
	}
	r := cloud.Route{Table: v.table, Dst: dst.Masked(), State: state(e.Status), ByCall: e.Type == custom, Target: "an unknown target"}
	hop := hop{}
	if len(e.Hops.All) > 0 {
		hop = e.Hops.All[0]
	}
	if e.Type == system {
		r.Target = cloud.LocalTarget
	} else if hop.ID != "" {
		r.Target = hop.ID
	}

	switch {
	case len(e.Hops.All) > 1:
		r.Foreign = "which has several next hops"
	case !r.ByCall:
	case e.Service != "" || e.Origin != "" && e.Origin != byUser:
		r.Foreign = "which the cloud manages"
	case !toInstance(hop.Kind):
		r.Foreign = "which leads to no instance"
	case r.Target != v.own: // only this host needs a route to this host
		r.Foreign = cloud.ForeignMark(e.Description, v.cluster)
	}
	return r, true
}

// Followed implements cloud.Cloud. It makes a call for each vSwitch of the hosts. It returns the error of such a call
// only if cloud.Transient is true for it. It logs any other error, and the table is then not known.
func (v *vpc) Followed(ctx context.Context, hosts []cloud.Host) ([]string, error) {
	all := map[string]instance{}
	if err := v.describe(ctx, url.Values{"VpcId": {v.id}}, all); err != nil {
		return nil, err
	}

	switches := map[netip.Addr]string{}
	for _, i := range all {
		for _, a := range i.primary() {
			switches[a] = i.Attributes.VSwitch
		}
	}

	tables := map[string]string{"": ""} // by vSwitch; a host that is not found follows none
	followed := make([]string, len(hosts))
	for n, h := range hosts {
		id := ""
		for _, a := range h.Addresses {
			id = cmp.Or(id, switches[a])
		}

		if _, known := tables[id]; !known {
			answer, err := v.vSwitch(ctx, id)
			if cloud.Transient(err) {
				return nil, err
			}
			v.note(ctx, id, err)
			tables[id] = answer.Table.ID
		}
		followed[n] = tables[id]
	}
	return followed, nil
}

// Tables implements cloud.Cloud. It must be called after Join or Check.
func (v *vpc) Tables(ctx context.Context) ([]cloud.Table, error) {
	routes, err := v.routes(ctx, func(entry, cloud.Route) bool { return true })
	if err != nil {
		return nil, err
	}
	tables := []cloud.Table{{ID: v.table, Own: true, Routes: routes}}
	other := func(r cloud.Route) bool {
		return r.State == cloud.Carrying && r.Target != v.api.instance && strings.HasPrefix(r.Target, "i-")
	}
	return tables, cloud.Look(ctx, tables, v.networks, other, v.running)
}

// running reports whether instances run: a route does not say whether its target exists and runs.
func (v *vpc) running(ctx context.Context, ids []string) (map[string]bool, error) {
	instances, err := v.instances(ctx, append(ids, v.api.instance))
	if err != nil {
		return nil, err
	}
	if _, ok := instances[v.api.instance]; !ok { // then the answer may also be without others that run
		return nil, fmt.Errorf("%w about this instance yet: ECS does not know %s", cloud.ErrUnavailable, v.api.instance)
	}

	running := map[string]bool{}
	for id, i := range instances {
		running[id] = i.runs()
	}
	return running, nil
}

// routes returns the routes of the table for which is(e, r) is true. e is the route r as the API describes it.
func (v *vpc) routes(ctx context.Context, is func(e entry, r cloud.Route) bool) (all []cloud.Route, err error) {
	params := url.Values{"RouteTableId": {v.table}, "MaxResult": {strconv.Itoa(pageSize)}}
	err = access.Pages(params, "NextToken", func() (string, error) {
		var answer struct {
			Entries struct {
				All []entry `json:"RouteEntry"`
			} `json:"RouteEntrys"`
			NextToken string
		}
		err := v.api.call(ctx, v.api.vpc, "DescribeRouteEntryList", params, &answer)
		for _, e := range answer.Entries.All {
			if r, ok := v.convert(e); ok && is(e, r) {
				all = append(all, r)
			}
		}
		return answer.NextToken, err
	})
	return all, err
}

func (v *vpc) instances(ctx context.Context, ids []string) (map[string]instance, error) {
	all := map[string]instance{}
	for some := range slices.Chunk(ids, maxInstances) {
		list, err := json.Marshal(some)
		if err != nil {
			return nil, err
		}
		if err := v.describe(ctx, url.Values{"InstanceIds": {string(list)}}, all); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// describe adds the instances that params choose to all, by id.
func (v *vpc) describe(ctx context.Context, params url.Values, all map[string]instance) error {
	params.Set("MaxResults", strconv.Itoa(pageSize))
	return access.Pages(params, "NextToken", func() (string, error) {
		var answer struct {
			Instances struct {
				All []instance `json:"Instance"`
			} `json:"Instances"`
			NextToken string
		}
		err := v.api.call(ctx, v.api.ecs, "DescribeInstances", params, &answer)
		for _, i := range answer.Instances.All {
			all[i.ID] = i
		}
		return answer.NextToken, err
	})
}

func duplicate(err error) bool {
	return isCode(err, "RouterEntryConflict.Duplicated", "InvalidCIDRBlock.Duplicate", "InvalidRouteEntry.Duplicate", "RouteConflict.AlreadyExist")
}

func absent(err error) bool {
	return isCode(err, "ResourceNotFound.RouteEntry", "InvalidRouteEntry", "InvalidRouteEntry.NotFound", "InvalidRouteEntryId.NotFound", "RouteEntry.NotFound")
}

// Put implements cloud.Cloud. If there is no route to replace, Put creates it, because the caller may
// have decided to replace a route by an old list of routes.
func (v *vpc) Put(ctx context.Context, r cloud.Route, replace bool) error {
	if replace {
		foreign, err := v.routes(ctx, func(_ entry, have cloud.Route) bool { return have.Dst == r.Dst && have.Foreign != "" })
		if err != nil || len(foreign) > 0 {
			return cmp.Or(err, cloud.ErrExists)
		}
		err = v.api.call(ctx, v.api.vpc, "ModifyRouteEntry", v.writeParams("New", r), nil)
		if isCode(err, "OperationDenied.NextHopNotChanged") {
			return nil
		}
		if err == nil {
			return v.await(ctx, r)
		}
		if !absent(err) {
			return err
		}
	}

	err := v.api.call(ctx, v.api.vpc, "CreateRouteEntry", v.writeParams("", r), nil)
	if err == nil {
		return v.await(ctx, r)
	}
	if !duplicate(err) {
		return err
	}
	if replace { // ModifyRouteEntry did not see the route yet, for example after a lost answer
		return fmt.Errorf("%w about this route yet: %w", cloud.ErrUnavailable, err)
	}
	return cloud.ErrExists
}

// A call that changes a route usually takes effect after some seconds.
const (
	leastPoll = time.Second
	mostPoll  = 3 * time.Second
	awaitTime = 30 * time.Second
)

// await waits until the list shows no change of r in progress. The list may be older than r.
func (v *vpc) await(ctx context.Context, r cloud.Route) error {
	ctx, cancel := context.WithTimeout(ctx, awaitTime)
	defer cancel()
	pauses := wait.Backoff{Least: leastPoll, Most: mostPoll}
	for {
		changing, err := v.routes(ctx, func(_ entry, have cloud.Route) bool { return have.Dst == r.Dst && have.State == cloud.Changing })
		if err != nil || len(changing) == 0 {
			return err
		}
		if pauses.Wait(ctx, 0) != nil {
			return fmt.Errorf("%w with a route that is available: it still changes", cloud.ErrUnavailable)
		}
	}
}

func routeParams(r cloud.Route) url.Values {
	return url.Values{"RouteTableId": {r.Table}, "DestinationCidrBlock": {r.Dst.String()}}
}

// writeParams returns the parameters of CreateRouteEntry or, with the prefix New, of ModifyRouteEntry.
func (v *vpc) writeParams(prefix string, r cloud.Route) url.Values {
	params := routeParams(r)
	params.Set("Description", cloud.Describe(v.cluster, v.networks, r.Dst))
	params.Set(prefix+"NextHopType", instanceHop)
	params.Set(prefix+"NextHopId", r.Target)
	return params
}

func removeParams(r cloud.Route) url.Values {
	params := routeParams(r)
	params.Set("NextHopId", r.Target)
	return params
}

// Remove implements cloud.Cloud. The call names the target, but would also delete a route to this
// target that has become foreign. So Remove reads the route again right before the call.
func (v *vpc) Remove(ctx context.Context, r cloud.Route) error {
	found, err := v.routes(ctx, func(e entry, have cloud.Route) bool {
		return have.Dst == r.Dst && have.Target == r.Target && have.ByCall && have.Foreign == "" && !cloud.OfOther(e.Description, v.cluster)
	})
	if err != nil || len(found) == 0 {
		return err
	}

	err = v.api.call(ctx, v.api.vpc, "DeleteRouteEntry", removeParams(r), nil)
	if absent(err) {
		return nil
	}
	return err
}

// Check implements cloud.Cloud.
func (v *vpc) Check(ctx context.Context) error {
	if _, err := v.Join(ctx); err != nil {
		return err
	}
	tables, err := v.Tables(ctx)
	if err != nil {
		return err
	}
	if err := cloud.CheckRanges(tables, v.networks, "the VPC", name); err != nil {
		return err
	}

	// These ranges are for documentation, so the calls would do no harm even if they were not dry runs.
	var rights cloud.Rights
	for _, n := range v.networks {
		nowhere := cloud.Route{Table: v.table, Dst: netip.MustParsePrefix("192.0.2.0/24"), Target: v.own}
		if prefix.FamilyOf(n.Addr()) == prefix.IPv6 {
			nowhere.Dst = netip.MustParsePrefix("2001:db8::/64")
		}

		for _, call := range []struct {
			action string
			params url.Values
		}{{"CreateRouteEntry", v.writeParams("", nowhere)}, {"ModifyRouteEntry", v.writeParams("New", nowhere)}, {"DeleteRouteEntry", removeParams(nowhere)}} {
			err := v.api.try(ctx, call.action, call.params)
			if isCode(err, "OperationUnsupported.Ipv6EntryOnPrimaryNetworkInterface") {
				return fmt.Errorf("Alibaba Cloud allows no IPv6 routes to the primary network interface of %s: remove IPv6Network, or set EnableIPv6 to false: %w", v.own, err)
			}
			if err := rights.Note(err); err != nil {
				return err
			}
		}
	}
	return rights.Missing(page)
}
