// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/subnet"
)

// serve starts a session: the backend's network, the lease-watch loop, the traffic rules, the
// subnet file, and the removal of what former configurations have left. serve calls change, perhaps
// more than once, to turn the last known state into the state of the session. The session lasts until ctx
// ends or its stop is called.
func (n *Network) serve(ctx context.Context, be backend.Backend, change func(now *lastknown.State)) (*session, error) {
	now, running, err := n.startNetwork(ctx, be, change)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &session{
		be: be, retirement: n.newRetirement(now.Former, be),
		compared: make(chan struct{}), reclaim: wait.NewSignal(), republish: wait.NewSignal(), rules: wait.NewSignal(),
		cancel: cancel, done: make(chan struct{}),
	}
	s.syncer = n.newSyncer(s, now, running)
	if n.opts.Probe {
		s.prober = n.newProber(s, now, running)
	}

	file := &fileKeeper{path: n.opts.SubnetFile, file: subnetFile(now, be.Describe().MTU, n.opts.IPMasq), report: func(err error) { n.ready.report(partSubnetFile, err) }}
	file.expect()      // otherwise the file of the last session would count as that of this one
	n.serving.Store(s) // reports read s from now on
	n.progress.enter(s.phase(now))
	var wg sync.WaitGroup
	wg.Go(func() {
		// The rules must exist before a pod gets an address of the subnet.
		n.keepRules(ctx, s, sync.OnceFunc(func() { wg.Go(func() { file.run(ctx) }) }))
	})
	s.retirement.begin = sync.OnceFunc(func() { wg.Go(func() { n.retire(ctx, s) }) })
	if s.prober != nil {
		wg.Go(func() { s.prober.Run(ctx) })
	}

	go func() {
		_ = s.syncer.Run(ctx)
		wg.Wait()
		_ = running.Close()
		close(s.done)
	}()
	return s, nil
}

// startNetwork starts the network of be and changes the last known state by change. The state names the
// configuration before the first of its objects exists, so that a later configuration can remove them.
// If a session with another configuration came before, the state has the new configuration as a former
// one until the network has started. If the process ends before that, the next process begins with the
// configuration that has worked.
func (n *Network) startNetwork(ctx context.Context, be backend.Backend, change func(now *lastknown.State)) (now lastknown.State, running backend.Network, err error) {
	before, _ := n.state.Get()
	now = before
	change(&now)

	// Without a session this host may have left the subnet in the state, which may then belong to another host.
	last := n.serving.Load()
	replaces := last != nil && len(subnet.Changes(before.Config, now.Config)) > 0
	claimed := n.claimed(now, be)
	if replaces {
		claimed = append(claimed, Claimed{before.Config, last.be.Describe()})
	}
	if err := n.claim(claimed); err != nil {
		return now, nil, err
	}
	if err := n.devices.Take(be.Describe().Scope.Devices...); err != nil {
		return now, nil, err
	}
	n.host.Tuner.Network(n.name, n.catalog.OneThread(now.Config))
	if replaces {
		n.state.Change(func(to *lastknown.State) { to.Attempt(now) })
		policy, _ := n.wantedRules(last.be, before)
		n.guardFirst(ctx, policy, be, now)
	} else {
		now = n.state.Change(change)
	}
	if now.Interface.Index == 0 {
		return now, unconnected{}, nil
	}
	if running, err = startBackend(ctx, be, now.Own, n.catalog.FreePorts); err != nil {
		return now, nil, fmt.Errorf("start backend: %w", err)
	}
	if replaces {
		now = n.state.Change(change)
		n.claimOnly(be)
	}
	return now, running, nil
}

