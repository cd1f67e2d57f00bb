// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// internet carries packets to peers. Each path has a largest size. loss is the share of packets that get lost
// by chance.
type internet struct {
	mu      sync.Mutex
	carries map[netip.Addr]int // largest size by Path.To: 0 means no packets, and a missing entry all packets
	loss    float64
	rtt     time.Duration // 0 means a millisecond
	sent    []time.Time
	sizes   map[int]int        // number of packets, by size
	largest map[netip.Addr]int // size of the largest packet, by Path.To
}

func (w *internet) echo(ctx context.Context, p Path, size int, patience time.Duration) (time.Duration, bool) {
	w.mu.Lock()
	rtt := cmp.Or(w.rtt, time.Millisecond)
	w.sent = append(w.sent, time.Now())
	w.sizes[size]++
	w.largest[p.To] = max(w.largest[p.To], size)
	most, limited := w.carries[p.To]
	ok := (!limited || size <= most) && rand.Float64() >= w.loss
	w.mu.Unlock()
	took := rtt
	if ok = ok && rtt <= patience; !ok {
		took = patience
	}
	select {
	case <-time.After(took):
	case <-ctx.Done():
		return 0, false
	}
	return took, ok
}

// set sets the largest size of the paths to peers. The first peer is 0.
func (w *internet) set(size int, peers ...int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range peers {
		w.carries[pathTo(i).To] = size
	}
}

// mostPerSecond returns the largest number of packets that were sent within a second.
func (w *internet) mostPerSecond() (most int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, at := range w.sent {
		n := 0
		for _, later := range w.sent[i:] {
			if later.Sub(at) >= time.Second {
				break
			}
			n++
		}
		most = max(most, n)
	}
	return most
}

func pathTo(i int) Path {
	at := netip.AddrFrom4([4]byte{10, 5 + byte(i>>8), byte(i), 0})
	return Path{
		Subnet: netip.PrefixFrom(at, 24), Device: "flannel.1", From: netip.MustParseAddr("10.4.1.0"), To: at,
		PublicIP: netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)}), Full: 1450, Least: 576,
	}
}

func keyOf(i int) string { return fmt.Sprint("peer", i) }

// prober runs a prober of the peers 0 to n-1 until the end of the test.
func (w *internet) prober(t *testing.T, n int, c Config) *Prober {
	t.Helper()
	w.carries, w.sizes, w.largest = map[netip.Addr]int{}, map[int]int{}, map[netip.Addr]int{}
	c.Limit = NewLimit()
	if c.Resized == nil {
		c.Resized = func() {}
	}
	p := NewProber(c)
	p.echo = w.echo
	for i := range n {
		p.Aim(keyOf(i), []Path{pathTo(i)})
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return p
}

// TestSizes changes the largest packet that path 0 carries, step by step. A host with few peers must lower
// the size within seconds, and raise it more slowly. A path that carries nothing must keep its size.
func TestSizes(t *testing.T) {
	for _, tc := range []struct {
		name   string
		peers  int
		least  int // Path.Least
		steps  []int
		within []time.Duration
		want   []int
	}{
		{"narrow from the beginning", 1, 576, []int{1250}, []time.Duration{10 * time.Second}, []int{1250}},
		{"lowered and raised", 2, 576, []int{1450, 1300, 1450}, []time.Duration{3 * time.Second, 12 * time.Second, 40 * time.Second}, []int{0, 1300, 0}},
		{"lowered twice, raised to a size between", 2, 576, []int{1400, 1001, 1350}, []time.Duration{12 * time.Second, 12 * time.Second, 50 * time.Second}, []int{1400, 1001, 1350}},
		{"dead, then narrow", 2, 576, []int{1450, 0, 1280}, []time.Duration{5 * time.Second, time.Minute, 15 * time.Second}, []int{0, 0, 1280}},
		{"narrow, then dead, then the same", 2, 576, []int{1290, 0, 1290}, []time.Duration{15 * time.Second, time.Minute, 15 * time.Second}, []int{1290, 1290, 1290}},
		{"IPv6 has a least size", 2, 1280, []int{1279, 1281}, []time.Duration{15 * time.Second, time.Minute}, []int{1280, 1281}},
		{"one byte less, one byte more", 2, 576, []int{1449, 1450}, []time.Duration{15 * time.Second, time.Minute}, []int{1449, 0}},
		{"very narrow", 2, 576, []int{600}, []time.Duration{30 * time.Second}, []int{600}},
		{"a host that drops large echo requests", 2, 576, []int{575, 1300}, []time.Duration{time.Minute, 90 * time.Second}, []int{0, 1300}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var w internet
				p := w.prober(t, 0, Config{})
				w.set(tc.steps[0], 0)
				for i := range tc.peers {
					path := pathTo(i)
					path.Least = tc.least
					p.Aim(keyOf(i), []Path{path})
				}
				for i, size := range tc.steps {
					w.set(size, 0)
					time.Sleep(tc.within[i])
					if got := p.Size(pathTo(0).Subnet); got != tc.want[i] {
						t.Fatalf("step %d, the path carries %d bytes: size %d, want %d", i+1, size, got, tc.want[i])
					}
				}
				for i := 1; i < tc.peers; i++ {
					if got := p.Size(pathTo(i).Subnet); got != 0 {
						t.Errorf("another path: size %d, want that of the device", got)
					}
				}
				if most := w.mostPerSecond(); most > Rate+1 {
					t.Errorf("%d packets in a second, want at most %d", most, Rate)
				}
			})
		})
	}
}

