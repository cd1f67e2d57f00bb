// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/subnetfile"
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// resumption is a running session on the last known state.
type resumption struct {
	settle func() // prevents new starts and waits for a start in progress, of which the store knows then
	stop   func()
}

// resume starts a session on the last known state and lets it run until it is stopped. It
// does so only if the state belongs to this node and its lease has not expired. Pods then
// keep their network while the store is unavailable. If the start fails, for example
// because an address is missing at boot, resume repeats it. The session follows the
// external interface like work, and keeps its state in d.record.
func (d *daemon) resume(ctx context.Context, m store, last lastKnown) resumption {
	if len(last.Own.Endpoints) == 0 || errors.Is(last.usable(time.Now()), errExpired) {
		return resumption{settle: func() {}, stop: func() {}}
	}
	d.public = last.PublicIPs
	choice := d.underlayOptions(last.Config, last)
	ctx, cancel := context.WithCancel(ctx)
	waiting, giveUp := context.WithCancel(ctx)
	tried, settled := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		s, err := d.recall(ctx, waiting, last, choice, sync.OnceFunc(func() { close(tried) }))
		if h, ok := m.(interface{ Held(own subnet.Lease) }); ok && err == nil {
			h.Held(*cmp.Or(last.Stored, &last.Own)) // the regular start, which continues now, depends on it
		}
		close(settled)
		if err != nil { // the start was cancelled, or the lease has expired
			return
		}
		klog.FromContext(ctx).Info("going on from the last known state until the store answers", "lease", last.Own.Key)
		d.carryOn(ctx, m, s, choice)
	})
	<-tried
	return resumption{
		settle: func() {
			giveUp()
			<-settled
		},
		stop: func() {
			cancel()
			wg.Wait()
		},
	}
}

// recall starts a session on the last known state, which lasts until ctx ends. It repeats
// the start until waiting ends or the lease expires, and calls tried after each attempt.
func (d *daemon) recall(ctx, waiting context.Context, last lastKnown, choice underlay.Options, tried func()) (s *session, err error) {
	err = d.retry(waiting, "the last known state cannot be used yet", func() (err error) {
		defer tried()
		s, err = d.serveLast(ctx, last, choice)
		return err
	})
	return s, err
}

// serveLast starts a session on the last known state, if the state belongs to this node.
func (d *daemon) serveLast(ctx context.Context, last lastKnown, choice underlay.Options) (*session, error) {
	if err := last.usable(time.Now()); err != nil {
		return nil, err
	}
	iface, err := underlay.Wait(ctx, choice, 0)
	if err != nil {
		return nil, err
	}
	if !sameNode(last.Interface, iface) {
		return nil, fmt.Errorf("it is of a node with %v, this one has %v", describe(last.Interface), describe(iface))
	}
	last.Interface, last.recalled = iface, true
	be, _, err := d.registry.New(d.env(iface, last.Config))
	if err != nil {
		return nil, err
	}
	return d.serve(ctx, be, last)
}

// carryOn runs s without the store, until ctx ends.
func (d *daemon) carryOn(ctx context.Context, m store, s *session, choice underlay.Options) {
	changed := make(chan underlay.Interface, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := d.watchInterface(ctx, choice, s.now.Interface, changed); err != nil {
			klog.FromContext(ctx).Error(err, "cannot follow the external interface until the store answers")
		}
	})
	wg.Go(func() { _ = d.work(ctx, unanswered{m}, s, changed) }) // only the store can fail
	wg.Wait()
}

// unanswered is a store that has not answered yet. Its calls wait until ctx ends.
type unanswered struct{ store }

// Watch implements subnet.Manager.
func (unanswered) Watch(ctx context.Context, _ func(subnet.Update)) error {
	<-ctx.Done()
	return ctx.Err()
}

// Acquire implements subnet.Manager.
func (unanswered) Acquire(ctx context.Context, _ subnet.Config, _ subnet.Claim) (subnet.Lease, error) {
	<-ctx.Done()
	return subnet.Lease{}, ctx.Err()
}

