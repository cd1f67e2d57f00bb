// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/pkg/probe/schedule"
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
	// Tests replace send, probe and diagnose. Limit applies to each packet: Run waits for it before
	// the first packet of a probe, and probe and diagnose obey it for all others. If retry is set, probe
	// sends a second packet when the first one is not answered.
	send     sender
	probe    func(ctx context.Context, s *state, retry bool) (Verdict, error)
	diagnose func(context.Context, *state) Verdict
	pinger   *ping.Pinger
	local    func(netip.Addr) bool // isLocal; tests replace it
	reports  *loglimit.Changes

	// intact and broken have the paths that are not being checked: broken those that are known not to work.
	intact, broken *schedule.Queue[*state]

	mu    sync.Mutex
	paths map[Path]*state
	// senders are the paths by the first address of their subnet, which notes have.
	senders map[netip.Addr]*state
}

// state is the present knowledge of a path.
type state struct {
	Result
	begun   time.Time    // when the last check began; zero if there was none
	pause   wait.Backoff // between checks of a broken path
	tcp     bool         // TCP was answered once; only checks use it
	failing Part         // broken part of the last verdict other than Unknown; empty if the path worked
	direction
}

// NewProber returns a prober.
func NewProber(c Config) *Prober {
	p := &Prober{
		Config: c, member: c.Limit.join(), paths: map[Path]*state{},
		intact: schedule.NewQueue[*state](), broken: schedule.NewQueue[*state](),
		reports: loglimit.NewChanges(loglimit.Burst), pinger: ping.NewPinger(), local: isLocal,
	}
	p.pinger.Heard = p.hear

	p.send = sender{wait: c.Limit.Wait, ping: p.pinger.Ping, knock: knock}
	p.probe = func(ctx context.Context, s *state, retry bool) (Verdict, error) {
		dst := c.Network.end(s.Subnet)
		way := ping.Path{Size: c.Network.mtu(s.Path), Whole: true}
		if !retry { // the path is broken
			way.Note = p.note(s)
		}

		rtt, err := p.send.ping(ctx, dst, way, answerTimeout)
		if err != nil && retry && p.send.wait(ctx) == nil { // the first packet may wait for neighbour resolution
			way.Note = p.note(s)
			rtt, err = p.send.ping(ctx, dst, way, answerTimeout)
		}

		if err == nil {
			p.passed(s)
		}
		if err == nil && c.Limit.Allow() {
			err = s.knocked(answered(p.send.knock(ctx, dst, 0)))
		}
		return Verdict{OK: true, RTT: milliseconds(rtt)}, err
	}

	p.diagnose = func(ctx context.Context, s *state) Verdict {
		v := p.send.diagnose(ctx, s.Path, c.Network)
		hidden := v.Broken == Unknown && v.RTT > 0 && ctx.Err() == nil // pings pass, and a firewall drops TCP
		if (v.Broken == Checksum || hidden) && s.knocked(errNoTCP) == nil {
			v = Verdict{OK: true, RTT: v.RTT}
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
func (s *state) knocked(err error) error {
	if err != nil && !s.tcp {
		return nil
	}
	s.tcp = true
	return err
}

// Run checks paths until ctx ends, and returns when all checks have ended. It must not be called again.
func (p *Prober) Run(ctx context.Context) {
	defer p.pinger.Close()
	defer p.member.set(demand{})
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() {
		p.intact.Run(ctx, schedule.Checks[*state]{Soon: burst, AtOnce: atOnce, Permit: p.paced(), Check: p.check})
	})
	running.Go(func() {
		permit := func(ctx context.Context) error { return cmp.Or(wait.For(ctx, againPause), p.Limit.Wait(ctx)) }
		p.broken.Run(ctx, schedule.Checks[*state]{AtOnce: brokenAtOnce, Permit: permit, Check: p.check})
	})

	for ctx.Err() == nil {
		if peers, ok := p.Peers(ctx); ok {
			p.refresh(peers)
		}
		_ = wait.For(ctx, p.member.round()) // the loop notices the end of ctx
	}
}

// paced returns a function that waits until one more path may be checked: not earlier than the pace of a round and the
// limit permit. Paths that are due together, such as those of hosts that have joined in one round, so move apart.
// Otherwise they would need all packets of the limit at the same time of each round, and leave none for TCP.
func (p *Prober) paced() func(context.Context) error {
	var next time.Time
	return func(ctx context.Context) error {
		now := time.Now()
		if next.Before(now) {
			next = now
		}
		if early := next.Sub(now); early > burst && wait.For(ctx, early) != nil {
			return ctx.Err()
		}
		next = next.Add(p.member.pause())
		return p.Limit.Wait(ctx)
	}
}

// refresh replaces the paths that p knows by those of peers. It plans the checks of new ones at the pace of a round,
// in random order. If there are so many paths that a round would take too long, only one host of each pair checks
// the path. refresh also sets the demand of the prober.
func (p *Prober) refresh(peers []Peer) {
	now := map[Path]string{}
	for _, peer := range peers {
		for _, path := range peer.Paths {
			now[path] = peer.Key
		}
	}

	all := len(now)
	if p.member.split(all) {
		maps.DeleteFunc(now, func(path Path, _ string) bool { return !p.responsible(path.Subnet) })
	}
	p.member.set(demand{paths: all, due: len(now)})

	p.mu.Lock()
	defer p.mu.Unlock()
	for path, s := range p.paths {
		if _, known := now[path]; !known {
			p.intact.Remove(s)
			p.broken.Remove(s)
			delete(p.paths, path)
		}
	}

	pause := p.member.pause()
	due := time.Now()
	p.senders = make(map[netip.Addr]*state, len(now))
	for path, key := range now { // a map has a random order
		s := p.paths[path]
		if s == nil {
			s = &state{Result: Result{Path: path}, pause: wait.Backoff{Least: again, Most: againMost}}
			p.paths[path] = s
			due = due.Add(pause)
			p.intact.Add(s, due)
		}
		s.Peer = key
		p.senders[path.Subnet.Masked().Addr()] = s
	}
}

// responsible reports whether this host checks the path to the subnet peer. Of the two hosts of a pair
// exactly one does. A host without a subnet of that family checks all paths of the family.
func (p *Prober) responsible(peer netip.Prefix) bool {
	own, ok := prefix.OfFamily(p.Own, prefix.FamilyOf(peer.Addr()))
	if !ok {
		return true
	}

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

// check probes a path, and diagnoses it if the probe fails. A diagnosis takes many packets. If the limit does
// not permit these at once, because many paths are broken, a path that stays broken keeps its last verdict.
// The diagnosis of any other path waits for the limit.
func (p *Prober) check(ctx context.Context, s *state) {
	last, broken := p.begin(s)
	v, err := p.probe(ctx, s, !broken)
	switch {
	case err == nil:
	case broken && p.Limit.Tokens() < diagnosis:
		v = last
	default:
		v = p.diagnose(ctx, s)
	}
	if ctx.Err() == nil {
		p.end(ctx, s, v, time.Now())
	}
}

// begin notes that a check begins. It returns the last verdict, and whether it says that the path is broken.
func (p *Prober) begin(s *state) (last Verdict, broken bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if s.begun.IsZero() {
		s.heard = now
	}
	s.begun = now
	return s.Verdict, s.broken()
}

// end records the verdict of a check that has ended at the time now, plans the next one, and reports the changes for
// which Config.Changed is called. It ignores the verdict if the path is gone. If the path works, end also calls
// Answered, even if the path is gone.
func (p *Prober) end(ctx context.Context, s *state, v Verdict, now time.Time) {
	if v.OK && p.Answered != nil {
		p.Answered(time.Duration(v.RTT * float64(time.Millisecond)))
	}

	p.mu.Lock()
	if p.paths[s.Path] != s { // the path is gone, or was replaced
		p.mu.Unlock()
		return
	}

	if s.OK != v.OK || s.Checked.IsZero() {
		s.Since = now
	}
	s.Verdict = v
	s.Checked = now
	failing := s.failing
	broken := s.broken()
	if s.OK || broken {
		s.failing = v.Broken
	}
	if s.OK {
		s.pause.Reset()
	}
	if broken {
		p.broken.Add(s, now.Add(s.pause.Next()))
	} else {
		p.intact.Add(s, s.begun.Add(p.member.round()))
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
