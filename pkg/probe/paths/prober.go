// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/probe/ping"
)

const (
	// burst is how much earlier than planned a check may begin. It makes several checks begin at once,
	// because waking up for each check costs more CPU time than the check. The limit saves up the packets of
	// one second. burst is shorter, so that some of them are left for TCP and for broken paths.
	burst = 500 * time.Millisecond

	// again is the shortest pause between two checks of a broken path, and againMost the longest one.
	// againPause is the pause between two checks of any broken paths.
	again, againMost = 5 * time.Second, time.Minute
	againPause       = 200 * time.Millisecond
	// diagnosis is the number of packets that the limit must permit at once, so that a path that stays
	// broken is diagnosed again.
	diagnosis = 5
	// atOnce limits the number of paths that are checked at the same time, and brokenAtOnce the number of
	// broken paths, whose checks take seconds.
	atOnce, brokenAtOnce = 128, 16
)

// Peer is a peer with the paths to it.
type Peer struct {
	Key   string // of its lease
	Paths []Path
}

// Config configures a Prober.
type Config struct {
	Own     []netip.Prefix // subnets of this host
	Network Network
	// Peers returns the peers to which packets are sent. It is called at the beginning of each round. ok is
	// false if the peers are not known at that moment. The round then checks the peers of the last round.
	Peers func(ctx context.Context) (peers []Peer, ok bool)
	// Limit is shared by all probers of the host.
	Limit *Limit
	// Answered is called with each round trip. It may be nil.
	Answered func(rtt time.Duration)
	// Changed is called when a path breaks, when another part of it breaks and when it works again, unless
	// many paths change at once. It may be nil.
	Changed func(Result)
}

// Prober checks the paths to all peers, once in each round, and broken paths more often. Several checks may be in
// progress. If a host has too many paths for one round, only one host of each pair checks the path.
type Prober struct {
	Config
	member *member // of Limit
	// Tests replace send, probe and diagnose. Limit applies to each packet: start waits for it before
	// the first packet of a probe, and probe and diagnose obey it for all others. If retry is set, probe
	// sends a second packet when the first one is not answered.
	send     sender
	probe    func(ctx context.Context, p Path, retry bool) (Verdict, error)
	diagnose func(context.Context, Path) Verdict
	slots    [2]chan struct{} // limit the checks at the same time: first of paths that are not broken, second of broken ones
	pinger   *ping.Pinger
	local    func(netip.Addr) bool // isLocal; tests replace it
	reports  *loglimit.Changes

	broke wait.Signal // a path has broken

	mu     sync.Mutex
	paths  map[Path]*state
	broken map[Path]*state // the paths that are known not to work
	// senders are the paths by the first address of their subnet, which notes have.
	senders map[netip.Addr]*state
}

// state is the present knowledge of a path.
type state struct {
	Result
	begun   time.Time    // when the last check began; zero if there was none
	due     time.Time    // time of the next check, if the path is broken
	pause   wait.Backoff // between checks of a broken path
	busy    bool
	tcp     bool // TCP was answered once
	failing Part // broken part of the last verdict other than Unknown; empty if the path worked
	direction
}

// NewProber returns a prober.
func NewProber(c Config) *Prober {
	p := &Prober{
		Config: c, member: c.Limit.join(), paths: map[Path]*state{}, broken: map[Path]*state{},
		slots:   [2]chan struct{}{make(chan struct{}, atOnce), make(chan struct{}, brokenAtOnce)},
		reports: loglimit.NewChanges(loglimit.Burst), broke: wait.NewSignal(), pinger: ping.NewPinger(), local: isLocal,
	}
	p.pinger.Heard = p.hear

	p.send = sender{wait: c.Limit.Wait, ping: p.pinger.Ping, knock: knock}
	p.probe = func(ctx context.Context, path Path, retry bool) (Verdict, error) {
		dst := c.Network.end(path.Subnet)
		way := ping.Path{Size: c.Network.mtu(path), Whole: true}
		if !retry { // the path is broken
			way.Note = p.note(path)
		}

		rtt, err := p.send.ping(ctx, dst, way, answerTimeout)
		if err != nil && retry && p.send.wait(ctx) == nil { // the first packet may wait for neighbour resolution
			way.Note = p.note(path)
			rtt, err = p.send.ping(ctx, dst, way, answerTimeout)
		}

		if err == nil {
			p.passed(path)
		}
		if err == nil && c.Limit.Allow() {
			err = p.knocked(path, answered(p.send.knock(ctx, dst, 0)))
		}
		return Verdict{Path: path, OK: true, RTT: rtt}, err
	}

	p.diagnose = func(ctx context.Context, path Path) Verdict {
		v := p.send.diagnose(ctx, path, c.Network)
		hidden := v.Broken == Unknown && v.RTT > 0 && ctx.Err() == nil // pings pass, and a firewall drops TCP
		if (v.Broken == Checksum || hidden) && p.knocked(path, errNoTCP) == nil {
			v = Verdict{Path: path, OK: true, RTT: v.RTT}
		}
		return v
	}
	return p
}

