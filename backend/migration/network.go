// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
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
	*backend.Notifier
	own     subnet.Lease
	layer   *layer
	running [sides]backend.Network                   // that of the next backend is nil while it does not run
	sizers  [sides]atomic.Pointer[backend.PathSizer] // those in running that implement PathSizer; nil for the others
	prober  *prober

	before   map[netip.Prefix]dataplane.Route // best routes at the start, by destination; they are for the first decision about each peer
	peers    map[string]*peer                 // by lease key
	leases   [sides]map[string]*subnet.Lease  // of the peers, as each backend uses them
	onlyNext map[string]struct{}              // keys of leases that only the next backend can use
	senders  map[string]struct{}              // keys of leases that name the present backend first: their hosts may send by it
	bySubnet map[netip.Prefix]string          // lease keys of peers, by subnet
	refused  []*peer                          // peers with a reason in peer.refused
	byNext   int                              // number of peers to which the next backend carries the packets
	waiters  waiters

	moved       int       // number of peers that have changed their backend and are not logged yet
	movedLogged time.Time // when such peers were logged
	compared    time.Time // when the backends last got a set without changes; see comparePause

	claimable  wait.Signal  // see backend.Reclaimer
	republish  wait.Signal  // see backend.Publisher
	notStarted error        // why the next backend does not run
	again      wait.Backoff // pauses between two attempts to start the next backend
	nextStart  time.Time    // when to start the next backend again
	nextError  string       // error of the next backend that was logged last; empty if there is none
	sources    rpfilter.Filter
}

// Limits of the pause between two attempts to start the next backend.
const (
	leastPause = time.Second
	mostPause  = time.Minute
)

// Start implements backend.Backend. If the next backend does not start, the network goes on
// with the present one and tries again later.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	scope := b.Scope()
	scope.TxChecksum = true // the backends may want TxChecksum
	reconciler, err := dataplane.NewReconciler(dataplane.Config{Kernel: b.env.Kernel, Scope: scope, Resync: b.env.Resync})
	if err != nil {
		return nil, err
	}

	// The routes tell which backend has carried the packets to each peer until now.
	before, err := b.env.Kernel.Read(ctx, b.Scope())
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("read kernel state: %w", err), reconciler.Close())
	}
	b.layer = newLayer(reconciler, b.env.Config.Prefixes())
	n := &network{
		Backend: b, Notifier: backend.NewNotifier(ctx), own: own, layer: b.layer, before: bestRoutes(before),
		peers: map[string]*peer{}, bySubnet: map[netip.Prefix]string{},
		leases: [sides]map[string]*subnet.Lease{{}, {}}, onlyNext: map[string]struct{}{}, senders: map[string]struct{}{},
		claimable: wait.NewSignal(), republish: wait.NewSignal(), again: wait.Backoff{Least: leastPause, Most: mostPause},
	}

	n.Forward(reconciler.Changed())
	if n.running[present], err = b.startPresent(ctx, own); err != nil {
		return nil, oneline.Join(err, n.Close())
	}
	n.follow(present)
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

// follow forwards the signals of a backend that has started, and makes PathMTU ask it.
func (n *network) follow(side int) {
	n.Forward(n.running[side].Changed())
	if s, ok := n.running[side].(backend.PathSizer); ok {
		n.sizers[side].Store(&s)
	}
	p, ok := n.running[side].(backend.Publisher)
	if !ok {
		return
	}

	n.Go(func(ctx context.Context) {
		for {
			select {
			case <-p.Republish():
				n.republish.Send()
			case <-ctx.Done():
				return
			}
		}
	})
}

// Republish implements backend.Publisher.
func (n *network) Republish() <-chan struct{} { return n.republish }

// Published implements backend.Publisher. It does nothing: among the backends that a migration
// accepts, only wireguard is a Publisher, with or without locations, and its Published does
// nothing.
func (*network) Published(subnet.Claim) {}

