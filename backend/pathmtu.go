// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/probe/pathmtu"
	"github.com/flanneld/flanneld/subnet"
)

// leastPathMTU is the least MTU in bytes that a route gets over IPv4, because every host must
// accept packets of this size (RFC 791). A path that seems to be narrower belongs to a host that
// drops large echo requests. Over IPv6 the least MTU is that of Family.MinMTU.
const leastPathMTU = 576

// narrowing is a Reconciler that also finds the MTUs of the paths to peers. A Programmer that has a
// narrowing sets the MTU of each narrow path on the route to the peer. All other routes get no MTU.
type narrowing struct {
	Reconciler
	scope    dataplane.Scope
	notifier *Notifier
	prober   *pathmtu.Prober
}

// Reconciler returns a Reconciler for scope. The caller closes it. With ProbesMTU it also finds the
// MTUs of the paths to peers, which a Programmer writes into their routes.
func (e Env) Reconciler(ctx context.Context, scope dataplane.Scope) (r Reconciler, err error) {
	if e.NewReconciler != nil {
		r, err = e.NewReconciler(scope)
	} else {
		r, err = dataplane.NewReconciler(dataplane.Config{Kernel: e.Kernel, Scope: scope, Resync: e.Resync})
	}
	if err != nil || !e.ProbesMTU {
		return r, err
	}
	return e.narrowing(ctx, r, scope)
}

// narrowing wraps r, which it closes if it fails.
func (e Env) narrowing(ctx context.Context, r Reconciler, scope dataplane.Scope) (Reconciler, error) {
	have, err := e.Kernel.Read(ctx, scope)
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("read kernel state: %w", err), r.Close())
	}
	// After a restart the paths keep the MTUs that this daemon's routes have in the kernel.
	before := map[netip.Prefix]int{}
	for route := range have.AllRoutes() {
		if route.MTU > 0 && route.Protocol == dataplane.Protocol && slices.Contains(scope.Devices, route.Dev) {
			before[route.Dst] = route.MTU
		}
	}

	n := &narrowing{Reconciler: r, scope: scope, notifier: NewNotifier(ctx)}
	c := pathmtu.Config{Limit: e.PathLimit, Before: before, Resized: n.notifier.Notify}
	if c.Limit == nil {
		c.Limit = pathmtu.NewLimit()
	}
	if e.Warn != nil {
		c.Changed = func(c pathmtu.Change) {
			e.Warn("FlannelPathMTU", fmt.Sprintf("%s at %s carries packets of up to %d bytes, before %d, of %d: %s", c.Subnet, c.PublicIP, c.Now, c.Before, c.Full, c.Key))
		}
	}

	n.prober = pathmtu.NewProber(c)
	n.notifier.Forward(r.Changed())
	n.notifier.Go(n.prober.Run)
	return n, nil
}

// Changed implements Reconciler.
func (n *narrowing) Changed() <-chan struct{} { return n.notifier.Changed() }

// Close implements Reconciler.
func (n *narrowing) Close() error {
	n.notifier.Close()
	return n.Reconciler.Close()
}

// changed adds the keys of the peers with a path whose MTU has changed since the last call.
func (n *narrowing) changed(keys []string) []string {
	all := slices.Clone(keys) // they belong to the caller of Sync
	for _, key := range n.prober.Take() {
		if !slices.Contains(keys, key) {
			all = append(all, key)
		}
	}
	return all
}

// narrow sets the MTUs of narrow paths on the routes in objects, whose array it may change. It is
// safe for concurrent use.
func (n *narrowing) narrow(l subnet.Lease, objects []dataplane.Object, base dataplane.State) []dataplane.Object {
	var paths []pathmtu.Path
	var routes []dataplane.Route
	for _, e := range l.Endpoints {
		r, ok := routeTo(e.Subnet, objects)
		if !ok {
			// There may be only one route to the whole network. A subnet with a narrow path then
			// gets a route of its own.
			r, ok = n.wide(e.Subnet, base)
		}
		path, onDevice := pathBy(r, e, base)
		if ok && onDevice {
			paths = append(paths, path)
			routes = append(routes, r)
		}
	}

	n.prober.Aim(l.Key, paths) // and no longer at former paths to the peer
	for i, r := range routes {
		mtu := n.prober.Size(paths[i].Subnet)
		if mtu == 0 {
			continue
		}
		objects = slices.DeleteFunc(objects, func(o dataplane.Object) bool { return o == dataplane.Object(r) })
		r.MTU = mtu
		objects = append(objects, r)
	}
	return objects
}

func routeTo(dst netip.Prefix, objects []dataplane.Object) (dataplane.Route, bool) {
	for _, o := range objects {
		if r, ok := o.(dataplane.Route); ok && r.Dst == dst {
			return r, true
		}
	}
	return dataplane.Route{}, false
}

// wide makes a route to dst alone, through the device of base's route to the network around it.
func (n *narrowing) wide(dst netip.Prefix, base dataplane.State) (dataplane.Route, bool) {
	for _, network := range n.scope.Networks {
		if !prefix.Contains(network, dst) {
			continue
		}
		for _, r := range base.Routes[network] {
			if r.Type == dataplane.Unicast {
				return dataplane.NewRoute(dst, netip.Addr{}, r.Dev, false), true
			}
		}
	}
	return dataplane.Route{}, false
}

// pathBy returns the path that packets of route r take to endpoint e. ok is false if the echo
// requests would have no address to come from.
func pathBy(r dataplane.Route, e subnet.Endpoint, base dataplane.State) (_ pathmtu.Path, ok bool) {
	link, ok := base.Links[r.Dev]
	if !ok {
		return pathmtu.Path{}, false
	}

	for a := range base.Addrs {
		if from := a.Prefix.Addr(); a.Dev == r.Dev && from.Is4() == e.Subnet.Addr().Is4() {
			return pathmtu.Path{
				Subnet: e.Subnet, Device: r.Dev, From: from, To: e.Subnet.Addr(), PublicIP: e.PublicIP,
				Full: link.MTU, Least: max(leastPathMTU, e.Family().MinMTU()),
			}, true
		}
	}
	return pathmtu.Path{}, false
}
