// SPDX-License-Identifier: Apache-2.0

package location

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

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
	*backend.Programmer // which the two backends share

	running struct {
		between backend.Network
		inside  backend.Network // nil if this host has no location
	}
	filter rpfilter.Filter

	peers  map[string]string        // reasons by key: why a peer at the location is not served inside; empty for all other peers
	near   map[string]*subnet.Lease // leases of the peers that are served inside, as the backend inside uses them
	failed map[string]string        // reasons by key: why the kernel has no route to a peer in near
	rivals rivals
	limit  *loglimit.Changes // of log lines
}

// Start implements backend.Backend. A host without a location does not start the backend inside,
// because no peer sends to it by that backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	kernel, err := b.env.Programmer(ctx, b.Describe().Scope)
	if err != nil {
		return nil, err
	}
	kernel.Share(ctx, func(key string) []dataplane.Object {
		return slices.Concat(kernel.Parts[between].Wanted(key), kernel.Parts[inside].Wanted(key))
	})
	b.kernel = kernel
	n := &network{
		Backend: b, Programmer: kernel, limit: loglimit.NewChanges(loglimit.Burst),
		rivals: newRivals(), peers: map[string]string{}, near: map[string]*subnet.Lease{}, failed: map[string]string{},
	}

	if err := n.start(ctx, own); err != nil {
		return nil, oneline.Join(err, n.Close())
	}
	return n, nil
}

func (n *network) start(ctx context.Context, own subnet.Lease) (err error) {
	if n.running.between, err = n.between.Start(ctx, own); err != nil {
		return err
	}

	log := klog.FromContext(ctx)
	between := n.sides.between.Type
	if n.env.Location == "" {
		log.Info("this host has no location: packets to all peers go by the backend between locations",
			"backend", between)
		return nil
	}

	if own, err = n.ownInside(ctx, own); err == nil {
		n.running.inside, err = n.inside.Start(ctx, own)
	}
	if err != nil {
		return fmt.Errorf("SameLocation: %w", err)
	}

	// The backend inside serves no peer that has an identity of this host.
	if identities, err := n.running.inside.Check(own); err == nil {
		n.rivals.set(own.Key, candidate{identities: identities})
	}

	log.Info("packets to peers at the same location go by another backend",
		"location", n.env.Location, "backend", n.sides.inside.Type, "others", between)
	return nil
}

// Check implements backend.Network. It ignores data and identities for the backend inside: if they
// are unusable, the backend between locations serves the peer.
func (n *network) Check(l subnet.Lease) ([]string, error) { return n.running.between.Check(l) }

// Sync implements backend.Network. Both backends state what they want before anything is written.
func (n *network) Sync(ctx context.Context, set backend.Set) (backend.Outcome, error) {
	keys := n.rivals.change(backend.KeysToSync(set, n.peers), func(key string) candidate { return n.examine(set.Leases[key]) })
	for _, key := range keys {
		n.choose(ctx, key, set.Leases[key])
	}

	out, err := n.running.between.Sync(ctx, set)
	if n.running.inside != nil {
		near := set
		near.Leases = n.near
		near.Changed = keys
		more, failed := n.running.inside.Sync(ctx, near)
		out.Add(more)
		err = oneline.Join(err, failed)
	}

	if !set.Complete {
		n.leaveInside(set, keys)
	}
	written, failed := n.Programmer.Sync(ctx, set)
	out.Add(written)
	out.Choice = n.choice
	n.noteFailed(ctx, written.Refused)
	if set.All || out.Repaired > 0 {
		n.filter.Loosen(ctx, n.Describe().Scope.Devices, n.env.Underlay.Name,
			"so that packets are lost while a peer changes its location")
	}
	return out, oneline.Join(err, failed)
}

// noteFailed records the peers without a route inside. They are not refused, because the backend between
// locations serves them.
func (n *network) noteFailed(ctx context.Context, refused []subnet.Refusal) {
	before := n.failed
	n.failed = map[string]string{}
	for _, r := range refused {
		n.failed[r.Key] = r.Reason
		if before[r.Key] != r.Reason {
			n.log(ctx, r.Key, r.Reason)
		}
	}
}

// leaveInside makes the next change delete routes that an earlier process has left to peers that are
// not served inside, so that packets to them do not continue in clear text. Routes to unknown peers
// stay until all peers are known.
func (n *network) leaveInside(set backend.Set, keys []string) {
	var routes []dataplane.Object
	for _, key := range keys {
		if l := set.Leases[key]; l != nil && n.near[key] == nil {
			for _, e := range l.Endpoints {
				routes = append(routes, dataplane.NewRoute(e.Subnet, netip.Addr{}, "", false))
			}
		}
	}
	n.SweepAt(routes...) // in a migration this does nothing, because the migration decides what is deleted
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
		log.Error(nil, "packets to a peer at the same location go by the backend between locations",
			"lease", key, "backend", n.sides.between.Type, "reason", reason)
	}
}

func (n *network) isInside(key string) bool { return n.near[key] != nil && n.failed[key] == "" }

// choice implements backend.Outcome.Choice.
func (n *network) choice(key string) backend.Choice {
	why, known := n.peers[key]
	if !known {
		return backend.Choice{}
	}
	if n.isInside(key) {
		return backend.Choice{Backend: n.sides.inside.Type}
	}
	return backend.Choice{Backend: n.sides.between.Type, Waiting: cmp.Or(why, n.failed[key])}
}

// Report implements backend.Network. Mode and drops are those of the backend between locations.
func (n *network) Report() backend.NetworkReport {
	ways := &status.Location{Name: n.env.Location, Inside: n.sides.inside.Type, Between: n.sides.between.Type}
	for key := range n.peers {
		if n.isInside(key) {
			ways.ByInside++
		} else {
			ways.ByBetween++
		}
	}

	r := n.running.between.Report()
	r.Location = ways
	if n.running.inside == nil {
		return r
	}

	between := r.Objects
	inside := n.running.inside.Report().Objects
	r.Objects = func(key string) []status.Object {
		if n.isInside(key) {
			return slices.Concat(between(key), inside(key))
		}
		return between(key)
	}
	return r
}

// Close implements backend.Network.
func (n *network) Close() error { return n.CloseWith(n.running.inside, n.running.between) }