// errNoTCP means that a TCP connection was not answered.
var errNoTCP = errors.New("TCP is not answered")

// knocked records whether TCP was answered on a path. err is nil if it was. knocked returns err only if TCP
// was answered there before, and otherwise nil, because a firewall of the peer that drops packets to unused
// ports must not look like a broken path.
func (p *Prober) knocked(path Path, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.paths[path]
	if s == nil || err != nil && !s.tcp {
		return nil
	}
	s.tcp = true
	return err
}

// Run checks paths until ctx ends, and returns when all checks have ended. It must not be called again.
func (p *Prober) Run(ctx context.Context) {
	defer p.pinger.Close()
	var checks sync.WaitGroup
	defer checks.Wait()
	checks.Go(func() { p.checkBroken(ctx, &checks) })
	defer p.member.set(demand{})
	var peers []Peer
	for ctx.Err() == nil {
		if now, ok := p.Peers(ctx); ok {
			peers = now
		}

		due := p.refresh(peers)
		next := time.Now()
		for _, path := range due {
			next = next.Add(p.member.pause()) // from the planned time, even if the last check had to wait for the limit
			if early := time.Until(next); early > burst && wait.For(ctx, early) != nil {
				return
			}
			p.start(ctx, path, false, &checks)
		}
		if len(due) == 0 {
			_ = wait.For(ctx, p.member.pause()) // the loop notices the end of ctx
		}
	}
}

// refresh replaces the paths that p knows by those of peers, and returns the paths that this host checks:
// first new ones in random order, and then the others, beginning with the one that was not checked for the
// longest time. If there are so many that a round would take too long, only one host of each pair checks
// the path. refresh also sets the demand of the prober.
func (p *Prober) refresh(peers []Peer) []Path {
	now := map[Path]string{}
	for _, peer := range peers {
		for _, path := range peer.Paths {
			now[path] = peer.Key
		}
	}

	all := len(now)
	split := p.member.split(len(now))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.senders = make(map[netip.Addr]*state, len(now))
	var due []Path
	for path, key := range now {
		if split && !p.responsible(path.Subnet) {
			delete(now, path)
			continue
		}
		if p.paths[path] == nil {
			p.paths[path] = &state{Result: Result{Verdict: Verdict{Path: path}, Peer: key}, pause: wait.Backoff{Least: again, Most: againMost}}
		}
		p.paths[path].Peer = key
		p.senders[path.Subnet.Masked().Addr()] = p.paths[path]
		due = append(due, path)
	}

	for path := range p.paths {
		if _, known := now[path]; !known {
			delete(p.paths, path)
			delete(p.broken, path)
		}
	}

	rand.Shuffle(len(due), func(i, j int) { due[i], due[j] = due[j], due[i] })
	slices.SortStableFunc(due, func(a, b Path) int { return p.paths[a].begun.Compare(p.paths[b].begun) })
	p.member.set(demand{paths: all, due: len(due)})
	return due
}

// responsible reports whether this host checks the path to the subnet peer. Of the two hosts of a pair
// exactly one does. A host without a subnet of that family checks all paths of the family.
func (p *Prober) responsible(peer netip.Prefix) bool {
	i := slices.IndexFunc(p.Own, func(own netip.Prefix) bool { return own.Addr().Is4() == peer.Addr().Is4() })
	if i < 0 {
		return true
	}

	own := p.Own[i]
	first := own
	second := peer
	if peer.Compare(own) < 0 {
		first = peer
		second = own
	}

	h := fnv.New32a()
	fmt.Fprint(h, first, second)
	return (h.Sum32()&1 == 0) == (first == own)
}

// start waits until the limit and the number of running checks permit one more check, and then checks a
// path in the background. It does nothing if begin returns false. broken says which of the two loops calls
// start: checkBroken checks broken paths, and Run all others.
func (p *Prober) start(ctx context.Context, path Path, broken bool, checks *sync.WaitGroup) {
	if !p.begin(path, broken) {
		return
	}
	if p.Limit.Wait(ctx) != nil {
		return
	}

	slot := p.slots[0]
	if broken {
		slot = p.slots[1]
	}

	select {
	case slot <- struct{}{}:
	case <-ctx.Done():
		return
	}

	checks.Go(func() {
		defer func() { <-slot }()
		v := p.check(ctx, path, broken)
		if ctx.Err() == nil {
			p.end(ctx, v, time.Now())
		}
	})
}

