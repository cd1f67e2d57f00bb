// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/probe/ping"
)

// network is a set of invented hosts that the prober under test checks.
type network struct {
	mu     sync.Mutex
	checks map[Path][]time.Time
	broken map[Path]Part

	packets int // number of packets that were sent

	stop    func()      // ends the prober
	unknown atomic.Bool // the prober does not learn the present peers
}

// peers returns the peers 1 to n with a path each. Number 0 is the host itself.
func peers(n int) (all []Peer) {
	for i := range n {
		all = append(all, Peer{Key: fmt.Sprint(i + 1), Paths: []Path{path(i + 1)}})
	}
	return all
}

// prober returns a prober of the peers 1 to n, and runs it until the end of the test or a call of w.stop.
func (w *network) prober(t *testing.T, n int, c Config) *Prober {
	w.checks, w.broken = map[Path][]time.Time{}, map[Path]Part{}
	if c.Own == nil {
		c.Own = []netip.Prefix{subnet(0)}
	}
	if c.Limit == nil {
		c.Limit = NewLimit()
	}
	if c.Peers == nil {
		c.Peers = func(context.Context) ([]Peer, bool) { return peers(n), !w.unknown.Load() }
	}
	p := NewProber(c)
	p.probe = func(_ context.Context, s *state, _ bool) (Verdict, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.checks[s.Path] = append(w.checks[s.Path], time.Now())
		w.packets++
		if c.Limit.Allow() { // the probe over TCP
			w.packets++
		}
		if w.broken[s.Path] != "" {
			return Verdict{}, errors.New("no answer")
		}
		return Verdict{OK: true, RTT: 1}, nil
	}
	p.diagnose = func(_ context.Context, s *state) Verdict {
		w.mu.Lock()
		defer w.mu.Unlock()
		return Verdict{OK: w.broken[s.Path] == "", Broken: w.broken[s.Path], Advice: "look"}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	w.stop = func() {
		cancel()
		wg.Wait()
	}
	t.Cleanup(w.stop)
	return p
}

func (w *network) setBroken(part Part, paths ...Path) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range paths {
		w.broken[p] = part
	}
}

func subnet(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
}

func path(i int) Path {
	return Path{Subnet: subnet(i), PublicIP: netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)})}
}

// longestPause returns the longest time in which a path was not checked, from begin until now.
func (w *network) longestPause(begin time.Time, p Path) time.Duration {
	longest, last := time.Duration(0), begin
	for _, at := range append(slices.Clone(w.checks[p]), time.Now()) {
		longest, last = max(longest, at.Sub(last)), at
	}
	return longest
}

// number returns the number of paths that a prober checks.
func number(o Outcome) (n int) {
	for _, one := range o.Results {
		n += one
	}
	return n
}

// expectRate expects at most Rate packets a second, and Rate more, because the limit permits as many at once
// when a prober starts.
func expectRate(t *testing.T, packets int, took time.Duration) {
	t.Helper()
	if most := Rate * (took.Seconds() + 1); float64(packets) > most {
		t.Errorf("%d packets in %s, want at most %.0f", packets, took, most)
	}
}

// TestRate checks that this host checks each path once in a round, or, with too many paths, each path for which
// it is responsible. It also checks that the host does not exceed its rate.
func TestRate(t *testing.T) {
	for _, n := range []int{1, 10, 500, 2500, 4999} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var w network
				p, begin := w.prober(t, n, Config{}), time.Now()
				time.Sleep(3*round + time.Minute)
				w.mu.Lock()
				defer w.mu.Unlock()
				for i := range n {
					if pause := w.longestPause(begin, path(i+1)); pause > round && (n < 2800 || p.responsible(subnet(i+1))) {
						t.Fatalf("the path to %s was not checked for %s, want at most %s", subnet(i+1), pause, round)
					}
				}
				expectRate(t, w.packets, time.Since(begin))
				if o := p.Outcome(0); o.Results["ok"] != number(o) || number(o) == 0 {
					t.Errorf("%+v, want all paths ok", o)
				}
			})
		})
	}
}

