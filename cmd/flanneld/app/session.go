package app

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
	"k8s.io/klog/v2"

	"flanneld/backend"
	"flanneld/pkg/subnetfile"
	"flanneld/pkg/underlay"
	"flanneld/subnet"
)

// resumption is what goes on from the last known state.
type resumption struct {
	settle func() // has nothing begin any more; what is about to has begun then, and the store knows
	stop   func()
}

// resume goes on from the last known state until it is told to stop, if that is
// of this node and its lease has not run out: pods keep their network while the
// store is away. What is not there at the first try, as addresses at boot, it waits
// for. It follows the external interface as work does; what is known then is in
// d.record.
func (d *daemon) resume(ctx context.Context, m store, last lastKnown) resumption {
	if len(last.Own.Endpoints) == 0 || errors.Is(last.usable(time.Now()), errExpired) {
		return resumption{settle: func() {}, stop: func() {}}
	}
	d.public = last.PublicIPs
	options := d.underlayOptions(last.Config, last)
	ctx, cancel := context.WithCancel(ctx)
	waiting, giveUp := context.WithCancel(ctx)
	tried, settled := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		s, err := d.recall(ctx, waiting, last, options, sync.OnceFunc(func() { close(tried) }))
		if h, ok := m.(interface{ Held(own subnet.Lease) }); ok && err == nil {
			h.Held(*cmp.Or(last.Stored, &last.Own)) // the start proper, which goes on now, depends on it
		}
		close(settled)
		if err != nil { // it was told to give up, or the lease has run out
			return
		}
		klog.FromContext(ctx).Info("going on from the last known state until the store answers", "lease", last.Own.Key)
		d.carryOn(ctx, m, s, options)
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

// recall starts a session on the last known state as soon as that is possible, for as long as
// ctx lasts. It tries until waiting ends or the lease has run out, and calls tried after each
// try.
func (d *daemon) recall(ctx, waiting context.Context, last lastKnown, options underlay.Options, tried func()) (s *session, err error) {
	err = d.retry(waiting, "the last known state cannot be used yet", func() (err error) {
		defer tried()
		s, err = d.serveLast(ctx, last, options)
		return err
	})
	return s, err
}

// serveLast starts a session on what is known, if that is of this node.
func (d *daemon) serveLast(ctx context.Context, last lastKnown, options underlay.Options) (*session, error) {
	if err := last.usable(time.Now()); err != nil {
		return nil, err
	}
	iface, err := underlay.Wait(ctx, options, 0)
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

// carryOn works on s, without the store, until ctx ends.
func (d *daemon) carryOn(ctx context.Context, m store, s *session, options underlay.Options) {
	changed := make(chan underlay.Interface, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := d.watchInterface(ctx, options, s.now.Interface, changed); err != nil {
			klog.FromContext(ctx).Error(err, "the external interface is not followed until the store answers")
		}
	})
	wg.Go(func() { _ = d.work(ctx, unanswered{m}, s, changed) }) // what can fail is the store's
	wg.Wait()
}

// unanswered is a store that has not answered yet: there is nothing to be had
// from it.
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

// misfit says which subnet of the last known state, if that is served, is not one that
// cfg gives to hosts. With Kubernetes the API gives them.
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

// leaveLast ends the session on the last known state, if there is one, and takes the
// subnet file away: the store has answered, and has no subnet for this node. Without
// the file no pod gets an address of what was served. The kernel stays as it is until
// there is another subnet. leaveLast says what was left and why.
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
		log.Error(err, "the subnet file still has the subnet that was left")
	}
	log.Error(why, "the subnet of the last known state was left", "subnets", subnetsOf(s.now.Own))
	return why
}

// errNoSubnet stands while there is no subnet to write a file of.
var errNoSubnet = errors.New("this node has no subnet")

// lastLook bounds how long a session is looked at that is about to end.
const lastLook = 200 * time.Millisecond

// session is the part of the daemon that depends on configuration, interface
// and lease.
type session struct {
	now    lastKnown // as it began, without the peers, which the ledger has
	mtu    int       // bytes, of every path
	be     backend.Backend
	ledger *subnet.Ledger
	syncer *backend.Syncer
	rules  *ruleKeeper
	// unpublished is set while the store may not have now.Own as it is here.
	unpublished bool
	left        atomic.Pointer[backend.Inspection] // how things were when a move ended it; nil before
	cancel      context.CancelFunc
	done        chan struct{}
}

