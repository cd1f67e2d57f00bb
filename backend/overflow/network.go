// SPDX-License-Identifier: Apache-2.0

package overflow

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/kernel/rpfilter"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// network implements backend.Network.
type network struct {
	*Backend
	*backend.Notifier
	*cloudnet.RouteKeeper
	tunnel backend.Network
	filter rpfilter.Filter

	own       subnet.Lease
	data      map[prefix.Family]data // of this host
	published map[prefix.Family]data // of this host, as the store has it
	compared  bool                   // the routes were compared since the start
	failed    error                  // error of the last comparison

	leases map[string]*subnet.Lease // of the peers that need the tunnel, as the tunnel uses them
	peers  map[string]peer          // by lease key
	logged string                   // kind of the logged problem of the routes to this host; empty if there is none
}

// peer is another host.
type peer struct {
	obstacle string // why the host needs the tunnel; empty if the cloud carries the packets
	refused  string // why the tunnel cannot reach the host although it needs that; empty if it can
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	n := &network{
		Backend: b, Notifier: backend.NewNotifier(ctx), own: own,
		data: map[prefix.Family]data{}, published: map[prefix.Family]data{},
		leases: map[string]*subnet.Lease{}, peers: map[string]peer{},
	}

	for _, e := range own.Endpoints {
		d, _, err := decode(e.Data)
		if err != nil {
			return nil, err
		}
		n.data[e.Family()] = d
		n.published[e.Family()] = d
	}

	var err error
	if n.tunnel, err = b.tunnel.Start(ctx, *b.tunnelled(&own, func(subnet.Endpoint) bool { return true })); err != nil {
		return nil, err
	}
	n.Forward(n.tunnel.Changed())
	n.RouteKeeper = b.cloud.StartKeeper(own, n.Notifier)
	return n, nil
}

// Check implements backend.Network. It accepts a lease with unusable data for the tunnel, and
// returns no identities for it, because that data does not matter while the cloud carries the
// packets.
func (n *network) Check(l subnet.Lease) ([]string, error) {
	for _, e := range l.Endpoints {
		if _, _, err := decode(e.Data); err != nil {
			return nil, fmt.Errorf("%s: %w", e.Family(), err)
		}
	}
	identities, err := n.tunnel.Check(*n.tunnelled(&l, hasTunnel))
	if err != nil {
		return nil, nil //nolint:nilerr // choose refuses the peer if it needs the tunnel
	}
	return identities, nil
}

func hasTunnel(e subnet.Endpoint) bool {
	d, _, err := decode(e.Data)
	return err == nil && d.Overflow != nil
}

// Sync implements backend.Network. It reports an error of the cloud, but does not return it,
// because the tunnel can carry the packets.
func (n *network) Sync(ctx context.Context, set backend.Set) (backend.Outcome, error) {
	n.SetPeers(set)
	repaired, first, republish := n.refresh()

	// This host decides by the data that the store has, because peers do the same. Otherwise the packets of the two
	// directions would travel different ways while the store is unavailable.
	if set.Published != nil {
		for _, e := range set.Published.Endpoints {
			n.published[e.Family()], _, _ = decode(e.Data) // refresh has encoded the data, so it can be decoded
		}
	}

	all := set.All || first || republish || set.Published != nil
	keys := backend.KeysToSync(backend.Set{Leases: set.Leases, Changed: set.Changed, All: all}, n.peers)
	for _, key := range keys {
		n.choose(key, set.Leases[key])
	}
	set.Leases = n.leases
	set.Changed = keys
	out, err := n.tunnel.Sync(ctx, set)

	out.Choice = n.choice
	out.Republish = republish
	out.Repaired += repaired
	for key, p := range n.peers {
		if p.refused != "" {
			out.Refused = append(out.Refused, subnet.Refusal{Key: key, Reason: p.refused})
		}
	}
	if set.All || out.Repaired > 0 {
		n.filter.Loosen(ctx, n.Describe().Scope.Devices, n.cloud.Env.Underlay.Name,
			"so that packets are lost while a peer changes between the cloud and the tunnel")
	}
	if n.compared {
		n.logProblem(ctx)
	}
	return out, err
}

