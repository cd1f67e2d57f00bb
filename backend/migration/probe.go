// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/pkg/probe/schedule"
)

// target is an address that a probe must reach through a device. An answer for another target says
// nothing about this one, so a target also contains everything on which the path to the address
// depends.
type target struct {
	to, from netip.Addr
	device   string
	size     int        // of the packet, in bytes
	public   netip.Addr // public address of the peer
	data     string     // data of the peer for the next backend
}

// leastProbe and mostProbe limit the pause between two probes of the same peer. probePause is the
// pause between the probes of two peers.
//
// settling is the pause before the first probe at a peer's targets. When NextBackend is removed and put back within a
// moment, hosts still read each other's older leases, and the tunnel that a host is about to replace still answers. A
// host that believed such an answer would send into a tunnel that its peer closes.
const (
	settling   = time.Second
	leastProbe = 500 * time.Millisecond
	mostProbe  = 30 * time.Second
	probePause = 2 * time.Millisecond
)

// answerTimeout is the time for an answer. The first request waits for the handshake of wireguard, which is repeated
// after 5 seconds (REKEY_TIMEOUT in its paper).
const answerTimeout = 7 * time.Second

// prober sends echo requests to each peer until the peer has answered at all of its targets.
type prober struct {
	notify   func() // called when a peer has answered
	due      *schedule.Queue[*probed]
	pinger   *ping.Pinger
	ping     func(ctx context.Context, to netip.Addr, path ping.Path, timeout time.Duration) (time.Duration, error) // of pinger; tests replace it
	noSocket sync.Once                                                                                              // logs why nothing can be sent

	mu    sync.Mutex // guards peers, and what changes of each
	peers map[string]*probed
}

// probed is a peer with its present targets.
type probed struct {
	key      string
	targets  []target
	pause    wait.Backoff
	answered bool // at all targets, so it is probed no more
}

func newProber(notify func()) *prober {
	p := &prober{notify: notify, due: schedule.NewQueue[*probed](), pinger: ping.NewPinger(), peers: map[string]*probed{}}
	p.ping = p.pinger.Ping
	return p
}

// aim replaces the targets of a peer. Without targets, the peer is no longer probed.
func (p *prober) aim(key string, targets []target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if peer := p.peers[key]; peer != nil && slices.Equal(peer.targets, targets) {
		return
	}
	delete(p.peers, key)
	if len(targets) == 0 {
		return
	}
	peer := &probed{key: key, targets: targets, pause: wait.Backoff{Least: leastProbe, Most: mostProbe}}
	p.peers[key] = peer
	p.due.Add(peer, time.Now().Add(settling))
}

// answered returns the peers that have answered, with their targets.
func (p *prober) answered() map[string][]target {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string][]target{}
	for key, peer := range p.peers {
		if peer.answered {
			all[key] = peer.targets
		}
	}
	return all
}

func (p *prober) run(ctx context.Context) {
	defer func() { _ = p.pinger.Close() }()
	p.due.Run(ctx, schedule.Checks[*probed]{
		AtOnce: int(answerTimeout / probePause), // enough for peers that do not answer
		Permit: func(ctx context.Context) error { return wait.For(ctx, probePause) },
		Check:  p.probe,
	})
}

// repeat makes the peer due again, before this probe has ended. It returns false if the peer has answered, or has other
// targets by now.
func (p *prober) repeat(peer *probed) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peers[peer.key] != peer || peer.answered {
		return false
	}
	p.due.Add(peer, time.Now().Add(peer.pause.Next()))
	return true
}

func (p *prober) probe(ctx context.Context, peer *probed) {
	if !p.repeat(peer) {
		return
	}
	for _, t := range peer.targets {
		_, err := p.ping(ctx, t.to, ping.Path{Device: t.device, From: t.from, Size: t.size}, answerTimeout)
		if errors.Is(err, ping.ErrNoSocket) {
			p.noSocket.Do(func() {
				klog.FromContext(ctx).Error(err, "cannot probe peers: packets go on by the present backend")
			})
		}
		if err != nil {
			klog.FromContext(ctx).V(1).Info("a probe has not come back", "to", t.to, "device", t.device, "err", err)
			return
		}
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	peer.answered = true
	p.notify()
}