// stop ends the session and waits for it. It may be called twice.
func (s *session) stop() {
	s.cancel()
	<-s.done
}

// inspect looks at how things are, or at how the session has left them: the kernel
// stays as it is.
func (s *session) inspect(ctx context.Context, holdings bool) (backend.Inspection, error) {
	if in := s.left.Load(); in != nil {
		return *in, nil
	}
	in, err := s.syncer.Inspect(ctx, holdings)
	if left := s.left.Load(); err != nil && left != nil { // it has ended meanwhile
		return *left, nil
	}
	return in, err
}

// leave ends the session, and keeps a last look at it.
func (s *session) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastLook)
	defer cancel()
	in, _ := s.inspect(ctx, true)
	s.left.Store(&in)
	s.stop()
}

// serve starts the backend's network, the lease-watch loop and the keeper of
// the subnet file.
func (d *daemon) serve(ctx context.Context, be backend.Backend, now lastKnown) (*session, error) {
	if err := d.devices.takeAll(be.Scope()); err != nil {
		return nil, err
	}
	d.fit.backend(d.registry.OneThread(now.Config.BackendType))
	d.record.set(now) // before anything is made that another configuration would have to clear away
	network, err := be.Start(ctx, now.Own)
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
			// What the first session had of the store the ones behind it go on with.
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
	file.expect() // or the session before this one would make it ready
	rules := d.newRuleKeeper(ctx, be, now)
	ctx, cancel := context.WithCancel(ctx)
	s := &session{now: now, mtu: network.MTU(), be: be, ledger: ledger, syncer: syncer, rules: rules, cancel: cancel, done: make(chan struct{})}
	d.serving.Store(s)
	var wg sync.WaitGroup
	wg.Go(func() { rules.run(ctx) })
	wg.Go(func() {
		select { // pods that are told of a network find its rules in place
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

func (d *daemon) subnetFile(now lastKnown, mtu int) subnetfile.File {
	f := subnetfile.File{MTU: mtu, IPMasq: d.opts.IPMasq}
	for _, n := range now.Config.Networks {
		if e, ok := now.Own.Endpoint(n.Family()); ok {
			f.Entries = append(f.Entries, subnetfile.Entry{Network: n.Prefix, Subnet: e.Subnet})
		}
	}
	return f
}

// latest returns a function that puts a value into ch in place of one that
// nobody has taken yet. It is the only one to send.
func latest[T any](ch chan T) func(T) {
	return func(v T) {
		select {
		case <-ch:
		default:
		}
		ch <- v
	}
}

// work keeps s up to date with the store until ctx ends. When the external
// interface changes, a new session goes on from what the old one leaves.
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

// attend gives s the leases of others, and the store the own lease, until ctx
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

// publish has the store hold the own lease as it is here, under the key and on
// the subnets that it has there: a key may outlive its subnets.
func (d *daemon) publish(ctx context.Context, m subnet.Manager, cfg subnet.Config, own subnet.Lease) error {
	var published subnet.Lease
	err := d.retry(ctx, "the own lease is not published with its new address", func() (err error) {
		published, err = m.Acquire(ctx, cfg, subnet.Claim{BackendType: own.BackendType, Endpoints: own.Endpoints})
		return err
	})
	if err != nil {
		return err
	}
	had, has := subnetsOf(own), subnetsOf(published)
	if published.Key != own.Key || !slices.Equal(has, had) {
		return fmt.Errorf("%w: %s with %v is not to be had with the new address, but %s with %v", subnet.ErrLeaseLost, own.Key, had, published.Key, has)
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

// move ends s and returns a session on another external interface, or on one
// that has changed. The kernel stays as it is in between.
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

// follow is for what does not wait for a session: what is sent from an address that
// is gone gets no answer.
func follow(ctx context.Context, m store, from, to underlay.Interface) {
	if !slices.Equal(to.Addrs, from.Addrs) {
		m.Reconnect()
	}
	klog.FromContext(ctx).Info("the external interface has changed", "name", to.Name, "index", to.Index, "mtu", to.MTU, "addresses", describe(to))
}

// serveOn starts a session on interface to. Own subnets and backend data stay,
// the public addresses follow.
func (d *daemon) serveOn(ctx context.Context, to underlay.Interface, peers subnet.LedgerState) (*session, error) {
	now, _ := d.record.get() // renewed, and cleared of what was former, since the session before began
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