// refresh updates the data of this host after a comparison of the routes. first is set after the first one, and
// changed if the data must be published. repaired is the number of routes that were repaired since the last call.
func (n *network) refresh() (repaired int, first, changed bool) {
	repaired, compared, failed := n.Last()
	if !compared {
		return 0, false, false
	}

	first = !n.compared
	n.compared = true
	n.failed = failed
	report := n.CloudRoutes()
	own := n.own
	own.Endpoints = slices.Clone(own.Endpoints)

	for i, e := range own.Endpoints {
		d := n.data[e.Family()].after(report, e.Subnet, failed)
		raw := d.encode()
		n.data[e.Family()] = d
		own.Endpoints[i].Data = raw

		// A new host has just put its first route. The next comparison sees that, and changes the data
		// again, so it is not worth a write now.
		soon := n.published[e.Family()].Table == "" && d.Table != "" && !d.routed() && failed == nil
		changed = changed || string(raw) != string(e.Data) && !soon
	}
	if changed {
		n.own = own
		present := maps.Clone(n.data)
		n.present.Store(&present)
	}
	return repaired, first, changed
}

// choose decides whether the cloud or the tunnel serves a peer. l is nil if the peer has gone.
func (n *network) choose(key string, l *subnet.Lease) {
	delete(n.leases, key)
	delete(n.peers, key)
	if l != nil {
		n.peers[key] = n.serve(key, l)
	}
}

// serve decides for each family whether the cloud or the tunnel carries the packets to a peer. If
// neither can, it refuses the peer.
func (n *network) serve(key string, l *subnet.Lease) (p peer) {
	var withTunnel []prefix.Family
	for _, e := range l.Endpoints {
		d, known, _ := decode(e.Data) // Check has refused data that cannot be read
		own := n.published[e.Family()]
		if !known { // only the cloud can carry packets to this peer, and it does not read what this host publishes
			own = n.data[e.Family()]
			d = data{Table: own.Table, Routed: []string{own.Table}}
		}

		why := obstacle(own, d)
		unseen := !n.compared || own.Table != "" && n.failed == nil || cloud.Kind(n.failed) == "waiting"
		if why == "" || !known && unseen { // the route may only not be seen yet, which is no reason to refuse a peer
			continue
		}
		if d.Overflow == nil {
			p.refused = fmt.Sprintf("it publishes no data for %s, and the cloud does not carry the packets: %s",
				n.side.Type, why)
			continue
		}
		p.obstacle = why
		withTunnel = append(withTunnel, e.Family())
	}
	if len(withTunnel) == 0 {
		return p
	}

	own := n.tunnelled(l, func(e subnet.Endpoint) bool { return slices.Contains(withTunnel, e.Family()) })
	if _, err := n.tunnel.Check(*own); err != nil {
		p.refused = fmt.Sprintf("its data for %s cannot be used: %v, and the cloud does not carry the packets: %s",
			n.side.Type, err, p.obstacle)
		return p
	}
	n.leases[key] = own
	return p
}

// choice implements backend.Outcome.Choice.
func (n *network) choice(key string) backend.Choice {
	p, known := n.peers[key]
	switch {
	case !known || p.refused != "":
		return backend.Choice{}
	case p.obstacle != "":
		return backend.Choice{Backend: n.side.Type, Waiting: p.obstacle}
	}
	return backend.Choice{Backend: n.cloud.Type}
}

// Report implements backend.Network.
func (n *network) Report() backend.NetworkReport {
	ways := status.Overflow{Tunnel: n.side.Type}
	if n.compared {
		ways.Problem = problem(n.data, n.failed, n.side.Type)
	}
	for _, p := range n.peers {
		switch {
		case p.refused != "":
		case p.obstacle != "":
			ways.ByTunnel++
		default:
			ways.ByCloud++
		}
	}

	routes := n.CloudRoutes()
	r := n.tunnel.Report()
	r.Cloud = &routes
	r.Overflow = &ways
	return r
}

// Close implements backend.Network.
func (n *network) Close() error {
	n.Notifier.Close()
	return n.tunnel.Close()
}
