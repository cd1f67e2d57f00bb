// SPDX-License-Identifier: Apache-2.0

package tencentvpc

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

const pageSize = 100 // most tables or instances in one answer; the API allows no more

// vpc implements cloud.Cloud for the VPC of this host. Its table is that of the subnet of the external
// interface. The target of a route to a host is the private IPv4 address of the instance.
type vpc struct {
	cluster   string
	networks  []netip.Prefix
	addresses []netip.Addr // of the external interface
	connect   func(context.Context) (*client, error)

	api *client // nil before the first connection
	own place   // as the last Join or Check has found it
	all []table // all tables of the VPC, as the method table has last read them
}

// Join implements cloud.Cloud. It changes nothing in the cloud, because instances of Tencent Cloud
// always get packets with foreign addresses.
func (v *vpc) Join(ctx context.Context) (string, error) {
	if err := access.Connect(ctx, &v.api, v.connect); err != nil {
		return "", err
	}

	own, err := v.api.find(ctx, v.addresses)
	if err != nil {
		return "", err
	}
	v.own = own
	return own.address.String(), nil
}

// Followed implements cloud.Cloud. It reads all instances of the VPC, because the API cannot filter by
// many addresses. It finds the table of each host in v.all, which Tables has read before.
func (v *vpc) Followed(ctx context.Context, hosts []cloud.Host) ([]string, error) {
	instances, err := v.instances(ctx)
	if err != nil {
		return nil, err
	}

	at := map[netip.Addr]instance{} // by each address
	for _, i := range instances {
		for _, a := range access.Addresses(i.Public...) {
			at[a] = i
		}
	}
	maps.Copy(at, instances) // last: private addresses win

	tables := make([]string, len(hosts))
	for n, h := range hosts {
		for _, a := range h.Addresses {
			if i, ok := at[a]; ok {
				t, _ := choose(v.all, i.Place.Subnet)
				tables[n] = t.ID
				break
			}
		}
	}
	return tables, nil
}

// Tables implements cloud.Cloud. It must be called after Join or Check.
func (v *vpc) Tables(ctx context.Context) ([]cloud.Table, error) {
	t, err := v.table(ctx)
	if err != nil {
		return nil, err
	}
	table := cloud.Table{ID: t.ID, Own: true, Several: true}
	for _, r := range t.Routes {
		if c, ok := v.convert(r, t.ID); ok && !slices.Contains(table.Routes, c) {
			table.Routes = append(table.Routes, c)
		}
	}

	tables := []cloud.Table{table}
	other := func(r cloud.Route) bool { return r.Target != v.own.address.String() }
	return tables, cloud.Look(ctx, tables, v.networks, other, v.running)
}

// running reports whether instances run, by address: a route does not say whether its target exists and runs.
func (v *vpc) running(ctx context.Context, addresses []string) (map[string]bool, error) {
	if len(addresses) == 0 {
		return nil, nil
	}

	instances, err := v.instances(ctx)
	if err != nil {
		return nil, err
	}
	running := map[string]bool{}
	for a, i := range instances {
		running[a.String()] = i.runs()
	}
	return running, nil
}

// pages calls one with the offset of each page of a list. one returns the number of items of the page,
// and that of all pages.
func pages(one func(offset int) (got, total int, err error)) error {
	for offset, first := 0, -1; ; {
		got, total, err := one(offset)
		if err != nil {
			return err
		}
		if first < 0 {
			first = total
		}

		// If the list has changed meanwhile, an item may be missing in all pages, and its host would
		// look lost.
		offset += got
		if total != first || offset > total || got == 0 && offset < total {
			return fmt.Errorf("%w with all items of a list: have %d of %d, and %d when it began", cloud.ErrUnavailable, offset, total, first)
		}
		if offset == total {
			return nil
		}
	}
}

