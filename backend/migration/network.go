// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/rpfilter"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// network implements backend.Network.
type network struct {
	*Backend
	*backend.Programmer // which the two backends share

	own     subnet.Lease
	running [sides]backend.Network // that of the next backend is nil while it does not run
	prober  *prober
	mtu     int

	// before has the best routes at the start, by destination, for the first decision about each peer.
	before map[netip.Prefix]dataplane.Route
	peers  map[string]*peer                // by lease key
	leases [sides]map[string]*subnet.Lease // of the peers, as each backend uses them

	compared time.Time // when the backends last got a set without changes; see comparePause

	reclaim    bool         // see backend.Outcome
	notStarted error        // why the next backend does not run
	again      wait.Backoff // pauses between two attempts to start the next backend
	nextStart  time.Time    // when to start the next backend again
	nextError  string       // error of the next backend that was logged last; empty if there is none
	sources    rpfilter.Filter
}

// peer is another host.
type peer struct {
	subnets  []netip.Prefix
	sends    bool   // its lease names the present backend first, so the host may send by it
	side     int    // the backend that carries the packets to the peer
	decided  bool   // side is the result of a decision, and not only the initial value
	unusable string // why the data for the next backend cannot be used
}

// Limits of the pause between two attempts to start the next backend.
const (
	leastPause = time.Second
	mostPause  = time.Minute
)

// Start implements backend.Backend. If the next backend does not start, the network continues
// with the present one and tries again later.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	scope := b.Describe().Scope
	scope.TxChecksum = true // the backends may want TxChecksum
	kernel, err := b.env.Programmer(ctx, scope)
	if err != nil {
		return nil, err
	}

	// The routes tell which backend has carried the packets to each peer until now.
	before, err := b.env.Kernel.Read(ctx, b.Describe().Scope)
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("read kernel state: %w", err), kernel.Close())
	}
	n := &network{
		Backend: b, Programmer: kernel, own: own, mtu: b.Describe().MTU, before: bestRoutes(before),
		peers: map[string]*peer{}, leases: [sides]map[string]*subnet.Lease{{}, {}},
		again: wait.Backoff{Least: leastPause, Most: mostPause},
	}

	n.Share(ctx, n.merge)
	b.kernel = kernel
	if n.running[present], err = b.startPresent(ctx, own); err != nil {
		return nil, oneline.Join(err, n.Close())
	}
	n.startNext(ctx)
	n.prober = newProber(n.Notify)
	n.Go(n.prober.run)
	return n, nil
}

func (b *Backend) startPresent(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	part := b.parts[present]
	l, ok := part.side.Of(&own)
	if !ok {
		// own comes from another configuration. Peers send to this host by what its lease says, so it
		// needs a new one from the store.
		return nil, fmt.Errorf("start %s: %w: %w", part.side.Type, subnet.ErrUnfit, errNoData)
	}
	return part.be.Start(ctx, *l)
}

var errNoData = errors.New("this host's lease has no data for it")

// lackOfData says why this host's lease has no data for the next backend. If that backend can claim
// some by now, lackOfData asks for the publication, after which another network replaces this one.
func (n *network) lackOfData(ctx context.Context) error {
	if _, err := n.claimNext(ctx, n.own.Claim()); err != nil {
		return err
	}
	n.reclaim = true
	return errNoData
}

// startNext tries to start the next backend, and logs only the first error of a series.
func (n *network) startNext(ctx context.Context) {
	part := n.parts[next]
	var err error
	if own, ok := part.side.Of(&n.own); ok {
		n.running[next], err = n.attempt(ctx, *own)
	} else {
		err = n.lackOfData(ctx)
	}
	if err != nil {
		n.running[next] = nil
		n.NewPart(ctx, next) // forgets the objects of the attempt
		if n.notStarted == nil {
			klog.FromContext(ctx).Error(err, "the next backend does not start: packets go on by the present one", "next", part.side.Type)
		}
		n.notStarted = err
		n.nextStart = time.Now().Add(n.again.Next())
		return
	}

	n.notStarted = nil
	klog.FromContext(ctx).Info("the next backend is running", "next", part.side.Type)
}

func (n *network) attempt(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	be := n.parts[next].be
	running, err := be.Start(ctx, own)
	if n.env.FreePorts == nil || !errors.Is(err, unix.EADDRINUSE) {
		return running, err
	}

	// An earlier network may have left something running on these ports. The owner of this network
	// closes that if Start fails, but the next backend does not make Start fail.
	if failed := n.env.FreePorts(be.Describe().AllPorts()); failed != nil {
		return nil, oneline.Join(err, failed)
	}
	n.NewPart(ctx, next) // forgets the objects of the attempt
	return be.Start(ctx, own)
}

