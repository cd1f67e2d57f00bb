// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"context"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

func onD1(index, mtu int, addrs ...string) Interface {
	i := Interface{Name: "d1", Index: index, MTU: mtu}
	for _, a := range addrs {
		i.Addrs = append(i.Addrs, Address{Local: ip(a), Public: ip(a)})
	}
	return i
}

func TestFollower(t *testing.T) {
	now := onD1(1, 1500, "10.1.0.2", "fd01::2")
	other := onD1(1, 1500, "10.1.0.3", "fd01::2")
	backup := other
	backup.Name, backup.Index = "d2", 2
	renamed := now
	renamed.Name = "d2"
	narrow := func(i Interface, mtu int) Interface { i.MTU = mtu; return i }
	none := net.UnknownNetworkError("no interface")
	type check struct {
		after  time.Duration // since the check before
		choice Interface
		err    error
		down   bool
		works  bool
		moved  bool
		says   string // part of the log; empty for none
	}
	const missing, again, tooOften = "cannot be used now", "can be used again", "changed too often"
	// There are mostMoves quick moves, and then another one is due.
	back := check{after: stable, choice: now, works: true, moved: true}
	forth := check{after: stable, choice: other, works: true, moved: true}
	quick := []check{{choice: other, works: true}, forth, {choice: now, works: true}, back, {choice: other, works: true}, forth, {choice: now, works: true}}
	for name, checks := range map[string][]check{
		"no change": {{choice: now}, {after: time.Hour, choice: now}},
		"an address, once it is stable": {
			{choice: other}, {after: stable - 1, choice: other}, {after: 1, choice: other, moved: true}, {after: time.Minute, choice: other},
		},
		"a second change must be stable again": {
			{choice: other}, {after: stable - 1, choice: onD1(1, 1500, "10.1.0.4", "fd01::2")}, {after: 1, choice: other}, {after: stable, choice: other, moved: true},
		},
		"a change that is reverted": {{choice: other}, {after: stable - 1, choice: now}, {after: time.Second, choice: other}, {after: stable, choice: other, moved: true}},
		"no interface":              {{err: none, says: missing}, {after: time.Hour, err: none}, {choice: now, says: again}, {choice: now}, {err: none, says: missing}},
		"another address after no interface": {
			{err: none, says: missing}, {after: time.Second, choice: other, says: again}, {after: stable, choice: other, moved: true},
		},
		"no interface, and a change before and after it": {
			{choice: other}, {after: stable - 1, err: none, says: missing}, {after: 1, choice: other, says: again}, {after: stable, choice: other, moved: true},
		},
		"a link-local address for a better one": {
			{choice: onD1(1, 1500, "10.1.0.2", "fe80::2"), says: missing}, {after: time.Hour, choice: onD1(1, 1500, "10.1.0.2", "fe80::2")},
		},
		"another interface while the chosen one is down": {
			{choice: backup, down: true}, {after: stable, choice: backup, down: true}, {after: returning, choice: now},
		},
		"another interface while the chosen one stays away": {
			{choice: backup, down: true}, {after: stable, choice: backup, down: true},
			{after: returning - stable - 1, choice: backup, down: true}, {after: 1, choice: backup, down: true, moved: true},
		},
		"another interface after the chosen one went again": {
			{choice: backup, down: true}, {after: returning - 1, choice: now}, {after: 1, choice: backup, down: true},
			{after: returning - 1, choice: backup, down: true}, {after: 1, choice: backup, down: true, moved: true},
		},
		"another interface after it was down": {
			{err: none, down: true, says: missing}, {after: time.Second, choice: backup, says: again}, {after: returning - time.Second - 1, choice: backup},
			{after: 1, choice: backup, moved: true},
		},
		"back from another interface": {
			{choice: backup, down: true}, {after: returning, choice: backup, down: true, moved: true}, {choice: now}, {after: stable, choice: now, moved: true},
		},
		"back from another interface that is down": {
			{choice: backup, down: true}, {after: returning, choice: backup, down: true, moved: true}, {choice: now, down: true},
			{after: returning - 1, choice: now, down: true}, {after: 1, choice: now, down: true, moved: true},
		},
		"another index": {{err: none, down: true, says: missing}, {choice: onD1(7, 1500, "10.1.0.2", "fd01::2"), says: again},
			{after: stable, choice: onD1(7, 1500, "10.1.0.2", "fd01::2"), moved: true}},
		"a fourth move within a minute": append(quick, check{after: stable, choice: now, works: true, says: tooOften},
			check{after: moveWindow - 3*stable - 1, choice: now, works: true}, check{after: 1, choice: now, works: true, moved: true}),
		"a fourth and a fifth move within a minute": {
			{choice: other, works: true}, forth, {after: 10*time.Second - stable, choice: now, works: true}, back, {choice: other, works: true}, forth,
			{choice: now, works: true}, {after: stable, choice: now, works: true, says: tooOften},
			{after: moveWindow - 10*time.Second - 2*stable, choice: now, works: true, moved: true},
			{choice: other, works: true}, {after: stable, choice: other, works: true, says: tooOften}, {after: stable, choice: other, works: true},
		},
		"another MTU after three moves": append(quick[:6:6], check{choice: narrow(other, 1400), works: true}, check{after: stable, choice: narrow(other, 1400), works: true, moved: true}),
		"a move after three other MTUs": {
			{choice: narrow(now, 1400)}, {after: stable, choice: narrow(now, 1400), moved: true}, {choice: now}, {after: stable, choice: now, moved: true},
			{choice: narrow(now, 1400)}, {after: stable, choice: narrow(now, 1400), moved: true},
			{choice: narrow(other, 1400), works: true}, {after: stable, choice: narrow(other, 1400), works: true, moved: true},
		},
		"another name": {{choice: renamed}, {after: stable, choice: renamed, moved: true}},
		"another name after it was down": {
			{err: none, down: true, says: missing}, {after: time.Second, choice: renamed, says: again}, {after: returning - time.Second - 1, choice: renamed},
			{after: 1, choice: renamed, moved: true},
		},
		"another address after it was down": {
			{err: none, down: true, says: missing}, {after: time.Second, choice: other, says: again}, {after: returning - time.Second - 1, choice: other},
			{after: 1, choice: other, moved: true},
		},
		"a fourth move within a minute, because nothing works": append(quick, check{after: stable, choice: now, moved: true}),
		"another MTU": {{choice: onD1(1, 1400, "10.1.0.2", "fd01::2")}, {after: stable, choice: onD1(1, 1400, "10.1.0.2", "fd01::2"), moved: true}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, log := logged(t)
				f := follower{now: now}
				for i, l := range checks {
					time.Sleep(l.after)
					log.Reset()
					moved, again := f.consider(ctx, observation{time.Now(), l.choice, l.err, l.down, l.works})
					if moved != l.moved || moved && !same(f.now, l.choice) {
						t.Errorf("check %d: moved %v to %+v, want %v", i, moved, f.now, l.moved)
					}
					if again <= 0 {
						t.Errorf("check %d: again after %s", i, again)
					}
					if got := log.String(); !strings.Contains(got, l.says) || l.says == "" && got != "" {
						t.Errorf("check %d: logged %q, want %q", i, got, l.says)
					}
				}
			})
		})
	}
}