// TestNetworkThatLearnsItsPeersLate starts a network beside a large one. It does not know its peers at first. Their paths
// must be checked within one round all the same.
func TestNetworkThatLearnsItsPeersLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := NewLimit()
		var large, late network
		large.prober(t, 2400, Config{Limit: limit})
		time.Sleep(time.Minute)
		late.unknown.Store(true)
		p := late.prober(t, 3, Config{Limit: limit})
		time.Sleep(time.Second)
		late.unknown.Store(false)
		time.Sleep(round)
		if o := p.Outcome(0); o.Results["ok"] != 3 {
			t.Errorf("%+v, want three paths that work", o)
		}
	})
}

// TestTCPIsProbed checks that probes of many paths leave some of the rate for TCP connections.
func TestTCPIsProbed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, during = 5000, 10 * time.Minute
		var knocks atomic.Int64
		p := NewProber(Config{
			Own: []netip.Prefix{subnet(0)}, Network: Network{BackendType: "vxlan", MTU: 1450, Devices: true}, Limit: NewLimit(),
			Peers: func(context.Context) ([]Peer, bool) { return peers(n), true },
		})
		p.send.ping = func(ctx context.Context, _ netip.Addr, _ ping.Path, _ time.Duration) (time.Duration, error) {
			return time.Millisecond, wait.For(ctx, time.Millisecond)
		}
		p.send.knock = func(context.Context, netip.Addr, int) error { knocks.Add(1); return nil }
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { p.Run(ctx) })
		time.Sleep(during)
		if got, left := float64(knocks.Load())/during.Seconds(), Rate*(1-share); got < left/2 || got > 2*left {
			t.Errorf("%.2f connections a second, want about %.2f", got, left)
		}
		cancel()
		wg.Wait()
	})
}

// TestRateOfDiagnoses starts a prober of hundreds of peers that are all down, or all behind a smaller MTU.
// The packets of probes and diagnoses together must stay below the rate, and all paths must get a verdict.
func TestRateOfDiagnoses(t *testing.T) {
	const n, most = 300, 1300
	for part, answers := range map[Part]func(size int) bool{
		Underlay: func(int) bool { return false },
		MTU:      func(size int) bool { return size <= most },
	} {
		t.Run(string(part), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var packets atomic.Int64
				begin := time.Now()
				p := NewProber(Config{
					Own: []netip.Prefix{subnet(0)}, Network: Network{BackendType: "vxlan", MTU: 1450, Devices: true}, Limit: NewLimit(),
					Peers: func(context.Context) ([]Peer, bool) { return peers(n), true },
				})
				p.send.ping = func(ctx context.Context, _ netip.Addr, way ping.Path, timeout time.Duration) (time.Duration, error) {
					if n := packets.Add(1); float64(n) > Rate*(time.Since(begin).Seconds()+1) {
						t.Errorf("%d packets in %s, want at most %d a second", n, time.Since(begin), Rate)
					}
					if answers(way.Size) {
						return time.Millisecond, nil
					}
					if err := wait.For(ctx, timeout); err != nil {
						return 0, err
					}
					return 0, errors.New("no answer")
				}
				p.send.knock = func(context.Context, netip.Addr, int) error {
					packets.Add(1)
					if answers(smallPacket) {
						return nil
					}
					return errors.New("no answer")
				}
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() { p.Run(ctx) })
				time.Sleep(20 * time.Minute)
				if o := p.Outcome(0); o.Results[string(part)] != n {
					t.Errorf("%+v, want %d paths whose %s is broken", o, n, part)
				}
				if got := float64(packets.Load()) / time.Since(begin).Seconds(); got < Rate/4 {
					t.Errorf("%.1f packets a second, want the broken paths to be checked again", got)
				}
				cancel()
				wg.Wait()
			})
		})
	}
}