// misfit returns an error if the last known state is in use and cfg does not contain one
// of its subnets. With Kubernetes it returns nil, because the API assigns the subnets.
func (d *daemon) misfit(cfg subnet.Config) error {
	s := d.serving.Load()
	pools, err := cfg.Pools()
	if s == nil || err != nil || d.opts.KubeSubnetMgr {
		return nil
	}
	for _, e := range s.now.Own.Endpoints {
		if !slices.ContainsFunc(pools, func(p subnet.Pool) bool { return p.Contains(e.Subnet) }) {
			return fmt.Errorf("%s is not of the present configuration, which has %s", e.Subnet, pools)
		}
	}
	return nil
}

// leaveLast ends the session on the last known state, if there is one, and removes the
// subnet file, because the store has answered and has no subnet for this node. Without
// the file no pod gets an address of the old subnet. The kernel stays unchanged until
// there is another subnet. leaveLast logs what it does and why.
func (d *daemon) leaveLast(ctx context.Context, cfg subnet.Config) error {
	s := d.serving.Load()
	if s == nil {
		return nil
	}
	why := d.misfit(cfg)
	if why == nil {
		why = fmt.Errorf("%v is not this node's any more", subnetsOf(s.now.Own))
	}
	d.resumed.stop()
	d.serving.Store(nil)
	d.health.Pause()
	d.report(ctx, partSubnetFile, errNoSubnet)
	log := klog.FromContext(ctx)
	if err := os.Remove(d.opts.SubnetFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Error(err, "cannot remove the subnet file, which still contains the subnet that was left")
	}
	log.Error(why, "the subnet of the last known state was left", "subnets", subnetsOf(s.now.Own))
	return why
}

// errNoSubnet is the state while there is no subnet to write to the file.
var errNoSubnet = errors.New("this node has no subnet")

// lastLook limits the time for inspecting a session that is about to end.
const lastLook = 200 * time.Millisecond

// session is the part of the daemon that depends on configuration, interface and lease.
type session struct {
	now    lastKnown // state at the begin, without the peers, which are in the ledger
	mtu    int       // maximum packet size of every path in bytes
	be     backend.Backend
	ledger *subnet.Ledger
	syncer *backend.Syncer
	rules  *ruleKeeper
	// unpublished is set while the store may have another version of now.Own.
	unpublished bool
	left        atomic.Pointer[backend.Inspection] // state of the session when a move ended it; nil before
	cancel      context.CancelFunc
	done        chan struct{}
}

// stop ends the session and waits for its end. It may be called twice.
func (s *session) stop() {
	s.cancel()
	<-s.done
}

// inspect returns the present state of the session, or the last one if it has ended,
// because the kernel stays unchanged.
func (s *session) inspect(ctx context.Context, holdings bool) (backend.Inspection, error) {
	if in := s.left.Load(); in != nil {
		return *in, nil
	}
	in, err := s.syncer.Inspect(ctx, holdings)
	if left := s.left.Load(); err != nil && left != nil { // it has ended in the meantime
		return *left, nil
	}
	return in, err
}

// leave ends the session and stores its last state for inspect.
func (s *session) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastLook)
	defer cancel()
	in, _ := s.inspect(ctx, true)
	s.left.Store(&in)
	s.stop()
}