// TestWorse compares the choice on d1 with the one in use.
func TestWorse(t *testing.T) {
	for _, tt := range []struct {
		choice, inUse []string
		want          bool
	}{
		{[]string{"10.1.0.2", "fe80::2"}, []string{"10.1.0.2", "fd01::2"}, true},
		{[]string{"10.1.0.2", "fe80::2"}, []string{"10.1.0.2", "fe80::1"}, false},
		{[]string{"10.1.0.2", "fe80::2"}, []string{"10.1.0.2"}, false},
		{[]string{"fe80::2"}, []string{"fe80::1"}, false},
		{[]string{"169.254.0.2", "fd01::3"}, []string{"10.1.0.2", "fd01::2"}, true},
		{[]string{"10.1.0.3"}, []string{"10.1.0.2"}, false},
	} {
		if got := worse(onD1(1, 1500, tt.choice...), onD1(1, 1500, tt.inUse...)); got != tt.want {
			t.Errorf("%v instead of %v: worse is %v, want %v", tt.choice, tt.inUse, got, tt.want)
		}
	}
}

// TestFollowerWaitsForADownInterface lets the chosen interface be down at first. It checks that another
// interface replaces the chosen one exactly when the time returning is over.
func TestFollowerWaitsForADownInterface(t *testing.T) {
	now, backup := onD1(1, 1500, "10.1.0.2"), Interface{Name: "d2", Index: 2, MTU: 1500, Addrs: []Address{{ip("10.2.0.2"), ip("10.2.0.2")}}}
	start := time.Unix(0, 0)
	f := follower{now: now}
	at := start
	for down := true; ; {
		moved, again := f.consider(t.Context(), observation{at, backup, nil, down, false})
		if moved {
			break
		}
		at, down = at.Add(again), false
	}
	if took := at.Sub(start); took != returning {
		t.Errorf("took the backup after %s, want %s", took, returning)
	}
}

