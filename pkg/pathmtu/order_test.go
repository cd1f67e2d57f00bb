// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// carry makes the samples contain large packets to pods of these peers, and of no others. The first peer is
// 0.
func (w *internet) carry(peers ...int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.traffic = nil
	for _, i := range peers {
		w.traffic = append(w.traffic, pathTo(i).To.Next().Next())
	}
}

// checks returns how many packets were sent to each peer since the last call, by Path.To.
func (w *internet) checks() map[netip.Addr]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.checked
	w.checked = map[netip.Addr]int{}
	return all
}

// narrowed returns how many of the paths to peers have a smaller size than the MTU of the device.
func (p *Prober) narrowed(peers []int) (n int) {
	for _, i := range peers {
		if p.Size(pathTo(i).Subnet) != 0 {
			n++
		}
	}
	return n
}

func numbers(first, n int) (all []int) {
	for i := range n {
		all = append(all, first+i)
	}
	return all
}

// TestBusyPathsFirst narrows some of 5,000 paths, which carry large packets. These must have a smaller size
// within a minute at most, although most paths were never checked. The host must not send more packets than
// without traffic, and must go on checking the other paths.
func TestBusyPathsFirst(t *testing.T) {
	const n, first = 5000, 4900
	for _, tc := range []struct {
		name         string
		busy, narrow int           // numbers of paths
		since        time.Duration // time from the begin of the traffic until the paths are narrow
		within       time.Duration
	}{
		{"one busy path", 1, 1, time.Minute, 6 * time.Second},
		{"traffic begins when the path is narrow", 1, 1, 0, 8 * time.Second},
		{"one of three dozens", 36, 1, time.Minute, 10 * time.Second},
		{"three dozens", 36, 36, time.Minute, 60 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var w internet
				p := w.prober(t, n, Config{})
				time.Sleep(5 * time.Second)
				busy, narrow := numbers(first, tc.busy), numbers(first, tc.narrow)
				w.carry(busy...)
				w.checks()
				time.Sleep(tc.since)
				others := len(w.checks()) - tc.busy
				if least := int(tc.since/time.Second) * Rate / (busyInARow + 2); tc.since > 0 && others < least {
					t.Errorf("%d checks of other paths in %s, want at least %d", others, tc.since, least)
				}
				w.set(1300, narrow...)
				begin := time.Now()
				for p.narrowed(narrow) < tc.narrow && time.Since(begin) < 5*time.Minute {
					time.Sleep(100 * time.Millisecond)
				}
				t.Logf("a smaller size after %s", time.Since(begin))
				if took := time.Since(begin); took > tc.within {
					t.Errorf("%d of %d paths have a smaller size after %s, want all within %s", p.narrowed(narrow), tc.narrow, took, tc.within)
				}
				if most := w.mostPerSecond(); most > Rate+1 {
					t.Errorf("%d packets in a second, want at most %d", most, Rate)
				}
			})
		})
	}
}

// TestBusyPathsBecomeIdle lets some paths carry large packets, then all, and then none. Every path must be
// checked within one minute, or within four minutes while only some paths are busy. Void entries must not
// fill the queues.
func TestBusyPathsBecomeIdle(t *testing.T) {
	const n = 500
	synctest.Test(t, func(t *testing.T) {
		var w internet
		p := w.prober(t, n, Config{})
		for _, busy := range []int{10, 40, 20, n, 0} {
			w.carry(numbers(0, busy)...)
			time.Sleep(2 * busyFor)
			w.checks()
			during := 60 * time.Second
			if busy > 0 && busy < n { // the other paths get a quarter of the checks, and those that the busy paths do not need
				during = 240 * time.Second
			}
			time.Sleep(during)
			checks, inTime := w.checks(), 0
			for i := range n {
				if checks[pathTo(i).To] > 0 {
					inTime++
				}
			}
			if inTime < n {
				t.Errorf("%d busy paths: %d of %d paths are checked within %s", busy, inTime, n, during)
			}
			p.mu.Lock()
			if all := len(p.order.busy) + len(p.order.fresh) + len(p.order.due); all > 2*n {
				t.Errorf("%d busy paths: the queues have %d entries for %d paths", busy, all, n)
			}
			p.mu.Unlock()
		}
	})
}

// TestFewPathsNeedNoSamples expects no sample if all paths are checked in each interval anyway, and samples
// if there is one path more.
func TestFewPathsNeedNoSamples(t *testing.T) {
	for n, want := range map[int]bool{uncrowded: false, uncrowded + 1: true} {
		synctest.Test(t, func(t *testing.T) {
			var w internet
			w.prober(t, n, Config{})
			time.Sleep(time.Minute)
			w.mu.Lock()
			defer w.mu.Unlock()
			if got := w.samples > 0; got != want {
				t.Errorf("%d paths: %d samples", n, w.samples)
			}
		})
	}
}

// TestPathToAnAddress looks up paths to subnets of different sizes.
func TestPathToAnAddress(t *testing.T) {
	p := NewProber(Config{Limit: NewLimit(), Resized: func() {}})
	for _, subnet := range []string{"10.5.1.0/24", "10.6.0.0/16", "10.5.2.128/25", "fd00:5:1::/64"} {
		s := netip.MustParsePrefix(subnet)
		p.Aim(subnet, []Path{{Subnet: s, To: s.Addr(), Full: 1450, Least: 576}})
	}
	for address, want := range map[string]string{
		"10.5.1.0": "10.5.1.0/24", "10.5.1.255": "10.5.1.0/24", "10.5.2.1": "", "10.5.2.129": "10.5.2.128/25", "10.6.9.9": "10.6.0.0/16",
		"fd00:5:1::9": "fd00:5:1::/64", "fd00:5:2::9": "", "192.0.2.1": "",
	} {
		got := ""
		if s := p.to(netip.MustParseAddr(address)); s != nil {
			got = s.key
		}
		if got != want {
			t.Errorf("%s: the path is %q, want %q", address, got, want)
		}
	}
}