// TestSeveralNetworks lets three networks of a host share its rate. Every path of each network must be
// checked within one round, so that a large network is not checked less often than a small one. When the
// largest one ends, the limit must contain only the paths of the others.
func TestSeveralNetworks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit, begin := NewLimit(), time.Now()
		sizes := []int{2000, 500, 5}
		networks := make([]network, len(sizes))
		for i, n := range sizes {
			networks[i].prober(t, n, Config{Limit: limit})
		}
		// The first network may begin its first round before the limit knows the paths of the others.
		time.Sleep(3 * round)
		packets := 0
		for i, n := range sizes {
			w := &networks[i]
			w.mu.Lock()
			packets += w.packets
			for k := range n {
				if pause := w.longestPause(begin, path(k+1)); pause > round {
					t.Fatalf("the network with %d paths: %s was not checked for %s, want at most %s", n, subnet(k+1), pause, round)
				}
			}
			w.mu.Unlock()
		}
		expectRate(t, packets, time.Since(begin))
		networks[0].stop()
		limit.mu.Lock()
		defer limit.mu.Unlock()
		if got := limit.all; got != (demand{505, 505}) {
			t.Errorf("the demand after the end of the largest network is %+v, want 505 paths", got)
		}
	})
}

// TestSplitWithSeveralNetworks runs two networks. A round has time for the paths of one network, but not for
// those of both. So in each network a host must check only about half of the paths. The peers at the other
// ends check the rest.
func TestSplitWithSeveralNetworks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := NewLimit()
		var first, second network
		a := first.prober(t, 2000, Config{Limit: limit})
		b := second.prober(t, 2000, Config{Limit: limit})
		time.Sleep(3 * round)
		for _, p := range []*Prober{a, b} {
			if n := number(p.Outcome(0)); n < 900 || n > 1100 {
				t.Errorf("%d paths are checked, want about half of 2000", n)
			}
		}
	})
}

// TestResponsible checks that exactly one host of each pair is responsible: in about half of the pairs the host
// with the greater number.
func TestResponsible(t *testing.T) {
	const n = 200
	mine := 0
	for i := range n {
		for j := range i {
			a, b := &Prober{Config: Config{Own: []netip.Prefix{subnet(i)}}}, &Prober{Config: Config{Own: []netip.Prefix{subnet(j)}}}
			first, second := a.responsible(subnet(j)), b.responsible(subnet(i))
			if first == second {
				t.Fatalf("hosts %d and %d: responsible %v and %v, want one of them", i, j, first, second)
			}
			if first {
				mine++
			}
		}
	}
	if pairs := n * (n - 1) / 2; mine < pairs*2/5 || mine > pairs*3/5 {
		t.Errorf("the greater host of %d pairs is responsible for %d, want about a half", pairs, mine)
	}
}

// TestBreakAndHeal breaks paths and repairs them. Each change must be reported, unless many happen at
// once, and the prober must soon find that a path works again.
func TestBreakAndHeal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w network
		var mu sync.Mutex
		var changed []Result
		p := w.prober(t, 100, Config{Changed: func(r Result) {
			mu.Lock()
			defer mu.Unlock()
			changed = append(changed, r)
		}})
		expect := func(when string, ok, broken, reports int) {
			t.Helper()
			mu.Lock()
			defer mu.Unlock()
			if o := p.Outcome(3); o.Results["ok"] != ok || o.Results[string(Tunnel)] != broken || len(changed) != reports {
				t.Errorf("%s: %d ok, %d broken, %d reports, want %d, %d, %d", when, o.Results["ok"], o.Results[string(Tunnel)], len(changed), ok, broken, reports)
			}
			changed = nil
		}
		time.Sleep(time.Minute)
		expect("at first", 100, 0, 0)
		w.setBroken(Tunnel, path(1), path(2))
		time.Sleep(time.Minute)
		expect("two are broken", 98, 2, 2)
		if worst := p.Outcome(3).Worst; len(worst) != 3 || worst[0].OK || worst[1].OK || !worst[2].OK || worst[0].Advice != "look" {
			t.Errorf("worst paths %+v, want the two broken ones first", worst)
		}
		time.Sleep(10 * time.Minute)
		expect("they stay broken", 98, 2, 0)
		w.setBroken("", path(1), path(2))
		time.Sleep(2*againMost + 5*time.Second)
		expect("they are repaired", 100, 0, 2)
		time.Sleep(time.Hour)
		for i := range 100 {
			w.setBroken(Tunnel, path(i+1))
		}
		time.Sleep(time.Minute)
		expect("all are broken", 0, 100, loglimit.Burst)
	})
}

