// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/probe/ping"
)

// pairOfHosts is hosts 1 and 2 (index 0 and 1), which probe each other.
type pairOfHosts struct {
	mu      sync.Mutex
	probers [2]*Prober // nil if the host answers pings, but has no prober
	cut     [2]bool    // packets of host 1 to host 2, and of host 2 to host 1
	old     [2]bool    // the host does not know of notes
	bridge  [2]bool    // the host has the address that the other one probes
	moved   bool       // packets of host 1 come from an unknown address
	silent  bool       // requests pass, replies do not
	notes   int        // number of requests with a note
}

// start starts the prober of host i, which ends with the function that start returns.
func (w *pairOfHosts) start(t *testing.T, i int) (stop func()) {
	other := path(2 - i)
	p := NewProber(Config{
		Own: []netip.Prefix{subnet(i + 1)}, Network: Network{BackendType: "vxlan", MTU: 1450, Devices: true}, Limit: NewLimit(),
		Peers: func(context.Context) ([]Peer, bool) { return []Peer{{Key: "other", Paths: []Path{other}}}, true },
	})
	p.local = func(netip.Addr) bool { return w.bridge[i] }
	p.send.ping = func(ctx context.Context, _ netip.Addr, way ping.Path, timeout time.Duration) (time.Duration, error) {
		if err := wait.For(ctx, time.Millisecond); err != nil {
			return 0, err
		}
		w.mu.Lock()
		receiver, arrives, returns, silent := w.probers[1-i], !w.cut[i], !w.cut[1-i], w.silent
		if way.Note.Sender.IsValid() {
			w.notes++
		}
		w.mu.Unlock()

		from := path(i + 1).PublicIP
		if w.moved && i == 0 {
			from = path(9).PublicIP
		}
		if arrives && receiver != nil && !w.old[0] && !w.old[1] && w.bridge[1-i] && way.Note.Sender.IsValid() {
			receiver.hear(from, way.Note)
		}
		if arrives && returns && w.bridge[1-i] && !silent {
			return time.Millisecond, nil
		}
		if err := wait.For(ctx, timeout); err != nil {
			return 0, err
		}
		return 0, errors.New("no answer")
	}
	p.send.knock = func(ctx context.Context, to netip.Addr, _ int) error {
		_, err := p.send.ping(ctx, to, ping.Path{}, answerTimeout)
		return err
	}

	w.mu.Lock()
	w.probers[i] = p
	w.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	return func() {
		cancel()
		running.Wait()
		w.mu.Lock()
		w.probers[i] = nil
		w.mu.Unlock()
	}
}