// TestSatellite checks that the size of a path is found even if its round trip takes longer than
// leastPatience, for which searches on other paths wait.
func TestSatellite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := internet{rtt: 600 * time.Millisecond}
		p := w.prober(t, 1, Config{})
		for _, size := range []int{1300, 1400} {
			w.set(size, 0)
			time.Sleep(2 * time.Minute)
			if got := p.Size(pathTo(0).Subnet); got != size {
				t.Errorf("the path carries %d bytes: size %d", size, got)
			}
		}
	})
}

// TestPathBreaksInASearch breaks a path when a search has found a size that passes. The path must keep
// that size, because larger packets are known to get lost.
func TestPathBreaksInASearch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w internet
		p := w.prober(t, 1, Config{})
		size := func() int { return p.Size(pathTo(0).Subnet) }
		w.set(1300, 0)
		for begin := time.Now(); size() == 0; time.Sleep(time.Millisecond) {
			if time.Since(begin) > time.Minute {
				t.Fatal("no smaller size")
			}
		}
		w.set(0, 0)
		for range 60 {
			time.Sleep(time.Second)
			if size() == 0 {
				t.Fatal("the path has the size of the device again")
			}
		}
		w.set(1300, 0)
		time.Sleep(2 * time.Minute)
		if got := size(); got != 1300 {
			t.Errorf("size %d, want 1300", got)
		}
	})
}

// TestUnstablePath checks that a path that changes all the time gets few packets.
func TestUnstablePath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const during = 20 * time.Minute
		var w internet
		p := w.prober(t, 1, Config{})
		for begin := time.Now(); time.Since(begin) < during; time.Sleep(10 * time.Millisecond) {
			now := cmp.Or(p.Size(pathTo(0).Subnet), 1450)
			if now < 700 {
				now = 1451
			}
			w.set(now-1, 0)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if checks := int(during / interval); len(w.sent) < checks/2 || len(w.sent) > checks+400 {
			t.Errorf("%d packets in %s, want some more than one in %s", len(w.sent), during, interval)
		}
	})
}