func TestKernelWatch(t *testing.T) {
	k := newKernel(t)
	k.addLink("d1", true)
	k.addAddr("d1", "10.1.0.2/24", 0)
	k.addAddr("d1", "fd01::2/64", unix.IFA_F_NODAD)
	defaults := func() {
		k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: net.ParseIP("10.1.0.1")})
		k.addRoute(netlink.Route{Dst: mask("::/0"), Gw: net.ParseIP("fd01::1")})
	}
	defaults()
	o := Options{Families: dual}
	first, err := Wait(t.Context(), o, 0)
	if err != nil {
		t.Fatal(err)
	}
	steps := []struct {
		name string
		do   func()
		want func(Interface) bool
	}{
		{"MTU", func() { k.must(k.h.LinkSetMTU(k.link("d1"), 1300)) }, func(i Interface) bool { return i.MTU == 1300 }},
		{"address", func() {
			k.must(k.h.AddrDel(k.link("d1"), &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP("10.1.0.2"), Mask: net.CIDRMask(24, 32)}}))
			k.addAddr("d1", "10.1.0.3/24", 0)
			k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: net.ParseIP("10.1.0.1")})
		}, func(i Interface) bool {
			return slices.ContainsFunc(i.Addrs, func(a Address) bool { return a.Local == ip("10.1.0.3") })
		}},
		{"index", func() {
			k.must(k.h.LinkDel(k.link("d1")))
			k.addLink("d1", true)
			k.addAddr("d1", "10.1.0.3/24", 0)
			k.addAddr("d1", "fd01::2/64", unix.IFA_F_NODAD)
			defaults()
		}, func(i Interface) bool { return i.Index != first.Index }},
	}
	changes := make(chan Interface, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		// Watch must not report that the link went down and up again.
		k.must(k.h.LinkSetDown(k.link("d1")))
		k.must(k.h.LinkSetUp(k.link("d1")))
		k.addAddr("d1", "fd01::2/64", unix.IFA_F_NODAD)
		defaults()
		for _, s := range steps {
			s.do()
			select {
			case i := <-changes:
				if !s.want(i) {
					t.Errorf("%s: changed called with %+v", s.name, i)
				}
			case <-time.After(prompt):
				t.Errorf("%s: changed not called", s.name)
			}
		}
	}()
	if err := Watch(ctx, o, first, func(i Interface) { changes <- i }, func(error) {}); err != nil {
		t.Error(err)
	}
}