var errNoData = errors.New("this host's lease has no data for it")

// lackOfData says why this host's lease has no data for the next backend. If that backend can claim
// some by now, lackOfData asks for the publication, after which another network replaces this one.
func (n *network) lackOfData(ctx context.Context) error {
	if _, err := n.claimNext(ctx, n.own.Claim()); err != nil {
		return err
	}
	n.claimable.Send()
	return errNoData
}

// Reclaim implements backend.Reclaimer.
func (n *network) Reclaim() <-chan struct{} { return n.claimable }

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
		n.layer.view(next) // forgets the objects of the attempt
		if n.notStarted == nil {
			klog.FromContext(ctx).Error(err, "the next backend does not start: packets go on by the present one", "next", part.side.Type)
		}
		n.notStarted = err
		n.nextStart = time.Now().Add(n.again.Next())
		return
	}

	n.follow(next)
	n.notStarted = nil
	klog.FromContext(ctx).Info("the next backend is running", "next", part.side.Type)
}

// NotStarted implements backend.Migrator.
func (n *network) NotStarted() error { return n.notStarted }

func (n *network) attempt(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	be := n.parts[next].be
	running, err := be.Start(ctx, own)
	if n.env.FreePorts == nil || !errors.Is(err, unix.EADDRINUSE) {
		return running, err
	}

	// An earlier network may have left something running on these ports. The owner of this network
	// closes that if Start fails, but the next backend does not make Start fail.
	if failed := n.env.FreePorts(backend.Ports(be)); failed != nil {
		return nil, oneline.Join(err, failed)
	}
	n.layer.view(next) // forgets the objects of the attempt
	return be.Start(ctx, own)
}

// MTU implements backend.Network. Both backends can carry packets of that size, even if the next
// one does not run yet.
func (n *network) MTU() int {
	return backend.SmallestMTU(n.running[present].MTU(), n.parts[next].be)
}

// Selects implements backend.Selector.
func (n *network) Selects(l *subnet.Lease) bool {
	leases := n.split(l)
	return leases[present] != nil || leases[next] != nil
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

// CheckNext implements backend.Selector.
func (n *network) CheckNext(l subnet.Lease) (identities []string, without *subnet.Lease) {
	leases := n.split(&l)
	if leases[present] == nil || leases[next] == nil || n.running[next] == nil {
		return nil, nil
	}

	identities, err := n.running[next].Check(*leases[next])
	if err != nil {
		return nil, nil // the present backend serves the peer, see remember
	}
	less := *leases[present]
	less.NextType = ""
	less.Endpoints = slices.Clone(less.Endpoints)
	for i := range less.Endpoints {
		less.Endpoints[i].NextData = nil
	}
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

	// Both backends state what they want before anything is written, so that one request replaces the
	// best route to a peer that moves.
	n.layer.deferred = true
	changed := n.update(set)
	probed := n.prober.take()
	answered := slices.Collect(maps.Keys(probed))
	out, err := n.syncParts(ctx, set, answered)
	n.decide(changed, probed)
	n.layer.deferred = false

	anyRoute := set.All || n.layer.all          // otherwise only the routes to changed peers may differ
	if set.Complete && n.running[next] == nil { // objects that only the next backend knows must stay
		n.layer.sweepGone()
	}

	report, failed := n.layer.apply(ctx, set.Complete && n.running[next] != nil)
	affected := slices.Concat(changed, answered, keysOf(n.refused))
	err = oneline.Join(err, failed, n.noteRefused(ctx, report.Refused))
	affected = append(affected, keysOf(n.refused)...)
	if set.All || report.Repaired > 0 {
		n.sources.Loosen(ctx, n.Scope().Devices, n.sharedDevice(), "so that no peer can migrate")
	}

	out.Repaired += report.Repaired
	out.Retry = out.Retry || report.Unreachable
	out.Refused = n.refusals()
	out.Recheck = started
	if set.Complete && err == nil && n.env.Config.Stage != "" && !n.held() {
		n.claimable.Send()
	}
	if report.Rerouted { // the backends get Rerouted in the next pass
		out.Again = sooner(out.Again, time.Second)
	}
	if n.running[next] == nil {
		out.Again = sooner(out.Again, max(time.Until(n.nextStart), time.Millisecond))
	}

	for _, again := range []time.Duration{n.logMoved(ctx, time.Now()), n.nameWaiting(ctx, time.Now())} {
		if again > 0 {
			out.Again = sooner(out.Again, again)
		}
	}
	if anyRoute {
		affected = slices.AppendSeq(affected, maps.Keys(n.peers))
	}
	n.aim(affected)
	return out, err
}

// sharedDevice returns the external interface if a backend has no device of its own, and otherwise "".
func (n *network) sharedDevice() string {
	for _, p := range n.parts {
		if len(p.be.Scope().Devices) == 0 {
			return n.env.Underlay.Name
		}
	}
	return ""
}

// held reports whether a peer keeps this host from the next stage: one to which it sends over the
// present backend, or in the stage Leaving one that may send to it over that backend.
func (n *network) held() bool {
	if n.env.Config.Stage == subnet.Leaving {
		return n.running[next] == nil || len(n.senders) > 0
	}
	return n.running[next] == nil || n.byNext < len(n.peers)
}

// sooner takes zero as never for a. b must not be zero.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b < a {
		return b
	}
	return a
}