// TestEarlyRelief expects that the path gets the common size while the search for the largest one goes on,
// and that only the largest one is reported.
func TestEarlyRelief(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w internet
		var changes []string
		p := w.prober(t, 1, Config{Changed: func(c Change) { changes = append(changes, fmt.Sprint(c.Key, " ", c.Before, " ", c.Now)) }})
		time.Sleep(3 * time.Second)
		w.set(1300, 0)
		begin, seen := time.Now(), []int{}
		for time.Since(begin) < 15*time.Second {
			time.Sleep(10 * time.Millisecond)
			if now := p.Size(pathTo(0).Subnet); now != 0 && !slices.Contains(seen, now) {
				if len(seen) == 0 && time.Since(begin) > 6*time.Second {
					t.Errorf("the first smaller size after %s, want 6 s at most", time.Since(begin))
				}
				seen = append(seen, now)
			}
		}
		if !slices.Equal(seen, []int{1280, 1300}) {
			t.Errorf("sizes %v, want the common one and the exact one", seen)
		}
		if want := []string{"peer0 1450 1300"}; !slices.Equal(changes, want) {
			t.Errorf("reported %v, want %v", changes, want)
		}
		if keys := p.Take(); !slices.Equal(keys, []string{"peer0"}) {
			t.Errorf("Take returns %v, want the peer", keys)
		}
		if keys := p.Take(); len(keys) > 0 {
			t.Errorf("Take again returns %v, want nothing", keys)
		}
	})
}

// TestLoss loses one packet of ten. A size may be lowered for at most 5 % of the time, and must be full
// again when no more packets get lost.
func TestLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w internet
		p := w.prober(t, 10, Config{})
		w.mu.Lock()
		w.loss = 0.1
		w.mu.Unlock()
		low := 0
		for range 600 {
			time.Sleep(time.Second)
			for i := range 10 {
				if p.Size(pathTo(i).Subnet) != 0 {
					low++
				}
			}
		}
		if percent := float64(low) / 60; percent > 5 {
			t.Errorf("a path is lowered for %.1f %% of the time, want at most 5 %%", percent)
		}
		w.mu.Lock()
		w.loss = 0
		w.mu.Unlock()
		time.Sleep(2 * time.Minute)
		for i := range 10 {
			if got := p.Size(pathTo(i).Subnet); got != 0 {
				t.Errorf("path %d without losses: size %d, want that of the device", i, got)
			}
		}
	})
}

// TestManyPeers expects the limits in the documentation: at most 10 packets a second, and a check of each
// path as often as that allows.
func TestManyPeers(t *testing.T) {
	for n, within := range map[int]time.Duration{15: 3 * time.Second, 100: 11 * time.Second, 1000: 105 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			var w internet
			p := w.prober(t, n, Config{})
			time.Sleep(3 * within)
			w.mu.Lock()
			w.sent = nil
			before := w.sizes[1450]
			w.mu.Unlock()
			time.Sleep(within)
			w.mu.Lock()
			checked := w.sizes[1450] - before
			w.mu.Unlock()
			if checked < n || len(w.sizes) != 1 {
				t.Errorf("%d of %d paths are checked within %s, by packets of the sizes %v; want all by full ones", checked, n, within, w.sizes)
			}
			if most := w.mostPerSecond(); most > Rate+1 {
				t.Errorf("%d peers: %d packets in a second, want %d", n, most, Rate)
			}
			_ = p
		})
	}
}