// TestKernelWatchStays adds addresses that rank above those in use. It expects that Watch
// chooses them only when those in use are removed or deprecated.
func TestKernelWatchStays(t *testing.T) {
	for name, tt := range map[string]struct {
		opts  Options
		why   string // part of the reason of the move
		leave func(k kernel, inUse ...string)
	}{
		"until removed": {Options{Families: dual, Ifaces: []string{"d1"}}, "; 10.1.0.2 is gone", func(k kernel, inUse ...string) {
			for _, a := range inUse {
				k.must(k.h.AddrDel(k.link("d1"), address(a)))
			}
		}},
		"until deprecated": {Options{Families: dual, IfaceRegexes: []string{`^10\.|^fd01:`}}, "; 10.1.0.2 is deprecated", func(k kernel, inUse ...string) {
			for _, a := range inUse {
				old := address(a)
				old.ValidLft = 3600
				k.must(k.h.AddrReplace(k.link("d1"), old))
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			k.addLink("d1", true)
			lease := address("10.1.0.2/24")
			lease.ValidLft, lease.PreferedLft = 3600, 3600
			k.must(k.h.AddrAdd(k.link("d1"), lease))
			k.addAddr("d1", "fd01::2/64", unix.IFA_F_NODAD)
			first, err := Wait(t.Context(), tt.opts, 0)
			if err != nil {
				t.Fatal(err)
			}
			changes := make(chan Interface, 1)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				defer cancel()
				expect := func(what string, want Interface, why string) {
					select {
					case got := <-changes:
						if !same(got, want) || !strings.Contains(got.Reason, why) {
							t.Errorf("%s: changed called with %+v, want %+v because of %q", what, got, want, why)
						}
					case <-time.After(prompt):
						t.Errorf("%s: changed not called", what)
					}
				}
				k.addAddr("d1", "10.2.0.10/24", 0)
				k.addAddr("d1", "fd01::100/64", unix.IFA_F_NODAD)
				k.must(k.h.LinkSetMTU(k.link("d1"), 1300))
				expect("other addresses and another MTU", onD1(first.Index, 1300, "10.1.0.2", "fd01::2"), "")
				tt.leave(k, "10.1.0.2/24", "fd01::2/64")
				expect("only other addresses", onD1(first.Index, 1300, "10.2.0.10", "fd01::100"), tt.why)
			}()
			if err := Watch(ctx, tt.opts, first, func(i Interface) { changes <- i }, func(error) {}); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestKernelOnlyDefaultRoutesWake expects that default routes cause a notification, and that
// many other routes cause none.
func TestKernelOnlyDefaultRoutesWake(t *testing.T) {
	k := newKernel(t)
	k.addLink("d1", true)
	k.addAddr("d1", "10.1.0.2/24", 0)
	k.addAddr("d1", "fd01::2/64", unix.IFA_F_NODAD)
	changed, stop, err := Options{Families: dual}.subscribe()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	quiet := func() bool {
		select {
		case <-changed:
			return false
		case <-time.After(200 * time.Millisecond):
			return true
		}
	}
	for !quiet() { // the notifications about the links are still arriving
	}
	for i := range 50 {
		k.addRoute(netlink.Route{Dst: &net.IPNet{IP: net.IPv4(10, 7, byte(i), 0), Mask: net.CIDRMask(24, 32)}, Gw: net.ParseIP("10.1.0.1")})
	}
	if !quiet() {
		t.Error("woken by routes other than default routes")
	}
	for dst, gw := range map[string]string{"0.0.0.0/0": "10.1.0.1", "::/0": "fd01::1"} {
		k.addRoute(netlink.Route{Dst: mask(dst), Gw: net.ParseIP(gw)})
		if quiet() {
			t.Errorf("not woken by the default route %s", dst)
		}
		for !quiet() { // further notifications about the same change
		}
	}
}

func TestFactsCannotSend(t *testing.T) {
	now := onD1(1, 1500, "10.1.0.2", "fd01::2")
	d1 := func(change func(*Link)) Facts {
		l := Link{Name: "d1", Index: 1, MTU: 1500, Up: true, Running: true, Addrs: []Addr{{IP: ip("10.1.0.2")}, {IP: ip("fd01::2")}}}
		change(&l)
		return Facts{Links: []Link{{Name: "lo", Index: 2, Up: true, Running: true}, l}}
	}
	onLo := d1(func(l *Link) { l.Addrs = l.Addrs[1:] })
	onLo.Links[0].Addrs = []Addr{{IP: ip("10.1.0.2")}}
	const less = " fits the options or the routes to other hosts less"
	for name, tt := range map[string]struct {
		facts Facts
		want  string // expected error; empty for none
		keeps string // the address that the next choice keeps
		left  string // why the others are left
	}{
		"no problem":            {d1(func(*Link) {}), "", "fd01::2", "d1 with 10.1.0.2" + less},
		"a deprecated address":  {d1(func(l *Link) { l.Addrs[0].Deprecated = true }), "", "fd01::2", "10.1.0.2 is deprecated or not usable"},
		"an address on another": {onLo, "", "fd01::2", "lo with 10.1.0.2" + less},
		"no IPv4 address":       {d1(func(l *Link) { l.Addrs = l.Addrs[1:] }), "d1 cannot send from its address 10.1.0.2", "fd01::2", "10.1.0.2 is gone"},
		"no IPv6 address":       {d1(func(l *Link) { l.Addrs = l.Addrs[:1] }), "d1 cannot send from its address fd01::2", "10.1.0.2", "fd01::2 is gone"},
		"a tentative address":   {d1(func(l *Link) { l.Addrs[1].Tentative = true }), "d1 cannot send from its address fd01::2", "10.1.0.2", "fd01::2 is deprecated or not usable"},
		"no carrier":            {d1(func(l *Link) { l.Running = false }), "d1 is not there, down, or without a carrier", "10.1.0.2", "d1 is not there, down, or without a carrier"},
		"down":                  {d1(func(l *Link) { l.Up = false }), "d1 is not there, down, or without a carrier", "10.1.0.2", "d1 is not there, down, or without a carrier"},
		"gone":                  {Facts{Links: d1(func(*Link) {}).Links[:1]}, "d1 is not there, down, or without a carrier", "10.1.0.2", "d1 is not there, down, or without a carrier"},
	} {
		t.Run(name, func(t *testing.T) {
			got := ""
			if err := tt.facts.cannotSend(now); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
			if left := tt.facts.whyLeft(now, onD1(1, 1500, tt.keeps)); left != "; "+tt.left {
				t.Errorf("left because of %q, want %q", left, tt.left)
			}
			if left := tt.facts.whyLeft(now, now); left != "" {
				t.Errorf("left because of %q, but it is not left", left)
			}
		})
	}
}

// TestKernelWatchReportsUsability removes the only address of the chosen interface and
// adds it again. It expects that Watch calls usable each time, and never calls changed.
func TestKernelWatchReportsUsability(t *testing.T) {
	k := newKernel(t)
	k.addLink("d1", true)
	k.addAddr("d1", "10.1.0.2/24", 0)
	o := Options{Families: []prefix.Family{prefix.IPv4}, Ifaces: []string{"d1"}}
	first, err := Wait(t.Context(), o, 0)
	if err != nil {
		t.Fatal(err)
	}
	reasons := make(chan error, 100)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		expect := func(want string) {
			deadline := time.After(prompt)
			for {
				select {
				case err := <-reasons:
					if err == nil && want == "" || err != nil && err.Error() == want {
						return
					}
				case <-deadline:
					t.Errorf("usable not called with %q", want)
					return
				}
			}
		}
		expect("")
		k.must(k.h.AddrDel(k.link("d1"), address("10.1.0.2/24")))
		expect("d1 cannot send from its address 10.1.0.2")
		k.addAddr("d1", "10.1.0.2/24", 0)
		expect("")
	}()
	if err := Watch(ctx, o, first, func(i Interface) { t.Errorf("changed called with %+v", i) }, func(err error) { reasons <- err }); err != nil {
		t.Error(err)
	}
}