// table reads all tables of the VPC into v.all, and returns that of this host's subnet.
func (v *vpc) table(ctx context.Context) (table, error) {
	var all []table
	err := pages(func(offset int) (int, int, error) {
		var answer struct {
			TotalCount int
			Tables     []table `json:"RouteTableSet"`
		}
		// This call takes the offset and the limit as strings.
		params := object{"Filters": filter("vpc-id", v.own.vpc), "Offset": strconv.Itoa(offset), "Limit": strconv.Itoa(pageSize)}
		err := v.api.call(ctx, v.api.vpc, "DescribeRouteTables", params, &answer)
		all = append(all, answer.Tables...)
		return len(answer.Tables), answer.TotalCount, err
	})
	if err != nil {
		return table{}, err
	}

	v.all = all
	t, ok := choose(all, v.own.subnet)
	if !ok {
		return table{}, fmt.Errorf("Tencent Cloud knows no route table of subnet %s in %s", v.own.subnet, v.own.vpc)
	}
	return t, nil
}

func filter(name, value string) []object {
	return []object{{"Name": name, "Values": []string{value}}}
}

// instances returns the instances of the VPC by private address.
func (v *vpc) instances(ctx context.Context) (map[netip.Addr]instance, error) {
	all := map[netip.Addr]instance{}
	err := pages(func(offset int) (int, int, error) {
		var answer struct {
			TotalCount int
			Instances  []instance `json:"InstanceSet"`
		}
		params := object{"Filters": filter("vpc-id", v.own.vpc), "Offset": offset, "Limit": pageSize}
		err := v.api.call(ctx, v.api.cvm, "DescribeInstances", params, &answer)
		for _, i := range answer.Instances {
			for _, a := range access.Addresses(i.Private...) {
				all[a] = i
			}
		}
		return len(answer.Instances), answer.TotalCount, err
	})
	if _, ok := all[v.own.address]; err == nil && !ok { // an answer without this instance may also be without others that run
		err = fmt.Errorf("%w about this instance yet: CVM does not know %s", cloud.ErrUnavailable, v.own.address)
	}
	return all, err
}

// to returns the routes to dst that a call has made.
func (t table) to(dst netip.Prefix) []route {
	return slices.DeleteFunc(slices.Clone(t.Routes), func(r route) bool { return r.dst() != dst || r.Type != user })
}

// convert returns false if the destination of r is not a prefix.
func (v *vpc) convert(r route, table string) (cloud.Route, bool) {
	c := cloud.Route{Table: table, Dst: r.dst(), State: r.state(), ByCall: r.Type == user, Target: cmp.Or(r.Target, r.Kind, "an unknown target")}
	switch {
	case !c.ByCall:
	case r.Kind != instanceKind:
		c.Foreign = "which leads to no instance"
	case c.Target != v.own.address.String(): // only this host needs a route to this host
		c.Foreign = cloud.ForeignMark(r.Description, v.cluster)
	}
	return c, c.Dst.IsValid()
}

func (v *vpc) ofOther(r route) bool { return cloud.OfOther(r.Description, v.cluster) }

func (v *vpc) write(r cloud.Route) route {
	yes := true
	return route{Dst: r.Dst.String(), Kind: instanceKind, Target: r.Target, Description: cloud.Describe(v.cluster, v.networks, r.Dst), Enabled: &yes}
}

func (v *vpc) change(ctx context.Context, action, table string, routes ...route) error {
	return v.api.call(ctx, v.api.vpc, action, object{"RouteTableId": table, "Routes": routes}, nil)
}