// split returns l as each backend uses it, and nil for a backend that cannot use it.
func (n *network) split(l *subnet.Lease) (leases [sides]*subnet.Lease) {
	for i, p := range n.parts {
		if own, ok := p.side.Of(l); ok {
			leases[i] = own
		}
	}
	return leases
}

// Check implements backend.Network. Data of the next backend that is unusable does not
// matter as long as the present one can serve the peer.
func (n *network) Check(l subnet.Lease) ([]string, error) {
	leases := n.split(&l)
	if leases[present] != nil {
		return n.running[present].Check(*leases[present])
	}
	if n.running[next] == nil {
		return nil, nil // Sync refuses the peer as long as the next backend does not run
	}
	return n.running[next].Check(*leases[next])
}

// CheckNext implements backend.NextChecker.
func (n *network) CheckNext(l subnet.Lease) (identities []string, without *subnet.Lease) {
	leases := n.split(&l)
	if leases[present] == nil || leases[next] == nil || n.running[next] == nil {
		return nil, nil
	}

	identities, err := n.running[next].Check(*leases[next])
	if err != nil {
		return nil, nil // the present backend serves the peer, see remember
	}
	less := leases[present].For(leases[present].BackendType, func(e subnet.Endpoint) json.RawMessage { return e.Data })
	return identities, &less
}

// Sync implements backend.Network.
func (n *network) Sync(ctx context.Context, set backend.Set) (backend.Outcome, error) {
	started := false
	if n.running[next] == nil && time.Now().After(n.nextStart) {
		n.startNext(ctx)
		started = n.running[next] != nil
		set.All = set.All || started // the next backend knows no peers yet
	}

	changed := n.update(set)
	probed := n.prober.answered()
	answered := slices.Collect(maps.Keys(probed))
	out, err := n.syncParts(ctx, set, answered)
	n.decide(changed, probed)

	n.Partial = n.running[next] == nil // objects that only the next backend knows must stay
	written, failed := n.Programmer.Sync(ctx, set)
	err = oneline.Join(err, failed)
	if set.All || written.Repaired > 0 {
		n.sources.Loosen(ctx, n.Describe().Scope.Devices, n.sharedDevice(), "so that no peer can migrate")
	}

	out.Add(written)
	out.Refused = n.refusals()
	out.Choice = n.choice
	out.Recheck = started
	out.Reclaim = n.reclaim || set.Complete && err == nil && n.env.Config.Stage != "" && !n.held()
	n.reclaim = false
	if n.running[next] == nil {
		out.Again = least.Of(out.Again, max(time.Until(n.nextStart), time.Millisecond))
	}
	n.aim(changed)
	return out, err
}

// sharedDevice returns the external interface if a backend has no device of its own, and otherwise "".
func (n *network) sharedDevice() string {
	for _, p := range n.parts {
		if len(p.be.Describe().Scope.Devices) == 0 {
			return n.env.Underlay.Name
		}
	}
	return ""
}

// held reports whether a peer keeps this host from the next stage: one to which it sends over the
// present backend, or in the stage Leaving one that may send to it over that backend.
func (n *network) held() bool {
	for _, p := range n.peers {
		holds := p.side == present
		if n.env.Config.Stage == subnet.Leaving {
			holds = p.sends
		}
		if holds {
			return true
		}
	}
	return n.running[next] == nil
}

// nextCarries reports whether the next backend carries packets to a peer.
func (n *network) nextCarries() bool {
	for _, p := range n.peers {
		if p.side == next {
			return true
		}
	}
	return false
}

// update records the changed leases and returns their keys.
func (n *network) update(set backend.Set) []string {
	changed := backend.KeysToSync(set, n.peers)
	for _, key := range changed {
		for side := range n.leases {
			delete(n.leases[side], key)
		}
		if l := set.Leases[key]; l != nil {
			n.remember(key, l)
		} else {
			delete(n.peers, key)
		}
	}
	return changed
}

// remember adds the lease of a peer, split for both backends.
func (n *network) remember(key string, l *subnet.Lease) {
	p := n.peers[key]
	if p == nil {
		p = &peer{}
		n.peers[key] = p
	}

	p.subnets = l.Subnets()
	p.unusable = ""
	leases := n.split(l)
	if leases[next] != nil && leases[present] != nil && n.running[next] != nil {
		if _, err := n.running[next].Check(*leases[next]); err != nil {
			leases[next] = nil
			p.unusable = err.Error()
		}
	}
	p.sends = leases[present] == l

	for side, own := range leases {
		if own != nil {
			n.leases[side][key] = own
		}
	}
}