// TestPaceAsHostsJoin lets a host join in each round. The checks must stay spread over a round, so that the limit leaves
// packets for TCP.
func TestPaceAsHostsJoin(t *testing.T) {
	for _, n := range []int{50, 500} {
		synctest.Test(t, func(t *testing.T) {
			var w network
			joined := 0
			w.prober(t, n, Config{Peers: func(context.Context) ([]Peer, bool) {
				joined = min(joined+max(1, n/20), n)
				return peers(joined), true
			}})
			time.Sleep(30 * time.Minute)
			w.mu.Lock()
			clear(w.checks)
			w.packets = 0
			w.mu.Unlock()

			time.Sleep(30 * time.Minute)
			w.mu.Lock()
			defer w.mu.Unlock()
			checks := 0
			for _, times := range w.checks {
				checks += len(times)
			}
			want := min(checks, 30*60*Rate-checks) // as many as the limit leaves
			if tcp := w.packets - checks; tcp < want*9/10 {
				t.Errorf("%d checks of %d paths, %d of them over TCP, want about %d", checks, n, tcp, want)
			}
		})
	}
}

// TestReportsAfterUnknown breaks a path that then cannot be judged for a while. Only the break, another
// broken part and the repair must be reported.
func TestReportsAfterUnknown(t *testing.T) {
	var reports []string
	p := NewProber(Config{
		Own: []netip.Prefix{subnet(0)}, Limit: NewLimit(),
		Changed: func(r Result) { reports = append(reports, cmp.Or(string(r.Broken), "works")) },
	})
	p.refresh([]Peer{{Key: "1", Paths: []Path{path(1)}}})
	for _, part := range []Part{Unknown, "", Unknown, Underlay, Unknown, Underlay, Unknown, Tunnel, Unknown, "", Unknown, ""} {
		p.end(t.Context(), p.paths[path(1)], Verdict{OK: part == "", Broken: part}, time.Now())
	}
	if want := []string{"underlay", "network", "works"}; !slices.Equal(reports, want) {
		t.Errorf("reports %q, want %q", reports, want)
	}
}

