// SPDX-License-Identifier: Apache-2.0

package location

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/rpfilter"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// network implements backend.Network.
type network struct {
	*Backend
	*backend.Notifier
	joint   *joint
	running struct {
		between backend.Network
		inside  backend.Network // nil if this host has no location
	}
	republish <-chan struct{} // see backend.Publisher
	filter    rpfilter.Filter

	peers  map[string]string        // reasons by key: why a peer at the location is not served inside; empty for all other peers
	near   map[string]*subnet.Lease // leases of the peers that are served inside, as the backend inside uses them
	failed map[string]string        // reasons by key: why the kernel has no route to a peer in near
	rivals rivals
	limit  *loglimit.Changes // of log lines
}

// Start implements backend.Backend. A host without a location does not start the backend inside,
// because no peer sends to it by that backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	reconciler, err := b.env.Reconciler(ctx, b.Scope())
	if err != nil {
		return nil, err
	}
	b.joint = newJoint(reconciler)
	n := &network{
		Backend: b, Notifier: backend.NewNotifier(ctx), joint: b.joint, limit: loglimit.NewChanges(loglimit.Burst),
		rivals: newRivals(), peers: map[string]string{}, near: map[string]*subnet.Lease{}, failed: map[string]string{},
	}

	n.Forward(reconciler.Changed())
	if err := n.start(ctx, own); err != nil {
		return nil, oneline.Join(err, n.Close())
	}
	return n, nil
}

func (n *network) start(ctx context.Context, own subnet.Lease) (err error) {
	if n.running.between, err = n.between.Start(ctx, own); err != nil {
		return err
	}
	n.Forward(n.running.between.Changed())
	if p, ok := n.running.between.(backend.Publisher); ok {
		n.republish = p.Republish()
	}

	log := klog.FromContext(ctx)
	between := n.sides.between.Type
	if n.env.Location == "" {
		log.Info("this host has no location: packets to all peers go by the backend between locations", "backend", between)
		return nil
	}
	if own, err = n.ownInside(ctx, own); err == nil {
		n.running.inside, err = n.inside.Start(ctx, own)
	}
	if err != nil {
		return fmt.Errorf("SameLocation: %w", err)
	}
	n.Forward(n.running.inside.Changed())
	if identities, err := n.running.inside.Check(own); err == nil {
		n.rivals.set(own.Key, candidate{identities: identities})
	}
	log.Info("packets to peers at the same location go by another backend", "location", n.env.Location, "backend", n.sides.inside.Type, "others", between)
	return nil
}

// Republish implements backend.Publisher.
func (n *network) Republish() <-chan struct{} { return n.republish }

// Published implements backend.Publisher.
func (n *network) Published(c subnet.Claim) {
	if p, ok := n.running.between.(backend.Publisher); ok {
		p.Published(c)
	}
}

// Check implements backend.Network. It ignores data and identities for the backend inside: if they
// are unusable, the backend between locations serves the peer.
func (n *network) Check(l subnet.Lease) ([]string, error) { return n.running.between.Check(l) }

// Sync implements backend.Network. The backend between locations comes first, because it must be
// able to carry the packets when a route inside is deleted.
func (n *network) Sync(ctx context.Context, set backend.Set) (backend.Outcome, error) {
	keys := n.rivals.change(backend.KeysToSync(set, n.peers), func(key string) candidate { return n.examine(set.Leases[key]) })
	for _, key := range keys {
		n.choose(ctx, key, set.Leases[key])
	}
	out, err := n.running.between.Sync(ctx, set)
	err = oneline.Join(err, n.syncInside(ctx, set, keys, &out))
	if set.All || out.Repaired > 0 {
		n.filter.Loosen(ctx, n.Scope().Devices, n.env.Underlay.Name, "so that packets are lost while a peer changes its location")
	}
	return out, err
}