// check probes a path, and diagnoses it if the probe fails. A diagnosis takes many packets. If the limit does
// not permit these at once, because many paths are broken, a path that stays broken keeps its last verdict.
// The diagnosis of any other path waits for the limit.
func (p *Prober) check(ctx context.Context, path Path, broken bool) Verdict {
	v, err := p.probe(ctx, path, !broken)
	switch {
	case err == nil:
		return v
	case broken && p.Limit.Tokens() < diagnosis:
		return p.last(path)
	}
	return p.diagnose(ctx, path)
}

// last returns the last verdict about a path, or a verdict that has only the path if the path is gone.
func (p *Prober) last(path Path) Verdict {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.paths[path]; s != nil {
		return s.Verdict
	}
	return Verdict{Path: path}
}

// begin marks a path as being checked. It returns false if the path is already being checked, if it exists
// no longer, or if the other one of the two loops has to check it (see start).
func (p *Prober) begin(path Path, broken bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.paths[path]
	if s == nil || s.busy || s.broken() != broken {
		return false
	}
	if s.begun.IsZero() {
		s.heard = time.Now()
	}
	s.busy, s.begun = true, time.Now()
	return true
}

// end records the verdict of a check that has ended at the time now, and reports the changes for which
// Config.Changed is called. It ignores the verdict if the path is gone. If the path works, end also calls
// Answered, even if the path is gone.
func (p *Prober) end(ctx context.Context, v Verdict, now time.Time) {
	if v.OK && p.Answered != nil {
		p.Answered(v.RTT)
	}

	p.mu.Lock()
	s := p.paths[v.Path]
	if s == nil {
		p.mu.Unlock()
		return
	}

	before := s.Result
	failing := s.failing
	s.busy = false
	s.Verdict = v
	s.Checked = now
	if before.OK != v.OK || before.Checked.IsZero() {
		s.Since = now
	}
	if s.OK {
		s.pause.Reset()
	} else {
		s.due = now.Add(s.pause.Next())
	}
	if s.broken() {
		p.broken[v.Path] = s
		p.broke.Send()
	} else {
		delete(p.broken, v.Path)
	}
	if s.OK || s.broken() {
		s.failing = v.Broken
	}

	after := s.Result
	changed := s.failing != failing
	p.mu.Unlock()
	if changed {
		p.tell(ctx, after)
	}
}

// tell logs a changed path and calls Changed, unless many paths change at once.
func (p *Prober) tell(ctx context.Context, r Result) {
	log, reported := p.reports.Next(klog.FromContext(ctx))
	if !reported {
		return
	}
	if r.OK {
		log.Info("the path to a peer works again", "peer", r.Peer, "subnet", r.Subnet, "publicIP", r.PublicIP)
	} else {
		log.Error(nil, "the path to a peer does not work", "peer", r.Peer, "subnet", r.Subnet, "publicIP", r.PublicIP, "broken", r.Broken, "advice", r.Advice)
	}
	if p.Changed != nil {
		p.Changed(r)
	}
}

// checkBroken checks broken paths again, with growing pauses, until ctx ends.
func (p *Prober) checkBroken(ctx context.Context, checks *sync.WaitGroup) {
	for wait.For(ctx, againPause) == nil {
		path, ok, some := p.mostDue(time.Now())
		if ok {
			p.start(ctx, path, true, checks)
		}
		if some {
			continue
		}
		select {
		case <-p.broke:
		case <-ctx.Done():
			return
		}
	}
}

// mostDue returns the broken path whose check is overdue for the longest time. ok is false if no check is
// due, and some is false if no path is broken.
func (p *Prober) mostDue(now time.Time) (path Path, ok, some bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var first time.Time
	for candidate, s := range p.broken {
		if s.busy || s.due.After(now) {
			continue
		}
		if !ok || s.due.Before(first) {
			path = candidate
			first = s.due
			ok = true
		}
	}
	return path, ok, len(p.broken) > 0
}

// Outcome returns what is known of all paths. The field Worst of the result has at most as many paths as the
// parameter worst says.
func (p *Prober) Outcome(worst int) Outcome {
	p.mu.Lock()
	now := time.Now()
	results := make([]Result, 0, len(p.paths))
	for _, s := range p.paths {
		results = append(results, s.result(now))
	}
	p.mu.Unlock()
	return outcome(results, worst)
}