// update records the changed leases and returns their keys.
func (n *network) update(set backend.Set) []string {
	changed := backend.KeysToSync(set, n.peers)
	var left []netip.Prefix
	for _, key := range changed { // first, because a subnet may have moved from one lease to another
		left = append(left, n.forget(key)...)
	}

	for _, key := range changed {
		if l := set.Leases[key]; l != nil {
			n.remember(key, l)
		} else if p := n.peers[key]; p != nil {
			n.count(p, present)
			p.due = time.Time{}
			delete(n.peers, key)
		}
	}

	for _, s := range left {
		if _, has := n.bySubnet[s]; !has {
			n.layer.choose(s, present)
			n.layer.gone = append(n.layer.gone, dataplane.NewRoute(s, netip.Addr{}, "", false)) // the routes of an earlier process must go, too
		}
	}
	return changed
}

// forget removes the leases of a peer and returns its subnets. The peer itself stays: it may only
// have changed its lease.
func (n *network) forget(key string) []netip.Prefix {
	p := n.peers[key]
	if p == nil {
		return nil
	}

	subnets := p.subnets
	for _, s := range subnets {
		delete(n.bySubnet, s)
		for _, v := range n.layer.views {
			v.serve(s, false)
		}
	}

	for i := range n.leases {
		delete(n.leases[i], key)
	}
	delete(n.onlyNext, key)
	delete(n.senders, key)
	p.subnets = nil
	p.unusable = ""
	return subnets
}