// serve starts the backend's network, the lease-watch loop and the keeper of the subnet
// file.
func (d *daemon) serve(ctx context.Context, be backend.Backend, now lastKnown) (*session, error) {
	if err := d.devices.takeAll(be.Scope()); err != nil {
		return nil, err
	}
	d.tuner.Backend(now.Config.BackendType)
	d.record.set(now) // before the first object exists that a later configuration must remove
	network, err := startBackend(ctx, be, now.Own)
	if err != nil {
		return nil, fmt.Errorf("start backend: %w", err)
	}
	ledger := &subnet.Ledger{}
	ledger.Restore(now.Peers, time.Now())
	now.Peers = subnet.LedgerState{}
	past := d.newRetirement(now.Former, be)
	var syncer *backend.Syncer
	config := backend.SyncerConfig{
		Config: now.Config, Own: now.Own, Network: network, Ledger: ledger, Resync: d.opts.Resync,
		OnSync: func(p backend.Pass) {
			d.health.Beat()
			d.metrics.Synced(p.Took, p.Repaired, p.Err)
			// Later sessions continue with the data that the first one got from the
			// store.
			if p.Complete || p.Err != nil || d.wasReady() {
				d.report(ctx, partDatapath, p.Err)
			}
			if p.Complete && p.Err == nil {
				past.due()
			}
			switch {
			case p.News:
				d.record.update(func(now *lastKnown) { now.Peers, now.peers = subnet.LedgerState{}, syncer.Peers })
			case p.Complete:
				d.record.check()
			}
		},
	}
	if d.warn != nil {
		config.OnRefused = func(key, reason string) { d.warn("FlannelPeerRefused", key+": "+reason) }
	}
	syncer = backend.NewSyncer(config)
	file := &fileKeeper{path: d.opts.SubnetFile, file: d.subnetFile(now, network.MTU()), report: func(err error) { d.report(ctx, partSubnetFile, err) }}
	file.expect() // otherwise the last session would make this one ready
	rules := d.newRuleKeeper(ctx, be, now)
	ctx, cancel := context.WithCancel(ctx)
	s := &session{now: now, mtu: network.MTU(), be: be, ledger: ledger, syncer: syncer, rules: rules, cancel: cancel, done: make(chan struct{})}
	d.serving.Store(s)
	var wg sync.WaitGroup
	wg.Go(func() { rules.run(ctx) })
	wg.Go(func() {
		select { // wait for the rules, so that a pod that gets the subnet finds them
		case <-rules.tried:
			file.run(ctx)
		case <-ctx.Done():
		}
	})
	wg.Go(func() { past.run(ctx) })
	wg.Go(func() { _ = syncer.Run(ctx) })
	go func() {
		wg.Wait()
		_ = network.Close()
		close(s.done)
	}()
	return s, nil
}

// portPatience limits how long a start waits for a port that is in use.
const portPatience = 2 * time.Second