// newSyncer returns the lease-watch loop of s. As soon as the store has answered, the loop closes compared
// after a pass, and tells the retirement of each pass without an error.
func (n *Network) newSyncer(s *session, now lastknown.State, running backend.Network) *backend.Syncer {
	compared := sync.OnceFunc(func() { close(s.compared) })
	config := backend.SyncerConfig{
		Config: now.Config, Own: now.Own, Network: running, Sides: backend.SidesOf(s.be, now.Config.BackendType),
		Ledger: &subnet.Ledger{}, Resync: n.opts.Resync, Migrated: s.retirement.migrated, Broadcasts: underlay.Broadcasts,
		OnSync: func(p backend.Pass) {
			n.ready.health.Beat()
			n.metrics.Synced(p.Took, p.Repaired, p.Err)
			// Before the store has answered, a pass without an error does not make the
			// network ready. Once it was ready, later sessions continue with the leases
			// that the first one got from the store.
			if p.Answered || p.Err != nil || n.ready.wasReady() {
				n.ready.report(partDatapath, p.Err)
			}
			if p.Answered {
				compared()
				if p.Err == nil {
					s.retirement.due(p)
				}
			}
			if p.Republish {
				s.republish.Send()
			}
			if p.Reclaim {
				s.reclaim.Send()
			}

			switch {
			case p.News:
				n.state.Update(func(now *lastknown.State) {
					now.Peers = subnet.LedgerState{}
					now.Fresh = s.syncer.Peers
				})
			case p.Answered:
				n.state.Check()
			}
		},
	}
	config.OnRefused = func(key, reason string) { n.store.Warn("FlannelPeerRefused", key+": "+reason) }
	config.Ledger.Restore(now.Peers, time.Now())
	return backend.NewSyncer(config)
}

// underlayOptions returns the options for choosing the external interface, from cfg, the flags, the
// interface that this process or the last one has used, and the peers. The public addresses come
// from the store and replace those of the flags.
func (n *Network) underlayOptions(cfg subnet.Config, public []netip.Addr) underlay.Options {
	last := n.last()
	o := underlay.Options{
		Ifaces: n.opts.Iface, IfaceRegexes: n.opts.IfaceRegex, CanReach: n.opts.IfaceCanReach,
		PublicIP: n.opts.PublicIP, PublicIPv6: n.opts.PublicIPv6,
		InUse: last.Interface, Reader: n.host.Underlay, Peers: n.peerAddrs, NodeIPs: n.store.NodeIPs,
	}

	for _, one := range cfg.Networks {
		o.Families = append(o.Families, one.Family())
		// A subnet of a former network is left out, because hosts may use its addresses themselves.
		if e, ok := last.Own.Endpoint(one.Family()); ok && one.Prefix.Contains(e.Subnet.Addr()) {
			o.Pods = append(o.Pods, e.Subnet)
		}
	}

	for _, a := range public {
		if a.Is4() {
			o.PublicIP = a
		} else {
			o.PublicIPv6 = a
		}
	}
	return o
}

// candidates returns the interfaces of the host. It returns none while the address families of the network
// are unknown.
func (n *Network) candidates(ctx context.Context) []underlay.Candidate {
	last := n.last()
	if len(last.Config.Networks) == 0 {
		return nil
	}
	all, _ := underlay.Inspect(ctx, n.underlayOptions(last.Config, last.PublicIPs)) // the reasons say why none is chosen
	return all
}

// peerAddrs returns the public addresses of a few peers of the present session, or of the last known state.
func (n *Network) peerAddrs() (all []netip.Addr) {
	var peers []*subnet.Lease
	if s := n.serving.Load(); s != nil {
		peers = s.syncer.Some()
	} else {
		for i := range n.past.Peers.Peers {
			peers = append(peers, &n.past.Peers.Peers[i].Lease)
		}
	}

	for _, l := range peers {
		for _, e := range l.Endpoints {
			all = append(all, e.PublicIP)
		}
	}
	return all
}

// startBackend starts the network of a backend. If a UDP port is in use, startBackend tries again for
// wait.InUseLimit, because a session or daemon that has just ended may still have the port. An earlier
// network of this process may also have left a tunnel that uses the port. freePorts closes such a tunnel,
// and may be nil.
func startBackend(ctx context.Context, be backend.Backend, own subnet.Lease, freePorts func([]int) error) (n backend.Network, err error) {
	var failed error
	wait.WhileInUse(ctx, func() bool {
		if n, err = be.Start(ctx, own); !errors.Is(err, unix.EADDRINUSE) {
			return false
		}
		if freePorts != nil {
			failed = freePorts(be.Describe().AllPorts())
		}
		return failed == nil
	})
	return n, oneline.Join(err, failed)
}

