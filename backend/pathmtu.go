// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/probe/pathmtu"
	"github.com/flanneld/flanneld/subnet"
)

// leastPathMTU is the least MTU in bytes that a route gets over IPv4, because every host must
// accept packets of this size (RFC 791). A path that seems to be narrower belongs to a host that
// drops large echo requests. Over IPv6 the least MTU is that of Family.MinMTU.
const leastPathMTU = 576

// probe makes p find the MTUs of the paths to peers, and set the MTU of each narrow path on the route to the
// peer. All other routes get no MTU.
func (e Env) probe(ctx context.Context, p *Programmer, scope dataplane.Scope) error {
	have, err := e.Kernel.Read(ctx, scope)
	if err != nil {
		return fmt.Errorf("read kernel state: %w", err)
	}
	// After a restart the paths keep the MTUs that this daemon's routes have in the kernel.
	before := map[netip.Prefix]int{}
	for route := range have.AllRoutes() {
		if route.MTU > 0 && route.Protocol == dataplane.Protocol && slices.Contains(scope.Devices, route.Dev) {
			before[route.Dst] = route.MTU
		}
	}

	c := pathmtu.Config{Limit: e.PathLimit, Before: before, Resized: p.Notify}
	if c.Limit == nil {
		c.Limit = pathmtu.NewLimit()
	}
	if e.Warn != nil {
		c.Changed = func(c pathmtu.Change) {
			e.Warn("FlannelPathMTU", fmt.Sprintf("%s at %s carries packets of up to %d bytes, before %d, of %d: %s", c.Subnet, c.PublicIP, c.Now, c.Before, c.Full, c.Key))
		}
	}
	p.prober = pathmtu.NewProber(c)
	if p.whole != nil {
		p.whole.probing[p.number].Store(p.prober)
	}
	p.Go(p.prober.Run)
	return nil
}

// WithResized returns peers with further keys in Changed: those of the peers with a path whose MTU
// has changed since the last call. Sync calls it. A network that reads Changed itself before it
// calls Sync must call WithResized first, and pass the result to Sync.
func (p *Programmer) WithResized(peers Set) Set {
	if p.prober == nil {
		return peers
	}
	all := slices.Clone(peers.Changed) // they belong to the caller of Sync
	for _, key := range p.prober.Take() {
		if !slices.Contains(peers.Changed, key) {
			all = append(all, key)
		}
	}
	peers.Changed = all
	return peers
}

// PathMTU implements NetworkReport.PathMTU. Of two parts it returns the smaller one of the path MTUs that they know.
func (p *Programmer) PathMTU(subnet netip.Prefix) (mtu int) {
	if p.prober != nil {
		mtu = p.prober.Size(subnet)
	}
	for i := range p.probing {
		if part := p.probing[i].Load(); part != nil {
			mtu = least.Of(mtu, part.Size(subnet))
		}
	}
	return mtu
}

// narrow sets the MTUs of narrow paths on the routes in objects, whose array it may change. There may be only
// one route to the whole network. A subnet with a narrow path then gets a route of its own. narrow is safe
// for concurrent use.
func (p *Programmer) narrow(l subnet.Lease, objects []dataplane.Object) []dataplane.Object {
	var paths []pathmtu.Path
	var routes []dataplane.Route
	for _, e := range l.Endpoints {
		r, _ := p.routeTo(e.Subnet, objects)
		if path, ok := pathBy(r, e, p.Base); ok {
			paths = append(paths, path)
			routes = append(routes, r)
		}
	}

	p.prober.Aim(l.Key, paths) // and no longer at former paths to the peer
	for i, r := range routes {
		mtu := p.prober.Size(paths[i].Subnet)
		if mtu == 0 {
			continue
		}
		objects = slices.DeleteFunc(objects, func(o dataplane.Object) bool { return o == dataplane.Object(r) })
		r.MTU = mtu
		objects = append(objects, r)
	}
	return objects
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