// TestDirection breaks the path between two hosts in one direction or in both. Only a host whose packets are
// lost, and which receives those of the other one, can know the direction.
func TestDirection(t *testing.T) {
	for _, tt := range []struct {
		name  string
		pair  *pairOfHosts
		alone bool    // host 2 has no prober
		want  [2]bool // the hosts that know the direction
	}{
		{name: "nothing is lost", pair: &pairOfHosts{}},
		{name: "packets of host 1 are lost", pair: &pairOfHosts{cut: [2]bool{true, false}}, want: [2]bool{true, false}},
		{name: "packets of host 2 are lost", pair: &pairOfHosts{cut: [2]bool{false, true}}, want: [2]bool{false, true}},
		{name: "all packets are lost", pair: &pairOfHosts{cut: [2]bool{true, true}}},
		{name: "host 1 is old", pair: &pairOfHosts{cut: [2]bool{true, false}, old: [2]bool{true, false}}},
		{name: "host 2 is old", pair: &pairOfHosts{cut: [2]bool{true, false}, old: [2]bool{false, true}}},
		{name: "host 2 probes nothing", pair: &pairOfHosts{cut: [2]bool{true, false}}, alone: true},
		{name: "packets of host 2 are lost, and host 1 has an unknown address", pair: &pairOfHosts{cut: [2]bool{false, true}, moved: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := tt.pair
				w.bridge = [2]bool{true, true}
				cut := w.cut
				w.cut = [2]bool{}
				defer w.start(t, 0)()
				if !tt.alone {
					defer w.start(t, 1)()
				}
				check := func(when string, ok bool, want [2]bool) {
					t.Helper()
					for i, p := range w.probers {
						if p == nil {
							continue
						}
						if r := p.Outcome(1).Worst[0]; r.OK != ok || r.OneWay != want[i] {
							t.Errorf("%s: host %d: ok is %v, one way %v, want %v, %v", when, i+1, r.OK, r.OneWay, ok, want[i])
						}
					}
				}
				set := func(cut [2]bool) {
					w.mu.Lock()
					defer w.mu.Unlock()
					if w.cut == [2]bool{} && w.notes > 0 {
						t.Errorf("%d notes on paths that work", w.notes)
					}
					w.cut = cut
				}

				time.Sleep(time.Minute)
				check("at first", true, [2]bool{})
				set(cut)
				time.Sleep(time.Minute)
				check("after the cut", cut == [2]bool{}, tt.want)
				time.Sleep(time.Hour)
				check("an hour later", cut == [2]bool{}, tt.want)
				if cut == [2]bool{} {
					return
				}
				set([2]bool{true, true})
				time.Sleep(lostFor + time.Second)
				check("both directions", false, [2]bool{})
				set([2]bool{})
				time.Sleep(2*againMost + doubt)
				check("after the repair", true, [2]bool{})
			})
		})
	}
}

// TestDirectionAfterARestart restarts the prober of host 2 while nothing passes, and then repairs the way to host
// 1 only. Host 2 has not listened all the time, so its silence about that time is no news.
func TestDirectionAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &pairOfHosts{bridge: [2]bool{true, true}}
		defer w.start(t, 0)()
		stop := w.start(t, 1)
		time.Sleep(time.Minute)
		w.mu.Lock()
		w.cut = [2]bool{true, true}
		w.mu.Unlock()
		time.Sleep(time.Minute)
		stop()

		a := w.probers[0]
		a.hear(path(2).PublicIP, ping.Note{Sender: subnet(2).Addr(), Silence: time.Millisecond})
		if a.Outcome(1).Worst[0].OneWay {
			t.Error("host 2 has just begun to listen, and host 1 knows the direction")
		}
		time.Sleep(2 * time.Minute)
		a.hear(path(2).PublicIP, ping.Note{Sender: subnet(2).Addr(), Silence: 2 * time.Minute})
		if !a.Outcome(1).Worst[0].OneWay {
			t.Error("host 2 has listened for two minutes, and host 1 does not know the direction")
		}
	})
}

// TestDirectionWithoutABridge expects a host without the address that its peer probes to send no notes.
func TestDirectionWithoutABridge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &pairOfHosts{bridge: [2]bool{true, false}, cut: [2]bool{true, false}}
		defer w.start(t, 0)()
		defer w.start(t, 1)()
		time.Sleep(10 * time.Minute)
		if r := w.probers[0].Outcome(1).Worst[0]; r.OK || r.OneWay {
			t.Errorf("%+v, want a broken path of which no direction is known", r)
		}
	})
}

// TestDirectionOfReplies loses only replies. Each host hears the other one, so none may claim that its packets
// are lost.
func TestDirectionOfReplies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &pairOfHosts{bridge: [2]bool{true, true}, silent: true}
		defer w.start(t, 0)()
		defer w.start(t, 1)()
		time.Sleep(10 * time.Minute)
		for i, p := range w.probers {
			if r := p.Outcome(1).Worst[0]; r.OK || r.OneWay {
				t.Errorf("host %d: %+v, want a broken path of which no direction is known", i+1, r)
			}
		}
	})
}