// syncInside makes the backend inside serve the chosen peers, and adds the result to out.
func (n *network) syncInside(ctx context.Context, set backend.Set, keys []string, out *backend.Outcome) error {
	if !set.Complete {
		n.leaveInside(set, keys)
	}

	began := set.Complete && !n.joint.complete
	n.joint.complete = set.Complete
	if n.running.inside == nil {
		// This host has no location. All there is to do is to delete what an earlier process has left.
		if set.Complete && !began {
			return nil
		}
		report, err := n.joint.Update(ctx, nil, nil, set.Complete)
		out.Repaired += report.Repaired
		return err
	}

	set.Leases = n.near
	set.Changed = keys
	more, err := n.running.inside.Sync(ctx, set)
	out.Add(more)

	// A peer without a route inside is not refused, because the backend between locations serves it.
	before := n.failed
	n.failed = map[string]string{}
	for _, r := range more.Refused {
		n.failed[r.Key] = r.Reason
		if before[r.Key] != r.Reason {
			n.log(ctx, r.Key, r.Reason)
		}
	}
	return err
}

// leaveInside makes the next change delete routes that an earlier process has left to peers that are
// not served inside, so that packets to them do not continue in clear text. Routes to unknown peers
// stay until all peers are known.
func (n *network) leaveInside(set backend.Set, keys []string) {
	sweeper, ok := n.joint.Reconciler.(backend.Sweeper)
	if !ok {
		return // in a migration, which decides itself what is deleted
	}

	var routes []dataplane.Object
	for _, key := range keys {
		if l := set.Leases[key]; l != nil && n.near[key] == nil {
			for _, e := range l.Endpoints {
				routes = append(routes, dataplane.NewRoute(e.Subnet, netip.Addr{}, "", false))
			}
		}
	}
	sweeper.SweepAt(routes...)
}

// examine returns the zero candidate if the peer has gone, and l is nil, or if this host has no location.
func (n *network) examine(l *subnet.Lease) (c candidate) {
	if l == nil || n.running.inside == nil {
		return candidate{}
	}
	if c.lease, c.why = n.asInside(l); c.lease == nil {
		return c
	}
	var err error
	if c.identities, err = n.running.inside.Check(*c.lease); err != nil {
		return candidate{why: fmt.Sprintf("its data for %s cannot be used: %v", n.sides.inside.Type, err)}
	}
	return c
}

// choose decides whether the backend inside serves a peer. l is nil if the peer has gone.
func (n *network) choose(ctx context.Context, key string, l *subnet.Lease) {
	before := n.peers[key]
	delete(n.near, key)
	delete(n.peers, key)
	if l == nil {
		return
	}

	inside, why := n.rivals.decide(key)
	n.peers[key] = why
	if why != "" && why != before {
		n.log(ctx, key, why)
	}
	if inside != nil {
		n.near[key] = inside
	}
}

func (n *network) log(ctx context.Context, key, reason string) {
	if log, ok := n.limit.Next(klog.FromContext(ctx)); ok {
		log.Error(nil, "packets to a peer at the same location go by the backend between locations", "lease", key, "backend", n.sides.between.Type, "reason", reason)
	}
}

func (n *network) isInside(key string) bool { return n.near[key] != nil && n.failed[key] == "" }

// Choice implements backend.Chooser.
func (n *network) Choice(key string) backend.Choice {
	why, known := n.peers[key]
	if !known {
		return backend.Choice{}
	}
	if n.isInside(key) {
		return backend.Choice{Backend: n.sides.inside.Type}
	}
	return backend.Choice{Backend: n.sides.between.Type, Waiting: cmp.Or(why, n.failed[key])}
}

// Report implements backend.Inspector. Mode and drops are those of the backend between locations.
func (n *network) Report() backend.NetworkReport {
	ways := &status.Location{Name: n.env.Location, Inside: n.sides.inside.Type, Between: n.sides.between.Type}
	for key := range n.peers {
		if n.isInside(key) {
			ways.ByInside++
		} else {
			ways.ByBetween++
		}
	}

	r := backend.Report(n.running.between)
	r.Counts = n.joint.Counts()
	r.Location = ways
	return r
}

// Objects implements backend.Inspector.
func (n *network) Objects(key string) []backend.ObjectReport {
	all := backend.Objects(n.running.between, key)
	if n.isInside(key) {
		all = append(all, backend.Objects(n.running.inside, key)...)
	}
	return all
}

// Close implements backend.Network.
func (n *network) Close() error {
	n.Notifier.Close()
	var errs []error
	for _, part := range []backend.Network{n.running.inside, n.running.between} {
		if part != nil {
			errs = append(errs, part.Close())
		}
	}
	return oneline.Join(append(errs, n.joint.Close())...)
}