// merge implements backend.Programmer.Merge. Both backends may want a route to each subnet of a peer. The
// route of the backend that carries the packets has the usual metric, and the route of the other one stands
// by with a high metric. So each backend always has a route on which the peer can be probed, even if it wants
// only one route to the network.
func (n *network) merge(key string) (all []dataplane.Object) {
	p := n.peers[key]
	if p == nil {
		return nil
	}
	for side, part := range n.Parts {
		objects := slices.Clone(part.Wanted(key))
		if l := n.leases[side][key]; l != nil {
			for _, e := range l.Endpoints {
				if r, ok := part.RouteTo(key, e.Subnet); ok && !slices.Contains(objects, dataplane.Object(r)) {
					objects = append(objects, r)
				}
			}
		}

		for _, o := range objects {
			r, isRoute := o.(dataplane.Route)
			switch {
			case isRoute && side == p.side:
				o = r.AsPlain() // so that a probe through the other device finds the route that stands by
			case isRoute:
				o = r.Standby()
			}
			all = append(all, o)
		}
	}
	return all
}

// syncParts passes the peers to both backends. answered contains the keys of the peers that have
// answered probes, which count as changed.
func (n *network) syncParts(ctx context.Context, set backend.Set, answered []string) (out backend.Outcome, err error) {
	// Some backends compare all peers with the kernel only in a pass without changes, so they must get
	// one now and then, even if probes come back all the time.
	if len(set.Changed) > 0 || time.Since(n.compared) < comparePause {
		set.Changed = slices.Concat(set.Changed, answered)
	} else {
		n.compared = time.Now()
	}

	for i, part := range n.running {
		if part == nil {
			continue
		}

		s := set
		s.Leases = n.leases[i]
		o, failed := part.Sync(ctx, s)
		out.Add(o)
		if i == next {
			if failed = n.noteNext(ctx, failed); failed == nil && n.nextError != "" {
				out.Again = least.Of(out.Again, leastPause)
			}
		}
		err = oneline.Join(err, failed)
	}
	return out, err
}

// comparePause is the least time between two passes in which the backends get a set without
// changes, and so may compare all peers with the kernel.
const comparePause = 30 * time.Second

// noteNext returns err, the error of the next backend, only if that backend carries packets. Otherwise
// it logs the error, unless it was logged last.
func (n *network) noteNext(ctx context.Context, err error) error {
	if err == nil || n.nextCarries() {
		n.nextError = ""
		return err
	}
	if err.Error() != n.nextError {
		n.nextError = err.Error()
		klog.FromContext(ctx).Error(err, "the next backend is not in order, trying again: packets go on by the present one", "next", n.parts[next].side.Type)
	}
	return nil
}

// decide chooses the backend of peers that have changed, or that have answered probes to the given
// targets.
func (n *network) decide(changed []string, probed map[string][]target) {
	for _, key := range changed {
		n.move(key, false)
	}
	for key, targets := range probed {
		n.move(key, slices.Equal(targets, n.targets(key))) // the peer may have other targets by now
	}
}

// move chooses the backend of one peer. probed is true if a probe through the next backend has
// reached all of its targets.
func (n *network) move(key string, probed bool) {
	p := n.peers[key]
	if p == nil {
		return
	}

	side := n.sideOf(key, p, probed)
	if side != p.side {
		p.side = side
		n.Touch(key)
	}

	p.decided = true
	for _, s := range p.subnets {
		delete(n.before, s)
	}
}

// sideOf returns the backend that should carry the packets to a peer. Once a peer has moved to the
// next backend, it goes back only if the peer, or this host, no longer has that.
func (n *network) sideOf(key string, p *peer, probed bool) int {
	byNext := n.leases[next][key] != nil && n.running[next] != nil
	switch {
	case !byNext:
		return present
	case n.leases[present][key] == nil, probed, n.env.Config.Stage == subnet.Leaving:
		return next
	case p.decided:
		return p.side
	case n.wasNext(key, p): // an earlier process had moved it
		return next
	}
	return present
}

// wasNext reports whether the routes to a peer were those of the next backend when the network started.
func (n *network) wasNext(key string, p *peer) bool {
	return len(p.subnets) > 0 && !slices.ContainsFunc(p.subnets, func(s netip.Prefix) bool {
		r, ok := n.Parts[next].RouteTo(key, s)
		had, known := n.before[s]
		for _, network := range n.env.Config.Prefixes() {
			if !known && network.Contains(s.Addr()) {
				had = n.before[network]
			}
		}
		return !ok || had.Dev != r.Dev || had.Gateway != r.Gateway
	})
}