// TestForgedNotes takes in notes that must change nothing, and some that say which direction fails.
func TestForgedNotes(t *testing.T) {
	peer, own := path(2).PublicIP, subnet(2).Addr()
	for _, tt := range []struct {
		name         string
		from, sender netip.Addr
		broken       Part // empty if the path works
		after        time.Duration
		own          string // subnet of this host
		want         bool
	}{
		{"from the peer", peer, own, Tunnel, time.Hour, "10.0.1.0/24", true},
		{"from an address in the peer's subnet", own.Next().Next(), own, Tunnel, time.Hour, "10.0.1.0/24", true},
		{"as soon as the request cannot be underway", peer, own, Tunnel, doubt, "10.0.1.0/24", true},
		{"a moment after the request", peer, own, Tunnel, time.Second, "10.0.1.0/24", false},
		{"to a host without a subnet of that family", peer, own, Tunnel, time.Hour, "fd00:0:0:1::/64", false},
		{"of an unknown subnet", peer, subnet(7).Addr(), Tunnel, time.Hour, "10.0.1.0/24", false},
		{"from a stranger", path(7).PublicIP, own, Tunnel, time.Hour, "10.0.1.0/24", false},
		{"without a sender", peer, netip.Addr{}, Tunnel, time.Hour, "10.0.1.0/24", false},
		{"on a path that works", peer, own, "", time.Hour, "10.0.1.0/24", false},
		{"on a path that is too narrow", peer, own, MTU, time.Hour, "10.0.1.0/24", false},
		{"on a path without TCP", peer, own, Checksum, time.Hour, "10.0.1.0/24", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := NewProber(Config{Own: []netip.Prefix{netip.MustParsePrefix(tt.own)}, Network: Network{Devices: true}, Limit: NewLimit()})
				p.local = func(netip.Addr) bool { return true }
				p.refresh([]Peer{{Key: "2", Paths: []Path{path(2)}}})
				p.begin(p.paths[path(2)])
				p.note(p.paths[path(2)])
				time.Sleep(tt.after)
				p.note(p.paths[path(2)]) // the first one counts
				p.end(t.Context(), p.paths[path(2)], Verdict{OK: tt.broken == "", Broken: tt.broken}, time.Now())
				p.hear(tt.from, ping.Note{Sender: tt.sender, Silence: tt.after + time.Second})
				if r := p.Outcome(1).Worst[0]; r.OneWay != tt.want {
					t.Errorf("%+v, want that the direction is known: %v", r, tt.want)
				}
				p.hear(peer, ping.Note{Sender: own})
				if r := p.Outcome(1).Worst[0]; r.OneWay {
					t.Errorf("%+v, and the peer receives packets again", r)
				}
			})
		})
	}
}

// TestSilence checks from when on a host says that it has received nothing.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bridge := false
		p := NewProber(Config{Own: []netip.Prefix{subnet(1)}, Network: Network{Devices: true}, Limit: NewLimit()})
		p.local = func(netip.Addr) bool { return bridge }
		p.refresh([]Peer{{Key: "2", Paths: []Path{path(2)}}})
		p.begin(p.paths[path(2)])
		said := func(want ping.Note) {
			t.Helper()
			if n := p.note(p.paths[path(2)]); n != want {
				t.Errorf("the note is %v, want %v", n, want)
			}
		}
		sender := subnet(1).Addr()

		time.Sleep(time.Hour)
		said(ping.Note{}) // it could not receive
		bridge = true
		time.Sleep(time.Second)
		said(ping.Note{Sender: sender, Silence: time.Second})
		time.Sleep(time.Hour)
		said(ping.Note{Sender: sender, Silence: time.Hour + time.Second})
		p.passed(p.paths[path(2)])
		time.Sleep(2 * time.Second)
		said(ping.Note{Sender: sender, Silence: 2 * time.Second})
		p.hear(path(2).PublicIP, ping.Note{Sender: subnet(2).Addr()})
		said(ping.Note{Sender: sender})
	})
}