// TestProbe checks a path once after the other. A path that has worked gets a second packet, and only the last packet
// carries a note. A TCP connection without an answer counts only if TCP was answered before.
func TestProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewProber(Config{Own: []netip.Prefix{subnet(0)}, Network: Network{MTU: 1450, Devices: true}, Limit: NewLimit()})
		p.local = func(netip.Addr) bool { return true }
		p.refresh([]Peer{{Key: "1", Paths: []Path{path(1)}}})
		s := p.paths[path(1)]

		lost := errors.New("no answer")
		for _, step := range []struct {
			name  string
			retry bool
			pings []error // the answers to packets
			tcp   error
			want  Part
			notes []bool // whether packets carry a note
		}{
			{"TCP is not answered", true, []error{nil}, errNoTCP, "", []bool{false}},
			{"the first packet is lost", true, []error{lost, nil}, nil, "", []bool{false, true}},
			{"TCP is not answered any more", true, []error{nil}, errNoTCP, Checksum, []bool{false}},
			{"all is well", true, []error{nil}, syscall.ECONNREFUSED, "", []bool{false}},
			{"both packets are lost", true, []error{lost, lost}, nil, Tunnel, []bool{false, true}},
			{"the packet of a broken path is lost", false, []error{lost}, nil, Tunnel, []bool{true}},
			{"the packet of a broken path arrives", false, []error{nil}, nil, "", []bool{true}},
		} {
			var notes []bool
			p.send.ping = func(_ context.Context, dst netip.Addr, way ping.Path, _ time.Duration) (time.Duration, error) {
				if dst != subnet(1).Addr() || way.Size != 1450 || !way.Whole {
					t.Errorf("%s: a packet of %d bytes to %s, whole %t, want one of 1450 to the device of the peer", step.name, way.Size, dst, way.Whole)
				}
				notes = append(notes, way.Note != ping.Note{})
				return time.Millisecond, step.pings[len(notes)-1]
			}
			p.send.knock = func(context.Context, netip.Addr, int) error { return step.tcp }
			time.Sleep(time.Second) // so that the limit permits TCP

			v, err := p.probe(t.Context(), s, step.retry)
			switch {
			case !slices.Equal(notes, step.notes):
				t.Errorf("%s: packets with notes %v, want %v", step.name, notes, step.notes)
			case (err == nil) != (step.want == ""):
				t.Errorf("%s: %v, want a broken part %q", step.name, err, step.want)
			case err == nil && (!v.OK || v.RTT != 1):
				t.Errorf("%s: %+v, want a path that works", step.name, v)
			case step.want == Checksum && !errors.Is(err, errNoTCP), step.want == Tunnel && !errors.Is(err, lost):
				t.Errorf("%s: %v, want %s", step.name, err, step.want)
			case s.asked.IsZero() != (step.want != Tunnel):
				t.Errorf("%s: the peer was asked at %s, want a time only after packets without an answer", step.name, s.asked)
			}
		}
	})
}

// TestDiagnosisOfSilentTCP diagnoses a path on which pings pass, and TCP does not. That is a broken path only if TCP
// was answered there before, and if the host of the peer does not report packets to its pods.
func TestDiagnosisOfSilentTCP(t *testing.T) {
	for _, test := range []struct {
		before, reports bool
		want            Part
	}{{false, false, ""}, {false, true, ""}, {true, false, Checksum}, {true, true, Unknown}} {
		synctest.Test(t, func(t *testing.T) {
			p := NewProber(Config{Own: []netip.Prefix{subnet(0)}, Network: Network{MTU: 1450, Devices: true}, Limit: NewLimit()})
			p.send.ping = func(context.Context, netip.Addr, ping.Path, time.Duration) (time.Duration, error) {
				return time.Millisecond, nil
			}
			p.send.knock = func(_ context.Context, _ netip.Addr, hops int) error {
				if hops == 1 && test.reports {
					return syscall.EHOSTUNREACH
				}
				return errNoTCP
			}
			p.refresh([]Peer{{Key: "1", Paths: []Path{path(1)}}})
			s := p.paths[path(1)]
			s.tcp = test.before

			if v := p.diagnose(t.Context(), s); v.Broken != test.want || v.OK != (test.want == "") || v.RTT != 1 {
				t.Errorf("answered before %t, the peer reports %t: %+v, want the broken part %q and 1 ms", test.before, test.reports, v, test.want)
			}
		})
	}
}

// TestPeersUnknown expects the prober to keep the paths to the last peers, and to check them, while the
// present peers are not known.
func TestPeersUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w network
		p := w.prober(t, 3, Config{})
		time.Sleep(time.Minute)
		w.unknown.Store(true)
		time.Sleep(leastRound) // the present round began when the peers were known
		w.setBroken(Tunnel, path(2))
		time.Sleep(2 * leastRound)
		if o := p.Outcome(1); o.Results["ok"] != 2 || len(o.Worst) != 1 || o.Worst[0].Path != path(2) {
			t.Errorf("%+v, want 2 paths ok, and the one that has broken", o)
		}
	})
}