// TestBefore expects a path to begin with the size that it had before a restart. No packet may be larger
// until the prober tries whether the path carries more, after raiseEvery. The path must have the full size if
// the former size is not between Path.Least and Path.Full.
func TestBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w internet
		resized := 0
		before := map[netip.Prefix]int{pathTo(0).Subnet: 1300, pathTo(1).Subnet: 1450, pathTo(2).Subnet: 9000, pathTo(3).Subnet: 60}
		p := w.prober(t, 0, Config{Before: before, Resized: func() { resized++ }})
		w.set(1300, 0)
		for i := range 4 {
			p.Aim(keyOf(i), []Path{pathTo(i)})
		}
		for i, want := range []int{1300, 0, 0, 0} {
			if got := p.Size(pathTo(i).Subnet); got != want {
				t.Errorf("path %d: size %d, want %d", i, got, want)
			}
		}
		expectLargest := func(i, want int) {
			t.Helper()
			w.mu.Lock()
			defer w.mu.Unlock()
			if got := w.largest[pathTo(i).To]; got != want {
				t.Errorf("path %d: the largest packet has %d bytes, want %d", i, got, want)
			}
		}
		time.Sleep(20 * time.Second)
		if got := p.Size(pathTo(0).Subnet); got != 1300 || resized > 0 {
			t.Errorf("size %d, resized %d times; want 1300 and no change", got, resized)
		}
		for i, want := range []int{1300, 1450, 1450, 1450} {
			expectLargest(i, want)
		}
		w.set(1450, 0)
		time.Sleep(raiseEvery)
		if got := p.Size(pathTo(0).Subnet); got != 0 || resized != 1 {
			t.Errorf("the path carries more: size %d, resized %d times; want 0 and one change", got, resized)
		}
		expectLargest(0, 1450)
	})
}

// TestAim changes the paths to peers while they are checked. A subnet that moves to another lease, or comes
// back, must keep its size. Paths to peers that are gone must get no packets.
func TestAim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w internet
		p := w.prober(t, 3, Config{})
		w.set(1300, 0)
		time.Sleep(15 * time.Second)
		other := pathTo(0)
		other.PublicIP = netip.MustParseAddr("192.0.2.1")
		p.Aim("another", []Path{other}) // the subnet has another owner, before the former one is gone
		p.Aim(keyOf(0), nil)
		if got := p.Size(other.Subnet); got != 1300 {
			t.Errorf("the subnet has moved: size %d, want the former one", got)
		}
		p.Aim("another", nil)
		if got := p.Size(other.Subnet); got != 0 {
			t.Errorf("the peer is gone: size %d, want none", got)
		}
		p.Aim(keyOf(0), []Path{pathTo(0)}) // the first peer comes back
		if got := p.Size(other.Subnet); got != 1300 {
			t.Errorf("the peer is back: size %d, want the former one", got)
		}
		p.Retain(func(key string) bool { return key == keyOf(1) })
		time.Sleep(5 * time.Second)
		w.mu.Lock()
		before := len(w.sent)
		w.mu.Unlock()
		time.Sleep(20 * time.Second)
		w.mu.Lock()
		sent := len(w.sent) - before
		w.mu.Unlock()
		if sent < 9 || sent > 11 {
			t.Errorf("%d packets in 20 s, want those to one peer", sent)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.paths) != 1 || len(p.peers) != 1 || p.order.Len() > 1 {
			t.Errorf("%d paths, %d peers, %d in the queue; want one", len(p.paths), len(p.peers), p.order.Len())
		}
	})
}

// TestAllAtOnce narrows a link that all paths share, and one path even more. Every path must soon get its
// exact size.
func TestAllAtOnce(t *testing.T) {
	const n = 50
	synctest.Test(t, func(t *testing.T) {
		var w internet
		p := w.prober(t, n, Config{})
		time.Sleep(10 * time.Second)
		for i := range n {
			w.set(1300, i)
		}
		w.set(1290, 7)
		begin, relieved, found := time.Now(), time.Duration(0), time.Duration(0)
		for found == 0 && time.Since(begin) < 5*time.Minute {
			time.Sleep(100 * time.Millisecond)
			low, exact := 0, 0
			for i := range n {
				size := p.Size(pathTo(i).Subnet)
				if size > 0 {
					low++
				}
				if size == 1300 || i == 7 && size == 1290 {
					exact++
				}
			}
			if low == n && relieved == 0 {
				relieved = time.Since(begin)
			}
			if exact == n {
				found = time.Since(begin)
			}
		}
		t.Logf("all paths have a smaller size after %s, and the exact one after %s", relieved, found)
		if limit := n * 1500 * time.Millisecond; relieved == 0 || found == 0 || found > limit {
			t.Errorf("all paths have the exact size after %s, want %s at most", found, limit)
		}
	})
}