// startBackend starts the network of a backend. If a port is in use it tries again for a
// while: a child process that has not yet run its program, such as iptables, still has the
// sockets of the session before, and of a daemon that has just ended.
func startBackend(ctx context.Context, be backend.Backend, own subnet.Lease) (backend.Network, error) {
	const pause = 20 * time.Millisecond
	deadline := time.Now().Add(portPatience)
	for {
		network, err := be.Start(ctx, own)
		if !errors.Is(err, unix.EADDRINUSE) || time.Now().After(deadline) {
			return network, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (d *daemon) subnetFile(now lastKnown, mtu int) subnetfile.File {
	f := subnetfile.File{MTU: mtu, IPMasq: d.opts.IPMasq}
	for _, n := range now.Config.Networks {
		if e, ok := now.Own.Endpoint(n.Family()); ok {
			f.Entries = append(f.Entries, subnetfile.Entry{Network: n.Prefix, Subnet: e.Subnet})
		}
	}
	return f
}

// latest returns a function that sends a value to ch and replaces a value that was not
// received yet. Only this function may send to ch.
func latest[T any](ch chan T) func(T) {
	return func(v T) {
		select {
		case <-ch:
		default:
		}
		ch <- v
	}
}

// work keeps s up to date with the store until ctx ends. If the external interface
// changes, it starts a new session from the state that the old one leaves.
func (d *daemon) work(ctx context.Context, m store, s *session, changed <-chan underlay.Interface) error {
	for {
		to, err := d.attend(ctx, m, s, changed)
		if err != nil || ctx.Err() != nil {
			s.stop()
			return err
		}
		if s, err = d.move(ctx, m, s, to, changed); err != nil {
			return ended(ctx, err)
		}
	}
}

// attend passes the leases of other nodes to s, and the own lease to the store, until ctx
// ends or the external interface changes.
func (d *daemon) attend(ctx context.Context, m subnet.Manager, s *session, changed <-chan underlay.Interface) (to underlay.Interface, err error) {
	group, ctx := errgroup.WithContext(ctx)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group.Go(func() error { return ended(ctx, m.Watch(ctx, s.syncer.Publish)) })
	if s.unpublished {
		group.Go(func() error { return ended(ctx, d.publish(ctx, m, s.now.Config, s.now.Own)) })
	}
	select {
	case <-ctx.Done():
	case to = <-changed:
	}
	cancel()
	return to, group.Wait()
}

// publish writes the own lease to the store as it is here. The store must keep its key
// and its subnets: a key alone may get other subnets.
func (d *daemon) publish(ctx context.Context, m subnet.Manager, cfg subnet.Config, own subnet.Lease) error {
	var published subnet.Lease
	err := d.retry(ctx, "cannot publish the own lease with its new address", func() (err error) {
		published, err = m.Acquire(ctx, cfg, subnet.Claim{BackendType: own.BackendType, Endpoints: own.Endpoints})
		return err
	})
	if err != nil {
		return err
	}
	had, has := subnetsOf(own), subnetsOf(published)
	if published.Key != own.Key || !slices.Equal(has, had) {
		return fmt.Errorf("%w: for the new address the store returned %s with %v instead of %s with %v", subnet.ErrLeaseLost, published.Key, has, own.Key, had)
	}
	d.record.update(func(now *lastKnown) { now.Stored = nil })
	klog.FromContext(ctx).Info("own lease is up to date", "lease", own.Key)
	return nil
}

func subnetsOf(l subnet.Lease) []netip.Prefix {
	var ps []netip.Prefix
	for _, e := range l.Endpoints {
		ps = append(ps, e.Subnet)
	}
	return ps
}

// move ends s and returns a session on another or changed external interface. The kernel
// stays unchanged in between.
func (d *daemon) move(ctx context.Context, m store, s *session, to underlay.Interface, changed <-chan underlay.Interface) (next *session, err error) {
	follow(ctx, m, s.now.Interface, to)
	s.leave(ctx)
	peers := s.ledger.State()
	err = d.retry(ctx, "the changed external interface cannot be used yet", func() (err error) {
		select {
		case newer := <-changed:
			follow(ctx, m, to, newer)
			to = newer
		default:
		}
		next, err = d.serveOn(ctx, to, peers)
		if err != nil {
			d.health.Beat()
			d.report(ctx, partDatapath, err)
		}
		return err
	})
	return next, err
}

// follow makes the changes that cannot wait for a session: packets from an address that
// was removed get no answer, so the store must reconnect.
func follow(ctx context.Context, m store, from, to underlay.Interface) {
	if !slices.Equal(to.Addrs, from.Addrs) {
		m.Reconnect()
	}
	klog.FromContext(ctx).Info("the external interface has changed", "name", to.Name, "index", to.Index, "mtu", to.MTU, "addresses", describe(to))
}

// serveOn starts a session on interface to. It keeps the own subnets and backend data,
// and uses the new public addresses.
func (d *daemon) serveOn(ctx context.Context, to underlay.Interface, peers subnet.LedgerState) (*session, error) {
	now, _ := d.record.get() // the lease may have been renewed, and Former cleared, since the last session began
	now.Peers, now.peers = peers, nil
	be, _, err := d.registry.New(d.env(to, now.Config))
	if err != nil {
		return nil, err
	}
	claim, err := be.Claim(ctx, subnet.Claim{BackendType: now.Own.BackendType, Endpoints: now.Own.Endpoints})
	if err != nil {
		return nil, err
	}
	if stored := now.Own; now.Stored == nil {
		now.Stored = &stored
	}
	now.Interface, now.Own.Endpoints = to, claim.Endpoints
	s, err := d.serve(ctx, be, now)
	if err != nil {
		return nil, err
	}
	s.unpublished = true
	return s, nil
}