// remember adds the lease of a peer, split for both backends.
func (n *network) remember(key string, l *subnet.Lease) {
	p := n.peers[key]
	if p == nil {
		p = &peer{key: key}
		n.peers[key] = p
		n.waiters.add(p, time.Now())
	}

	p.subnets = l.Subnets()
	leases := n.split(l)
	if leases[next] != nil && leases[present] != nil && n.running[next] != nil {
		if _, err := n.running[next].Check(*leases[next]); err != nil {
			leases[next] = nil
			p.unusable = err.Error()
		}
	}
	if leases[present] == nil {
		n.onlyNext[key] = struct{}{}
	}
	if leases[present] == l {
		n.senders[key] = struct{}{}
	}

	for i, own := range leases {
		if own == nil {
			continue
		}
		n.leases[i][key] = own
		for _, s := range p.subnets {
			n.layer.views[i].serve(s, true)
		}
	}

	for _, s := range p.subnets {
		n.bySubnet[s] = key
	}
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
		out.Retry = out.Retry || o.Retry
		out.Repaired += o.Repaired
		if o.Again > 0 {
			out.Again = sooner(out.Again, o.Again)
		}
		if i == next {
			if failed = n.noteNext(ctx, failed); failed == nil && n.nextError != "" {
				out.Again = sooner(out.Again, leastPause)
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
	if err == nil || n.byNext > 0 {
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
	changes := p.decided && side != p.side
	n.count(p, side)
	p.decided = true

	for _, s := range p.subnets {
		n.layer.choose(s, side)
		delete(n.before, s)
	}
	if changes {
		n.moved++
	}
}

// movedPause is the least time between two log lines about peers that have changed their backend.
const movedPause = 5 * time.Second

// logMoved logs how many peers have changed their backend since it logged last. It returns the time
// until it must be called again, or zero if all are logged.
func (n *network) logMoved(ctx context.Context, now time.Time) (again time.Duration) {
	if n.moved == 0 {
		return 0
	}
	if left := n.movedLogged.Add(movedPause).Sub(now); left > 0 {
		return left
	}
	klog.FromContext(ctx).Info("peers have changed their backend", "peers", n.moved, "next", n.parts[next].side.Type,
		"byNext", n.byNext, "byPresent", len(n.peers)-n.byNext)
	n.moved = 0
	n.movedLogged = now
	return 0
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
	case n.wasNext(p): // an earlier process had moved it
		return next
	}
	return present
}

// wasNext reports whether the routes to a peer were those of the next backend when the network started.
func (n *network) wasNext(p *peer) bool {
	return len(p.subnets) > 0 && !slices.ContainsFunc(p.subnets, func(s netip.Prefix) bool {
		r, ok := n.layer.views[next].route(s)
		had, known := n.before[s]
		for _, network := range n.layer.networks {
			if !known && network.Contains(s.Addr()) {
				had = n.before[network]
			}
		}
		return !ok || had.Dev != r.Dev || had.Gateway != r.Gateway
	})
}

func (n *network) count(p *peer, side int) {
	if p.side == side {
		return
	}
	p.side = side
	if side == next {
		n.byNext++
		p.due = time.Time{}
	} else {
		n.byNext--
		n.waiters.add(p, time.Now())
	}
}

// noteRefused records each refused route at its peer, instead of the earlier ones.
func (n *network) noteRefused(ctx context.Context, refused []dataplane.Refusal) error {
	for _, p := range n.refused {
		p.refused = [sides]string{}
	}
	n.refused = n.refused[:0]

	var errs [sides]error
	for _, r := range refused {
		side := present
		if n.layer.views[next].wants(r.Route) {
			side = next
		}
		if p := n.peers[n.bySubnet[r.Route.Dst]]; p != nil {
			p.refused[side] = r.Reason
			n.refused = append(n.refused, p)
		} else if r.Dev != r.Route.Dev { // to the whole network, and not because of the backend's own device
			errs[side] = oneline.Join(errs[side], fmt.Errorf("put %s: %s", r.Route, r.Reason))
		}
	}
	if errs[next] == nil {
		return errs[present]
	}
	return oneline.Join(errs[present], n.noteNext(ctx, errs[next]))
}

func (n *network) refusals() (all []subnet.Refusal) {
	for _, p := range n.refused {
		if why := p.refused[p.side]; why != "" && len(p.subnets) > 0 {
			all = append(all, subnet.Refusal{Key: p.key, Reason: why})
		}
	}
	if n.running[next] != nil {
		return all
	}
	for key := range n.onlyNext {
		all = append(all, subnet.Refusal{Key: key, Reason: n.waiting(key)})
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
	case p.refused[next] != "":
		return p.refused[next]
	}
	return fmt.Sprintf("no probe by %s has come back", name)
}

// nameWaiting logs each peer once that does not follow to the next backend within patience. It
// returns the time until there may be more of them, or zero if no peer waits.
func (n *network) nameWaiting(ctx context.Context, now time.Time) (again time.Duration) {
	peers, again := n.waiters.late(now)
	if len(peers) == 0 {
		return again
	}

	const shown = 10
	late := keysOf(peers)
	slices.Sort(late)
	some := []string{}
	for _, key := range late[:min(len(late), shown)] {
		some = append(some, key+": "+n.waiting(key))
	}

	klog.FromContext(ctx).Info("peers do not follow to the next backend, and go on by the present one", "next", n.parts[next].side.Type,
		"count", len(late), "peers", some)
	return again
}

// aim makes the prober probe those of these peers that could change to the next backend, and no others
// of them.
func (n *network) aim(keys []string) {
	if n.running[next] == nil { // the next backend has never run, so there are no probes
		return
	}
	for _, key := range keys {
		n.prober.aim(key, n.targets(key))
	}
}

// targets returns what probes of a peer through the next backend must reach. It returns none if the
// peer cannot change to that backend.
func (n *network) targets(key string) (all []target) {
	p := n.peers[key]
	l := n.leases[next][key]
	if p == nil || p.side == next || l == nil || n.leases[present][key] == nil || p.refused[next] != "" {
		return nil
	}

	// Probes go between base addresses of subnets. The peer answers over its own route to this host,
	// so each host can change the backend for its own packets before the other one does. Over IPv6 the
	// answer may have another address, and goes through the device of the request.
	for _, e := range l.Endpoints {
		own, has := n.own.Endpoint(e.Family())
		r, ok := n.layer.views[next].route(e.Subnet)
		if has && ok {
			all = append(all, target{
				to: e.Subnet.Addr(), from: own.Subnet.Addr(), device: r.Dev, size: n.MTU(), public: e.PublicIP, data: string(e.Data),
			})
		}
	}
	return all
}

// Choice implements backend.Chooser.
func (n *network) Choice(key string) backend.Choice {
	p := n.peers[key]
	if p == nil {
		return backend.Choice{}
	}
	return backend.Choice{Backend: n.parts[p.side].side.Type, Waiting: n.waiting(key)}
}

// PathMTU implements backend.PathSizer. It returns the smaller one of the path MTUs that the two
// backends know, or 0 if they know none.
func (n *network) PathMTU(subnet netip.Prefix) (least int) {
	for i := range n.sizers {
		if s := n.sizers[i].Load(); s != nil {
			if mtu := (*s).PathMTU(subnet); mtu > 0 && (least == 0 || mtu < least) {
				least = mtu
			}
		}
	}
	return least
}

// Location implements backend.Locator. It returns the report of the backend with locations. At most
// one of the two has locations.
func (n *network) Location() *status.Location {
	for _, part := range n.running {
		if l, ok := part.(backend.Locator); ok {
			return l.Location()
		}
	}
	return nil
}

// Objects implements backend.Inspector.
func (n *network) Objects(key string) []backend.ObjectReport {
	return slices.Concat(backend.Objects(n.running[present], key), backend.Objects(n.running[next], key))
}

// Counts implements backend.Inspector.
func (n *network) Counts() map[string]dataplane.Count { return n.layer.reconciler.Counts() }

// Mode implements backend.DataPath. It returns the mode of the present backend.
func (n *network) Mode() string { return backend.Mode(n.running[present]) }

// Dropped implements backend.DataPath. It returns the sums of both backends.
func (n *network) Dropped() map[string]uint64 {
	var all map[string]uint64
	for _, part := range n.running {
		for reason, count := range backend.Dropped(part) {
			if all == nil {
				all = map[string]uint64{}
			}
			all[reason] += count
		}
	}
	return all
}

// Close implements backend.Network.
func (n *network) Close() error {
	n.Notifier.Close()
	var errs []error
	for _, part := range n.running {
		if part != nil {
			errs = append(errs, part.Close())
		}
	}
	return oneline.Join(append(errs, n.layer.reconciler.Close())...)
}
