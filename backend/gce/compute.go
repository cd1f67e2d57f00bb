// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

const pageSize = 500 // most routes or instances in one answer; the API allows no more

// vpc implements cloud.Cloud for the VPC network of this host. Its only table is that VPC network.
type vpc struct {
	cluster   string
	networks  []netip.Prefix
	addresses []netip.Addr // of the external interface
	connect   func(context.Context) (*client, error)

	api *client // nil before the first connection
	// The last Join or Check has set these three.
	table   string // name of the VPC network
	network string // path of the VPC network, with its project
	own     string // target of routes to this host
}

// find connects the client at the first call, and sets table, network and own.
func (v *vpc) find(ctx context.Context) (*client, error) {
	if err := access.Connect(ctx, &v.api, v.connect); err != nil {
		return nil, err
	}

	interfaces, err := v.api.interfaces(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(interfaces, func(n networkInterface) bool { return slices.ContainsFunc(v.addresses, n.has) })
	if i < 0 {
		return nil, fmt.Errorf("no network interface of instance %s has an address of the external interface: the metadata service does not know %v", v.api.instance, v.addresses)
	}

	parts := strings.Split(interfaces[i].Network, "/") // projects/NUMBER/networks/NAME
	if len(parts) != 4 {
		return nil, fmt.Errorf("the metadata service names the VPC network %q: want projects/NUMBER/networks/NAME", interfaces[i].Network)
	}
	if parts[1] != v.api.number {
		return nil, fmt.Errorf("the VPC network %s is shared by project %s, where Google allows no routes to instances of other projects: choose another network, or another backend", parts[3], parts[1])
	}
	v.table = parts[3]
	v.network = interfaces[i].Network
	v.own = targetOf(v.api.zone, v.api.instance)
	return v.api, nil
}

type instance struct {
	CanIPForward bool `json:"canIpForward"`
}

func instancePath(zone, name string) string { return "zones/" + zone + "/instances/" + name }

// Join implements cloud.Cloud. An instance gets packets with foreign addresses if its canIpForward
// is set. If it is not set, Join returns a DroppedError. Join does not set it, because that may
// restart the instance.
func (v *vpc) Join(ctx context.Context) (string, error) {
	api, err := v.find(ctx)
	if err != nil {
		return "", err
	}
	var me instance
	if err := api.call(ctx, api.at("instances.get", http.MethodGet, instancePath(api.zone, api.instance), nil), &me); err != nil {
		return "", err
	}
	if me.CanIPForward {
		return v.own, nil
	}
	return v.own, &cloud.DroppedError{Err: fmt.Errorf("instance %s cannot forward packets of pods, because its canIpForward is off: create it with --can-ip-forward, or see %s", v.own, page)}
}

// Followed implements cloud.Cloud. All instances of the VPC network follow its one table.
func (v *vpc) Followed(_ context.Context, hosts []cloud.Host) ([]string, error) {
	return slices.Repeat([]string{v.table}, len(hosts)), nil
}

// Tables implements cloud.Cloud. It must be called after Join or Check.
func (v *vpc) Tables(ctx context.Context) ([]cloud.Table, error) {
	all, err := v.list(ctx)
	if err != nil {
		return nil, err
	}
	return []cloud.Table{v.tableOf(all)}, nil
}

// tableOf marks routes as idle that get no packets: those of this cluster, or to this host, if a rival
// takes all or a part of them, and foreign ones that are no rivals.
func (v *vpc) tableOf(all []route) cloud.Table {
	rivals := map[netip.Prefix]int{} // least priority number of the rivals to each destination
	own := map[netip.Prefix]int{}    // that of the routes of this cluster, or to this host
	note := func(least map[netip.Prefix]int, r route) {
		if known, found := least[r.dst()]; !found || r.Priority < known {
			least[r.dst()] = r.Priority
		}
	}

	for _, r := range all {
		if v.rivals(r) {
			note(rivals, r)
		}
		if c := v.convert(r); c.Foreign == "" && c.ByCall {
			note(own, r)
		}
	}

	table := cloud.Table{ID: v.table, Global: v.network, Own: true, Several: true}
	seen := map[cloud.Route]bool{}
	for _, r := range all {
		c := v.convert(r)
		most, contested := rivals[c.Dst]
		switch {
		case c.Foreign == "" && c.State == cloud.Carrying && contested && most <= r.Priority:
			c.State = cloud.Idle
		case c.Foreign != "" && c.ByCall && c.State == cloud.Carrying:
			best, found := own[c.Dst]
			if !found {
				best = defaultPriority
			}
			if !v.rivals(r) || r.Priority > best {
				c.State = cloud.Idle
			}
		}
		if !seen[c] { // routes may differ only in their names and priorities
			seen[c] = true
			table.Routes = append(table.Routes, c)
		}
	}
	return table
}

func (v *vpc) convert(r route) cloud.Route { return r.convert(v.table, v.cluster, v.own) }

// rivals reports whether r belongs to another program or cluster, and takes packets from other routes
// to the same destination: from those with a higher priority number, and in part from equal ones.
func (v *vpc) rivals(r route) bool {
	c := v.convert(r)
	// Google disregards routes to instances that do not run. Tags restrict a route to some instances.
	return c.Foreign != "" && c.ByCall && !c.Lost() && len(r.Tags) == 0
}

// list leaves out the routes whose destination is not a prefix.
func (v *vpc) list(ctx context.Context) (all []route, err error) {
	// The filter compares the URL of the network with a regular expression.
	query := url.Values{"filter": {fmt.Sprintf(`network eq ".*/%s"`, v.table)}, "maxResults": {strconv.Itoa(pageSize)}}
	err = access.Pages(query, "pageToken", func() (string, error) {
		var answer struct {
			Items []route `json:"items"`
			Next  string  `json:"nextPageToken"`
		}
		err := v.api.call(ctx, v.api.at("routes.list", http.MethodGet, "global/routes?"+query.Encode(), nil), &answer)
		for _, r := range answer.Items {
			if path.Base(r.Network) == v.table && r.dst().IsValid() {
				all = append(all, r)
			}
		}
		return answer.Next, err
	})
	return all, err
}

// leadingTo returns the static routes to dst that count for all instances.
func leadingTo(dst netip.Prefix, all []route) []route {
	// The API could not filter: an IPv6 prefix has several spellings.
	return slices.DeleteFunc(slices.Clone(all), func(r route) bool { return r.dst() != dst || !r.static() || len(r.Tags) > 0 })
}

// Put implements cloud.Cloud. A route cannot be changed, so Put inserts one that is preferred to
// all routes of this cluster to the same destination, and then deletes those. If the quota has no
// place for one more route, Put may delete a route first. It returns ErrExists if a rival is at least
// as preferred as the new route.
func (v *vpc) Put(ctx context.Context, want cloud.Route, replace bool) error {
	all, err := v.list(ctx)
	if err != nil {
		return err
	}

	present := leadingTo(want.Dst, all)
	right, wrong, priority := v.split(present, want)
	for _, r := range present {
		if v.rivals(r) && r.Priority <= priority {
			return cloud.ErrExists
		}
	}

	for _, r := range wrong {
		if c := v.convert(r); !c.Lost() && c.Target != want.Target && !replace {
			return cloud.ErrExists
		}
	}

	old := slices.DeleteFunc(wrong, func(r route) bool { return !r.belongsTo(v.cluster) })
	if right {
		return v.delete(ctx, old)
	}
	if priority < 0 {
		return fmt.Errorf("a route to %s in %s has the priority 0, which no other route can precede: remove it", want.Dst, v.table)
	}

	r := v.wanted(want, priority)
	err = v.insert(ctx, r)
	if quota, full := errors.AsType[*cloud.QuotaError](err); full && !over(quota, all) {
		old, err = v.exchange(ctx, old, r, err)
	}
	if err != nil {
		return err
	}
	return v.delete(ctx, old)
}

// split says of the routes that are not foreign whether the wanted one is preferred to all others, and
// which these are. priority is the number that the wanted route has or needs; it is negative if no
// number is low enough.
func (v *vpc) split(present []route, want cloud.Route) (right bool, others []route, priority int) {
	own := slices.DeleteFunc(slices.Clone(present), func(r route) bool { return v.convert(r).Foreign != "" })
	slices.SortStableFunc(own, func(a, b route) int { return a.Priority - b.Priority })
	if len(own) == 0 {
		return false, nil, defaultPriority
	}
	if first := own[0]; v.convert(first) == want && (len(own) == 1 || own[1].Priority > first.Priority) {
		return true, own[1:], first.Priority
	}
	return false, own, min(defaultPriority, own[0].Priority-1)
}

// over reports whether there are more routes than the quota allows, as after an operator has lowered
// it. Deleting one route then makes no place for another.
func over(quota *cloud.QuotaError, all []route) bool {
	n := 0
	for _, r := range all {
		if r.static() && r.Gateway == "" { // the quota may not count the default route
			n++
		}
	}
	return quota.Limit > 0 && n > quota.Limit
}

// exchange inserts r after the quota was full, which is the error full. It first deletes one of the
// old routes. left contains the others, or all of them after an error.
func (v *vpc) exchange(ctx context.Context, old []route, r route, full error) (left []route, err error) {
	// A route that leads nowhere, or else to another target: never the only one that is useful.
	i := slices.IndexFunc(old, func(o route) bool { return v.convert(o).Lost() })
	if i < 0 {
		i = slices.IndexFunc(old, func(o route) bool { return o.target() != r.target() })
	}
	if i < 0 {
		return old, full
	}

	former := old[i]
	deleted := v.delete(ctx, []route{former})
	if deleted != nil && !cloud.Transient(deleted) {
		return old, deleted
	}

	// If the deletion got no answer, the former route may be gone all the same. So the new one is
	// inserted without waiting for the next comparison.
	err = v.insert(ctx, r)
	if err == nil {
		return slices.Delete(slices.Clone(old), i, i+1), nil
	}

	// r was refused nevertheless, so the former route comes back.
	if !cloud.Transient(err) && deleted == nil && !v.convert(former).Lost() {
		if e := v.insert(ctx, former.written()); e != nil {
			err = oneline.Join(err, fmt.Errorf("restore route %s: %w", former.Name, e))
		}
	}
	return old, err
}

func (v *vpc) wanted(want cloud.Route, priority int) route {
	zone, name, _ := strings.Cut(want.Target, "/")
	project := "projects/" + v.api.project + "/"
	r := route{
		Description: cloud.Describe(v.cluster, v.networks, want.Dst), DestRange: want.Dst.String(), Priority: priority,
		Network: project + "global/networks/" + v.table, Instance: project + instancePath(zone, name),
	}
	r.Name = r.name(v.cluster)
	return r
}

// insert waits until the route is there.
func (v *vpc) insert(ctx context.Context, r route) error {
	err := v.api.change(ctx, v.api.at("routes.insert", http.MethodPost, "global/routes", r))
	if quota, ok := errors.AsType[*cloud.QuotaError](err); ok {
		return fmt.Errorf("routes.insert: %w", &cloud.QuotaError{Table: v.table, Limit: quota.Limit, Quota: quota.Quota})
	}
	if isStatus(err, http.StatusConflict) { // the name exists: another call is in progress, or the list was old
		return fmt.Errorf("%w: %w", cloud.ErrUnavailable, err)
	}
	return err
}

// delete waits until the routes are gone.
func (v *vpc) delete(ctx context.Context, routes []route) error {
	for _, r := range routes {
		err := v.api.change(ctx, v.api.at("routes.delete", http.MethodDelete, "global/routes/"+r.Name, nil))
		if err != nil && !isStatus(err, http.StatusNotFound) {
			return err
		}
	}
	return nil
}

// Remove implements cloud.Cloud.
func (v *vpc) Remove(ctx context.Context, r cloud.Route) error {
	all, err := v.list(ctx)
	if err != nil {
		return err
	}
	return v.delete(ctx, slices.DeleteFunc(leadingTo(r.Dst, all), func(have route) bool { return have.target() != r.Target || !have.belongsTo(v.cluster) }))
}

// Check implements cloud.Cloud.
func (v *vpc) Check(ctx context.Context) error {
	api, err := v.find(ctx)
	if err != nil {
		return err
	}
	if err := api.checkScopes(ctx); err != nil {
		return err
	}
	if err := v.checkPermissions(ctx); err != nil {
		return err
	}
	if _, err := v.Join(ctx); err != nil {
		return err
	}
	tables, err := v.Tables(ctx)
	if err != nil {
		return err
	}
	return cloud.CheckRanges(tables, v.networks, "the VPC network "+v.table, "Google")
}

// checkPermissions returns an error that names all permissions that this host needs and lacks.
func (v *vpc) checkPermissions(ctx context.Context) error {
	self := v.api.at("", "", instancePath(v.api.zone, v.api.instance), nil).url
	missing, err := v.api.lacks(ctx, "instances.testIamPermissions", self+"/testIamPermissions", "compute.instances.get", "compute.instances.use")
	if err != nil {
		return err
	}

	project := strings.TrimSuffix(v.api.manager, "/") + "/v3/projects/" + v.api.project + ":testIamPermissions"
	needed := []string{"compute.routes.list", "compute.routes.create", "compute.routes.delete", "compute.networks.updatePolicy", "compute.globalOperations.get"}
	more, err := v.api.lacks(ctx, "projects.testIamPermissions", project, needed...)
	if err != nil {
		klog.FromContext(ctx).Info("cannot check the permissions in the project: a call will name a missing one", "reason", err.Error())
	}

	var rights cloud.Rights
	rights.Lack(missing...)
	rights.Lack(more...)
	return rights.Missing(page)
}