// stopServing ends the present session, if there is one.
func (n *Network) stopServing() {
	if s := n.serving.Load(); s != nil {
		s.stop()
	}
}

// former returns, during a start, the configuration of the session on the last known state, which may have
// ended. It returns nil if there was no such session, if leaveLast has ended it, or if the options do not
// let the network change its configuration while it runs.
func (n *Network) former() *subnet.Config {
	if n.serving.Load() == nil || !n.config.follow {
		return nil
	}
	return new(n.last().Config)
}

// differs reports whether former returns a configuration, and that is another one than cfg.
func (n *Network) differs(cfg subnet.Config) bool {
	former := n.former()
	return former != nil && len(subnet.Changes(*former, cfg)) > 0
}

// statusTimeout limits the time that a report or a probe waits for the lease loop.
const statusTimeout = 2 * time.Second

// lastLook limits the time for inspecting a session that is about to end.
const lastLook = 200 * time.Millisecond

// session is the part of a network that depends on configuration, interface and lease, which are in Network.state.
type session struct {
	be     backend.Backend
	syncer *backend.Syncer

	retirement *retirement
	compared   chan struct{}                      // closed after the first complete pass
	pause      time.Duration                      // before this host's lease is published; set before attend begins
	unfit      atomic.Pointer[underlay.Interface] // the external interface, if the backend does not work on it; otherwise nil; see accept
	reclaim    wait.Signal                        // sent as backend.Outcome says
	republish  wait.Signal                        // sent as backend.Outcome says
	behind     bool                               // the backend has announced new data on republish, and it is not published yet
	rules      wait.Signal                        // sent when the traffic rules may have to change within the session
	prober     *paths.Prober                      // nil without --probe
	left       atomic.Pointer[backend.Inspection] // last state of the session, when it has ended for the next session; otherwise nil
	cancel     context.CancelFunc
	done       chan struct{}
}

// phase returns the phase at the start of the session, with the state of that time.
func (s *session) phase(now lastknown.State) Phase {
	switch {
	case now.Recalled:
		return PhaseLastKnown
	case len(s.retirement.former) > 0:
		return PhaseRetiring
	}
	return PhaseServing
}

// hasEnded reports whether the session has ended.
func (s *session) hasEnded() bool { return isClosed(s.done) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// stop ends the session and waits for its end. It may be called twice.
func (s *session) stop() {
	s.cancel()
	<-s.done
}

// inspect returns the present state of the session, or its last state if it has ended for
// another session: the kernel stays unchanged until the next session has started. objects
// selects whether the state includes the kernel objects of each peer.
func (s *session) inspect(ctx context.Context, objects bool) (backend.Inspection, error) {
	if in := s.left.Load(); in != nil {
		return *in, nil
	}
	in, err := s.syncer.Inspect(ctx, objects)
	if left := s.left.Load(); err != nil && left != nil { // it has ended in the meantime
		return *left, nil
	}
	return in, err
}

// leave ends session s, and stores its last state for inspect and its peers for the next session.
func (n *Network) leave(ctx context.Context, s *session) {
	ctx, cancel := context.WithTimeout(ctx, lastLook)
	defer cancel()
	in, _ := s.inspect(ctx, true)
	s.left.Store(&in)
	s.stop()

	peers := s.syncer.Peers()
	n.state.Update(func(now *lastknown.State) {
		now.Peers = peers
		now.Fresh = nil
	})
}

// turnOfHost, multiplied by the number of hosts, is the time over which all hosts spread their
// writes after a change of the configuration, because etcd passes each write on to all hosts.
const turnOfHost = 10 * time.Millisecond

// turn returns the time to wait before a request that all hosts make after the same change. The time is
// random, at most turnOfHost for each peer.
func (n *Network) turn(s *session) time.Duration {
	return n.random(time.Duration(len(s.syncer.Peers().Peers)) * turnOfHost)
}