// Put implements cloud.Cloud. It first reads the table, because two routes to one destination may
// share the packets. It deletes the disabled routes of this cluster, because another route must not
// become equal to one of them when it is replaced. Disabled routes carry no packets. If several enabled
// routes are left, Put replaces one of them in place, and deletes the rest. It returns ErrExists if
// there is an enabled foreign route.
func (v *vpc) Put(ctx context.Context, r cloud.Route, replace bool) error {
	t, err := v.table(ctx)
	if err != nil {
		return err
	}

	var present []route
	for _, have := range t.to(r.Dst) {
		c, _ := v.convert(have, r.Table)
		if (c.Foreign != "" || v.ofOther(have)) && have.disabled() {
			continue // it carries no packets, and may stay
		}
		if c.Foreign != "" {
			return cloud.ErrExists
		}
		present = append(present, have)
	}
	if len(present) > 0 && !replace {
		return cloud.ErrExists
	}

	var enabled []route
	for _, have := range present {
		if !have.disabled() {
			enabled = append(enabled, have)
		} else if err := v.delete(ctx, r.Table, have); err != nil {
			return err
		}
	}
	if len(enabled) > 0 {
		err = v.replace(ctx, r, enabled)
	} else {
		err = v.change(ctx, "CreateRoutes", r.Table, v.write(r))
	}
	if !isCode(err, "InvalidParameterValue.Duplicate") {
		return err
	}
	if replace { // the list of routes is older than the last call
		return fmt.Errorf("%w with the present routes: %w", cloud.ErrUnavailable, err)
	}
	return cloud.ErrExists
}

// replace leaves r as the only one of the present routes, of which there must be one.
func (v *vpc) replace(ctx context.Context, r cloud.Route, present []route) error {
	keep := max(slices.IndexFunc(present, func(have route) bool {
		c, _ := v.convert(have, r.Table)
		return c == r
	}), 0)
	if c, _ := v.convert(present[keep], r.Table); c != r {
		now := v.write(r)
		now.ID = present[keep].ID
		now.Item = present[keep].Item
		if err := v.change(ctx, "ReplaceRoutes", r.Table, now); err != nil {
			return err
		}
	}

	for _, other := range slices.Delete(present, keep, keep+1) {
		if err := v.delete(ctx, r.Table, other); err != nil {
			return err
		}
	}
	return nil
}

func (v *vpc) delete(ctx context.Context, table string, r route) error {
	err := v.change(ctx, "DeleteRoutes", table, r.id())
	if isCode(err, "ResourceNotFound") {
		return nil
	}
	return err
}

// Remove implements cloud.Cloud. DeleteRoutes takes no target. So Remove reads right before the call
// where the routes lead, and deletes only those to the target of r.
func (v *vpc) Remove(ctx context.Context, r cloud.Route) error {
	t, err := v.table(ctx)
	if err != nil {
		return err
	}
	for _, have := range t.to(r.Dst) {
		if c, _ := v.convert(have, r.Table); c.Target == r.Target && c.Foreign == "" && !v.ofOther(have) {
			if err := v.delete(ctx, r.Table, have); err != nil {
				return err
			}
		}
	}
	return nil
}

// Check implements cloud.Cloud.
func (v *vpc) Check(ctx context.Context) error {
	if _, err := v.Join(ctx); err != nil {
		return err
	}
	for _, n := range v.networks {
		if n.Contains(v.own.address) {
			return fmt.Errorf("the network %s contains %s and so overlaps the VPC, where Tencent Cloud allows no routes to instances: choose another Network", n, v.own.address)
		}
	}

	t, err := v.table(ctx)
	if err != nil {
		return err
	}
	if _, err := v.instances(ctx); err != nil {
		return err
	}

	// No table has such a route, and no call can make it, because no IPv4 prefix has 33 bits.
	nowhere := route{ID: math.MaxInt32, Dst: "192.0.2.0/33", Kind: instanceKind, Target: v.own.address.String()}
	var rights cloud.Rights
	for _, call := range []struct {
		action string
		route  route
	}{{"CreateRoutes", route{Dst: nowhere.Dst, Kind: nowhere.Kind, Target: nowhere.Target}}, {"ReplaceRoutes", nowhere}, {"DeleteRoutes", nowhere.id()}} {
		err := v.api.try(ctx, call.action, object{"RouteTableId": t.ID, "Routes": []route{call.route}})
		if err := rights.Note(err); err != nil {
			return err
		}
	}
	return rights.Missing(page)
}
