// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"container/heap"
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
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

// prober sends echo requests to each peer until the peer has answered at all of its targets.
type prober struct {
	notify  func() // called when a peer has answered
	changed wait.Signal

	mu       sync.Mutex
	peers    map[string]*probed
	order    queue // of peers
	ids      map[uint32]attempt
	answered map[string][]target // targets of the peers that have answered since the last take
}

// probed is a peer that has not answered yet.
type probed struct {
	key     string
	index   int // in the queue
	targets []target
	missing map[netip.Addr]struct{} // addresses of the targets that have not answered
	due     time.Time
	pause   wait.Backoff
	ids     []uint32 // of the requests whose answers count
}

// queue implements heap.Interface: the first peer is the one that is due first.
type queue []*probed

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	p := x.(*probed)
	p.index = len(*q)
	*q = append(*q, p)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	last := len(*q) - 1
	p := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return p
}

// attempt is a request that was sent.
type attempt struct {
	key string
	to  netip.Addr
}

func newProber(notify func()) *prober {
	return &prober{notify: notify, changed: wait.NewSignal(), peers: map[string]*probed{}, ids: map[uint32]attempt{}, answered: map[string][]target{}}
}

// aim replaces the targets of a peer. Without targets, the peer is no longer probed. If the peer is
// probed at the same targets already, or has just answered at them, aim changes nothing.
func (p *prober) aim(key string, targets []target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if peer := p.peers[key]; peer != nil {
		if slices.Equal(peer.targets, targets) {
			return
		}
		p.drop(key)
	}
	if answered, ok := p.answered[key]; ok && slices.Equal(answered, targets) {
		return
	}
	delete(p.answered, key)
	if len(targets) == 0 {
		return
	}
	peer := &probed{key: key, targets: targets, missing: map[netip.Addr]struct{}{}, due: time.Now().Add(settling)}
	peer.pause.Least, peer.pause.Most = leastProbe, mostProbe
	for _, t := range targets {
		peer.missing[t.to] = struct{}{}
	}
	p.peers[key] = peer
	heap.Push(&p.order, peer)
	p.changed.Send()
}

// take returns the peers that have answered since the last call, with the targets of the probes.
func (p *prober) take() map[string][]target {
	p.mu.Lock()
	defer p.mu.Unlock()
	answered := p.answered
	p.answered = map[string][]target{}
	return answered
}

func (p *prober) drop(key string) {
	peer := p.peers[key]
	for _, id := range peer.ids {
		delete(p.ids, id)
	}
	heap.Remove(&p.order, peer.index)
	delete(p.peers, key)
}

// run sends the requests until ctx ends.
func (p *prober) run(ctx context.Context) {
	sockets := map[prefix.Family]*ping.Socket{}
	var receiving sync.WaitGroup
	defer func() {
		for _, s := range sockets {
			_ = s.Close()
		}
		receiving.Wait()
	}()
	failed := map[prefix.Family]bool{}
	send := func(t target, id uint32) {
		f := prefix.FamilyOf(t.to)
		s := sockets[f]
		if s == nil {
			var err error
			if s, err = ping.OpenSocket(ctx, f); err != nil {
				if !failed[f] {
					failed[f] = true
					klog.FromContext(ctx).Error(err, "cannot probe peers: packets go on by the present backend")
				}
				return
			}
			sockets[f] = s
			receiving.Go(func() { p.receive(s) })
		}
		// A request that cannot be sent gets no answer.
		if err := s.Send(ctx, t.to, ping.Path{Device: t.device, From: t.from, Size: t.size}, id); err != nil {
			klog.FromContext(ctx).V(1).Info("cannot send a probe", "to", t.to, "device", t.device, "err", err)
		}
	}
	for {
		requests, pause := p.next(time.Now())
		for id, t := range requests {
			send(t, id)
		}
		if wait.ForOr(ctx, pause, p.changed) != nil {
			return
		}
	}
}

// next returns the requests to the peer that is due first, by id, and the time until next must be
// called again. It returns no requests if no peer is due. The requests count as sent.
func (p *prober) next(now time.Time) (requests map[uint32]target, pause time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.order) == 0 {
		return nil, mostProbe
	}
	peer := p.order[0]
	if left := peer.due.Sub(now); left > 0 {
		return nil, left
	}
	if len(peer.ids) > 2*len(peer.targets) { // answers to older requests are too late
		for _, id := range peer.ids {
			delete(p.ids, id)
		}
		peer.ids = nil
	}
	requests = map[uint32]target{}
	for _, t := range peer.targets {
		if _, missing := peer.missing[t.to]; missing {
			id := rand.Uint32()
			requests[id], p.ids[id] = t, attempt{peer.key, t.to}
			peer.ids = append(peer.ids, id)
		}
	}
	peer.due = now.Add(peer.pause.Next())
	heap.Fix(&p.order, peer.index)
	return requests, probePause
}

// receive handles answers until the socket is closed.
func (p *prober) receive(s *ping.Socket) {
	for {
		a, err := s.Receive()
		if err != nil {
			return
		}
		if a.Err == nil { // otherwise the peer is asked again
			p.answer(a.ID, a.From)
		}
	}
}

// answer handles the answer of the address from to the request with that id. Over IPv4 the target
// itself must answer. Over IPv6 another address of the host may answer: the base address of a
// subnet is also the subnet-router anycast address of the bridge of the pods, and the kernel never
// answers from an anycast address. Which address the kernel chooses depends on routes and addresses
// of the other host. So over IPv6 only the id is checked, which is random.
func (p *prober) answer(id uint32, from netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a, known := p.ids[id]
	peer := p.peers[a.key]
	if !known || peer == nil || a.to.Is4() && a.to != from {
		return
	}
	delete(peer.missing, a.to)
	if len(peer.missing) > 0 {
		return
	}
	p.drop(a.key)
	p.answered[a.key] = peer.targets
	p.notify()
}