// refused returns why the kernel has no route to a peer by a backend, or "" if it has one.
func (n *network) refused(key string, side int) string {
	carries := n.peers[key].side == side
	return n.Refused(key, func(r dataplane.Route) bool { return (r != r.Standby()) == carries })
}

func (n *network) refusals() (all []subnet.Refusal) {
	for key, p := range n.peers {
		why := n.refused(key, p.side)
		if n.running[next] == nil && n.leases[present][key] == nil {
			why = n.waiting(key)
		}
		if why != "" {
			all = append(all, subnet.Refusal{Key: key, Reason: why})
		}
	}
	return all
}

// waiting says why the next backend does not carry the packets to a peer. It returns "" if it does.
func (n *network) waiting(key string) string {
	p := n.peers[key]
	name := n.parts[next].side.Type
	switch {
	case p == nil || p.side == next:
		return ""
	case n.running[next] == nil:
		return fmt.Sprintf("%s does not run on this host: %v", name, n.notStarted)
	case p.unusable != "":
		return fmt.Sprintf("its data for %s cannot be used: %s", name, p.unusable)
	case n.leases[next][key] == nil:
		return "it does not publish data for " + name
	case n.refused(key, next) != "":
		return n.refused(key, next)
	}
	return fmt.Sprintf("no probe by %s has come back", name)
}

// aim makes the prober probe all peers that could change to the next backend, and no others. changed contains
// the keys of the leases that have changed, also of those that are gone.
func (n *network) aim(changed []string) {
	if n.running[next] == nil { // the next backend has never run, so there are no probes
		return
	}
	for _, key := range changed {
		n.prober.aim(key, n.targets(key))
	}
	for key := range n.peers {
		n.prober.aim(key, n.targets(key))
	}
}

// targets returns what probes of a peer through the next backend must reach. It returns none if the
// peer cannot change to that backend.
func (n *network) targets(key string) (all []target) {
	p := n.peers[key]
	l := n.leases[next][key]
	if p == nil || p.side == next || l == nil || n.leases[present][key] == nil || n.refused(key, next) != "" {
		return nil
	}

	// Probes go between base addresses of subnets. The peer answers over its own route to this host,
	// so each host can change the backend for its own packets before the other one does. Over IPv6 the
	// answer may have another address, and goes through the device of the request.
	for _, e := range l.Endpoints {
		own, has := n.own.Endpoint(e.Family())
		r, ok := n.Parts[next].RouteTo(key, e.Subnet)
		if has && ok {
			all = append(all, target{
				to: e.Subnet.Addr(), from: own.Subnet.Addr(), device: r.Dev, size: n.mtu, public: e.PublicIP, data: string(e.Data),
			})
		}
	}
	return all
}

// choice implements backend.Outcome.Choice.
func (n *network) choice(key string) backend.Choice {
	p := n.peers[key]
	if p == nil {
		return backend.Choice{}
	}
	return backend.Choice{Backend: n.parts[p.side].side.Type, Waiting: n.waiting(key)}
}

// Report implements backend.Network. Mode is that of the present backend, and Dropped has the sums of both.
// At most one of the two has locations.
func (n *network) Report() backend.NetworkReport {
	r := n.running[present].Report()
	r.NotStarted = n.notStarted
	r.PathMTU = n.PathMTU
	if n.running[next] == nil {
		return r
	}

	other := n.running[next].Report()
	r.NextMode = other.Mode
	r.Location = cmp.Or(r.Location, other.Location)
	byPresent := r.Objects
	r.Objects = func(key string) []status.Object { return slices.Concat(byPresent(key), other.Objects(key)) }
	if r.Dropped == nil {
		r.Dropped = other.Dropped
		return r
	}

	r.Dropped = maps.Clone(r.Dropped)
	for reason, count := range other.Dropped {
		r.Dropped[reason] += count
	}
	return r
}

// Close implements backend.Network.
func (n *network) Close() error { return n.CloseWith(n.running[:]...) }

func bestRoutes(s dataplane.State) map[netip.Prefix]dataplane.Route {
	best := map[netip.Prefix]dataplane.Route{}
	for r := range s.AllRoutes() {
		if b, ok := best[r.Dst]; r.Type == dataplane.Unicast && (!ok || r.Priority < b.Priority) {
			best[r.Dst] = r // a low metric wins
		}
	}
	return best
}
