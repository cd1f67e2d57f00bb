// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kernel is a new, empty network namespace. The test's goroutine runs in it. All methods
// act on it, even if another goroutine calls them.
type kernel struct {
	*testing.T
	h *netlink.Handle
}

// newKernel moves the test to a new network namespace. Its thread stays locked and ends
// with the test, which removes the namespace.
func newKernel(t *testing.T) kernel {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace (this test needs root): %v", err)
	}
	// Without automatic link-local addresses, links have only the addresses, and cause
	// only the notifications, that the test asks for.
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/default/addr_gen_mode", []byte("1"), 0); err != nil {
		t.Fatalf("turn off link-local addresses (this test needs IPv6): %v", err)
	}
	ns, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return kernel{t, h}
}

func (k kernel) must(err error) {
	k.Helper()
	if err != nil {
		k.Error(err)
	}
}

// link returns the named link. If there is none, it fails the test and returns a link that
// no call can use.
func (k kernel) link(name string) netlink.Link {
	k.Helper()
	l, err := k.h.LinkByName(name)
	if err != nil {
		k.Errorf("link %s: %v", name, err)
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: -1}}
	}
	return l
}

func (k kernel) setUp(name string) {
	k.Helper()
	k.must(k.h.LinkSetUp(k.link(name)))
}

// addLink adds a veth pair. Its ends are name and name-peer. Both are set up, so that they
// have a carrier, if up is true.
func (k kernel) addLink(name string, up bool) {
	k.Helper()
	peer := name + "-peer"
	k.must(k.h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: 1400}, PeerName: peer}))
	if up {
		k.setUp(peer)
		k.setUp(name)
	}
}

func (k kernel) addAddr(name, cidr string, flags int) {
	k.Helper()
	a := address(cidr)
	a.Flags = flags
	k.must(k.h.AddrAdd(k.link(name), a))
}

func address(cidr string) *netlink.Addr {
	a, err := netlink.ParseAddr(cidr)
	if err != nil {
		panic(err)
	}
	return a
}

func (k kernel) addRoute(r netlink.Route) {
	k.Helper()
	k.must(k.h.RouteAdd(&r))
}

func mask(cidr string) *net.IPNet {
	_, n, err := net.ParseCIDR(cidr)
	if err != nil {
		panic(err)
	}
	return n
}

func gather(ctx context.Context, o Options) (Facts, error) {
	g := o.gather(ctx, 0)
	return g.facts, g.err
}

// TestKernelInspect asks for the candidates of a host with pods, with an option that selects the interface.
// The answer must say where the default route is, and must not name the links of pods. Calls in
// quick succession must share reads.
func TestKernelInspect(t *testing.T) {
	k := newKernel(t)
	k.addLink("d1", true)
	k.addLink("d2", true)
	k.addLink("pod", true)
	k.addAddr("d1", "10.1.0.2/24", 0)
	k.addAddr("d2", "10.2.0.2/24", 0)
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: net.ParseIP("10.1.0.1")})
	k.must(k.h.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0"}}))
	k.must(k.h.LinkSetMaster(k.link("pod"), k.link("cni0")))

	o := Options{Families: v4, Ifaces: []string{"d2"}, Reader: &Reader{}}
	begin := time.Now()
	for range 3 {
		all, err := Inspect(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for _, c := range all {
			got[c.Name] = fmt.Sprint(c.Chosen, c.For)
		}
		_, pod := got["pod"]
		if got["d1"] != "false [default route in the main table]" || got["d2"] != "true []" || pod {
			t.Errorf("the candidates are %v, want d2 chosen, the default route of d1, and no link of a pod", got)
		}
	}
	if took := time.Since(begin); took < 2*leastRest {
		t.Errorf("three reads took %v, want a rest of %v between them", took, leastRest)
	}
}

func TestKernelGather(t *testing.T) {
	k := newKernel(t)
	k.setUp("lo")
	k.addLink("d1", true)
	k.addLink("d2", true)
	k.addLink("d3", false)
	k.addAddr("d1", "10.1.0.2/24", 0)
	k.addAddr("d1", "10.1.0.3/24", 0)
	k.addAddr("d1", "fd01::2/64", unix.IFA_F_NODAD)
	k.addAddr("d2", "10.2.0.2/24", 0)
	k.addAddr("d2", "10.2.9.9/32", 0)
	k.addAddr("d2", "10.2.6.0/31", 0)
	k.addAddr("d2", "fd02::9/128", unix.IFA_F_NODAD)
	withPeer := address("10.2.8.8/32")
	withPeer.Peer = mask("10.2.8.1/32")
	k.must(k.h.AddrAdd(k.link("d2"), withPeer))
	// Without a carrier, IPv6 addresses stay tentative.
	k.addLink("d4", false)
	k.setUp("d4")
	k.addAddr("d4", "fd03::2/28", 0)
	d1, d2 := k.link("d1").Attrs().Index, k.link("d2").Attrs().Index

	gw := net.ParseIP
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: gw("10.2.0.1"), Priority: 200})
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: gw("10.1.0.1"), Priority: 100})
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Priority: 300, MultiPath: []*netlink.NexthopInfo{{Gw: gw("10.1.0.1")}, {Gw: gw("10.2.0.1")}}})
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Priority: 400, MultiPath: []*netlink.NexthopInfo{{Gw: gw("10.1.0.1")}, {Gw: gw("10.1.0.9")}}})
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Priority: 500, Type: unix.RTN_UNREACHABLE})
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: gw("10.2.0.1"), Table: 99})
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: gw("10.2.0.1"), Tos: 8})
	k.addRoute(netlink.Route{Dst: mask("0.0.0.0/1"), Gw: gw("10.2.0.1")})
	k.addRoute(netlink.Route{Dst: mask("10.77.0.0/16"), Gw: gw("10.1.0.1"), Src: gw("10.1.0.3")})
	k.addRoute(netlink.Route{Dst: mask("10.78.0.0/16"), Type: unix.RTN_BLACKHOLE})
	k.addRoute(netlink.Route{Dst: mask("::/0"), Gw: gw("fd01::1"), Priority: 50})

	if got := fmt.Sprint(Broadcasts()); got != "[127.255.255.255 10.1.0.255 10.1.0.255 10.2.0.255]" {
		t.Errorf("broadcast addresses %s, want one for each address of a network that has one", got)
	}

	f, err := gather(t.Context(), Options{Families: dual})
	if err != nil {
		t.Fatal(err)
	}
	wantDefaults := []DefaultRoute{
		defaultRoute(prefix.IPv4, 100, d1), defaultRoute(prefix.IPv4, 200, d2), defaultRoute(prefix.IPv4, 300, d1, d2), defaultRoute(prefix.IPv4, 400, d1),
		defaultRoute(prefix.IPv6, 50, d1),
	}
	if diff := cmp.Diff(wantDefaults, f.Defaults); diff != "" {
		t.Errorf("default routes (-want +got):\n%s", diff)
	}
	if !slices.IsSortedFunc(f.Links, func(a, b Link) int { return a.Index - b.Index }) {
		t.Errorf("links are not in index order: %+v", f.Links)
	}
	byName := map[string]Link{}
	for _, l := range f.Links {
		if want := k.link(l.Name).Attrs().HardwareAddr.String(); l.Hardware != want {
			t.Errorf("the hardware address of %s is %s, want %s", l.Name, l.Hardware, want)
		}
		l.Index, l.Hardware = 0, ""
		byName[l.Name] = l
	}
	perm := func(s string) Addr {
		p := netip.MustParsePrefix(s)
		return Addr{IP: p.Addr(), Network: p.Masked(), Permanent: true}
	}
	secondary, tentative, withOther := perm("10.1.0.3/24"), perm("fd03::2/28"), perm("10.2.8.8/32")
	secondary.Temporary, tentative.Tentative, withOther.Network = true, true, netip.MustParsePrefix("10.2.8.1/32")
	want := map[string]Link{
		"lo": {Name: "lo", MTU: 65536, Up: true, Running: true, Addrs: []Addr{perm("127.0.0.1/8"), perm("::1/128")}},
		"d1": {Name: "d1", Kind: "veth", MTU: 1400, Up: true, Running: true, Addrs: []Addr{perm("10.1.0.2/24"), secondary, perm("fd01::2/64")}},
		"d2": {Name: "d2", Kind: "veth", MTU: 1400, Up: true, Running: true, Addrs: []Addr{perm("10.2.0.2/24"), perm("10.2.9.9/32"), perm("10.2.6.0/31"), withOther, perm("fd02::9/128")}},
		"d3": {Name: "d3", Kind: "veth", MTU: 1400},
		"d4": {Name: "d4", Kind: "veth", MTU: 1400, Up: true, Addrs: []Addr{tentative}},
	}
	for name, w := range want {
		if diff := cmp.Diff(w, byName[name], cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("link %s (-want +got):\n%s", name, diff)
		}
	}

	i, err := choose(f, Options{Families: dual})
	if want := "d1 10.1.0.2 fd01::2 | default route"; err != nil || show(i.Interface) != want {
		t.Errorf("got %s, error %v; want %s", show(i.Interface), err, want)
	}

	for _, tt := range []struct {
		target string
		want   string
	}{
		{"10.77.1.1", "d1 10.1.0.3 | --iface-can-reach 10.77.1.1"},
		{"10.2.0.99", "d2 10.2.0.2 | --iface-can-reach 10.2.0.99"},
		{"10.2.0.2", "d2 10.2.0.2 | --iface-can-reach 10.2.0.2 is assigned here"},
		{"10.78.0.1", "--iface-can-reach 10.78.0.1: look up route: "},
		{"fd99::1", "d1 10.1.0.2 | --iface-can-reach fd99::1"},
	} {
		o := Options{Families: v4, CanReach: tt.target}
		f, err := gather(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if len(f.Defaults) != 0 {
			t.Errorf("%s: default routes read without need", tt.target)
		}
		i, err := choose(f, o)
		if got := show(i.Interface); got != tt.want && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("got %s, error %v; want %s", got, err, tt.want)
		}
	}
	o := Options{Families: dual, CanReach: "fd99::1"}
	if f, err = gather(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	i, err = choose(f, o)
	if want := "d1 10.1.0.2 fd01::2 | --iface-can-reach fd99::1"; err != nil || show(i.Interface) != want {
		t.Errorf("got %s, error %v; want %s", show(i.Interface), err, want)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := gather(ctx, Options{Families: v4}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: got %v", err)
	}
}

// TestParent checks that an index in another network namespace is not taken for a link of this one.
func TestParent(t *testing.T) {
	at := func(other int) netlink.LinkAttrs { return netlink.LinkAttrs{ParentIndex: 7, NetNsID: other} }
	for want, links := range map[int][]netlink.Link{
		7: {&netlink.Vlan{LinkAttrs: at(-1)}, &netlink.Macvlan{LinkAttrs: at(-1)}},
		0: {&netlink.Macvlan{LinkAttrs: at(0)}, &netlink.Veth{LinkAttrs: at(-1)}, &netlink.Veth{LinkAttrs: at(0)}},
	} {
		for _, l := range links {
			if got := parent(l); got != want {
				t.Errorf("parent of %s with namespace %d = %d, want %d", l.Type(), l.Attrs().NetNsID, got, want)
			}
		}
	}
}

func TestKernelAddrFlags(t *testing.T) {
	a := ip("fd00::1")
	for flags, want := range map[int]Addr{
		0:                        {IP: a},
		unix.IFA_F_PERMANENT:     {IP: a, Permanent: true},
		unix.IFA_F_TEMPORARY:     {IP: a, Temporary: true},
		unix.IFA_F_DEPRECATED:    {IP: a, Deprecated: true},
		unix.IFA_F_TENTATIVE:     {IP: a, Tentative: true},
		unix.IFA_F_NOPREFIXROUTE: {IP: a},
		unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC: {IP: a},
		unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED:  {IP: a, Tentative: true, Duplicate: true},
	} {
		want.Network = netip.MustParsePrefix("fd00::/64")
		if got := newAddr(a, netlink.Addr{IPNet: mask("fd00::1/64"), Flags: flags}); got != want {
			t.Errorf("flags %#x: got %+v, want %+v", flags, got, want)
		}
	}
}

func TestKernelDumpIsNeverPartial(t *testing.T) {
	other := errors.New("other")
	for name, tt := range map[string]struct {
		errs  []error // the last one repeats
		calls int
		want  error
	}{
		"complete":           {[]error{nil}, 1, nil},
		"interrupted once":   {[]error{netlink.ErrDumpInterrupted, nil}, 2, nil},
		"interrupted always": {[]error{netlink.ErrDumpInterrupted}, dumpTries, netlink.ErrDumpInterrupted},
		"failed":             {[]error{other}, 1, other},
	} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			got, err := dump(t.Context(), "things", func() (int, error) {
				err := tt.errs[min(calls, len(tt.errs)-1)]
				calls++
				return calls, err
			})
			if !errors.Is(err, tt.want) || calls != tt.calls {
				t.Errorf("got error %v after %d calls, want %v after %d", err, calls, tt.want, tt.calls)
			}
			if err != nil && got != 0 {
				t.Errorf("got %d with an error", got)
			}
		})
	}
}

// logged returns a context with a logger that writes to the returned buffer.
func logged(t *testing.T) (context.Context, *bytes.Buffer) {
	var b bytes.Buffer
	return klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&b)))), &b
}

// prompt is far below all timeouts and recheck intervals of these tests, and long enough
// for a busy machine.
const prompt = 5 * time.Second

func TestKernelWait(t *testing.T) {
	for name, tt := range map[string]struct {
		opts  Options
		steps []func(kernel)
		want  string
	}{
		"default route": {Options{Families: v4}, []func(kernel){
			func(k kernel) { k.addLink("d1", true) },
			func(k kernel) { k.addAddr("d1", "10.1.0.2/24", 0) },
			func(k kernel) { k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: net.ParseIP("10.1.0.1")}) },
		}, "d1 10.1.0.2 | default route"},
		"default routes of both families": {Options{Families: dual}, []func(kernel){
			func(k kernel) { k.addLink("d1", true); k.addAddr("d1", "10.1.0.2/24", 0) },
			func(k kernel) { k.addRoute(netlink.Route{Dst: mask("0.0.0.0/0"), Gw: net.ParseIP("10.1.0.1")}) },
			func(k kernel) { k.addAddr("d1", "fd01::2/64", unix.IFA_F_NODAD) },
			func(k kernel) { k.addRoute(netlink.Route{Dst: mask("::/0"), Gw: net.ParseIP("fd01::1")}) },
		}, "d1 10.1.0.2 fd01::2 | default route"},
		"named link": {Options{Families: v4, Ifaces: []string{"d1"}}, []func(kernel){
			func(k kernel) { k.addLink("d1", false) },
			func(k kernel) { k.addAddr("d1", "10.1.0.2/24", 0) },
		}, "d1 10.1.0.2 | --iface d1"},
		"renamed link": {Options{Families: v4, Ifaces: []string{"d1"}}, []func(kernel){
			func(k kernel) { k.addLink("d0", false); k.addAddr("d0", "10.1.0.2/24", 0) },
			func(k kernel) { k.must(k.h.LinkSetName(k.link("d0"), "d1")) },
		}, "d1 10.1.0.2 | --iface d1"},
		"global after link-local": {Options{Families: v6, Ifaces: []string{"d1"}}, []func(kernel){
			func(k kernel) { k.addLink("d1", true); k.addAddr("d1", "fe80::99/64", unix.IFA_F_NODAD) },
			func(k kernel) { k.addAddr("d1", "fd01::2/64", unix.IFA_F_NODAD) },
		}, "d1 fd01::2 | --iface d1"},
		"reach": {Options{Families: v4, CanReach: "10.77.0.1"}, []func(kernel){
			func(k kernel) { k.addLink("d1", true); k.addAddr("d1", "10.1.0.2/24", 0) },
			func(k kernel) {
				k.addRoute(netlink.Route{Dst: mask("10.77.0.0/16"), Gw: net.ParseIP("10.1.0.1")})
			},
		}, "d1 10.1.0.2 | --iface-can-reach 10.77.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			ctx, log := logged(t)
			done := make(chan time.Time, 1)
			go func() {
				for _, step := range tt.steps {
					// The pause is long enough for a separate check after each change.
					<-time.After(100 * time.Millisecond)
					step(k)
				}
				done <- time.Now()
			}()
			i, err := waitFor(ctx, tt.opts, time.Minute, time.Minute)
			if took := time.Since(<-done); took > prompt {
				t.Errorf("returned %s after the last change", took)
			}
			if err != nil || show(i) != tt.want {
				t.Errorf("got %s, error %v; want %s", show(i), err, tt.want)
			}
			if n := strings.Count(log.String(), "waiting for an external interface"); n != 1 || strings.Count(log.String(), "\n") != 1 {
				t.Errorf("logged %d times that it waits, want 1; log:\n%s", n, log)
			}
		})
	}
}

func TestKernelWaitReturnsAtOnce(t *testing.T) {
	k := newKernel(t)
	k.addLink("d1", true)
	k.addAddr("d1", "10.1.0.2/24", 0)
	k.addAddr("d1", "fe80::99/64", unix.IFA_F_NODAD)
	for name, tt := range map[string]struct {
		opts    Options
		timeout time.Duration
		want    string
	}{
		"there already":                     {Options{Families: v4, Ifaces: []string{"d1"}}, time.Minute, "d1 10.1.0.2 | --iface d1"},
		"not waiting":                       {Options{Families: v4, Ifaces: []string{"d1"}}, 0, "d1 10.1.0.2 | --iface d1"},
		"not waiting, none there":           {Options{Families: v4, Ifaces: []string{"x"}}, 0, "no external interface: --iface x: no interface has this name; seen: d1 (10.1.0.2 "},
		"link-local asked for":              {Options{Families: v6, Ifaces: []string{"fe80::99"}}, time.Minute, "d1 fe80::99 | --iface fe80::99"},
		"not waiting for a better v6 local": {Options{Families: v6, Ifaces: []string{"d1"}}, -1, "d1 fe80::"},
	} {
		ctx, log := logged(t)
		start := time.Now()
		i, err := Wait(ctx, tt.opts, tt.timeout)
		got := show(i)
		if err != nil {
			got = err.Error()
		}
		if !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s: got %s, want %s", name, got, tt.want)
		}
		if took := time.Since(start); took > prompt {
			t.Errorf("%s: took %s", name, took)
		}
		if log.Len() > 0 {
			t.Errorf("%s: logged %s", name, log)
		}
	}
}

func TestKernelWaitTimesOut(t *testing.T) {
	k := newKernel(t)
	k.addLink("d1", true)
	k.addAddr("d1", "fe80::99/64", unix.IFA_F_NODAD)
	ctx, log := logged(t)
	_, err := Wait(ctx, Options{Families: v4}, 200*time.Millisecond)
	prefix := "waited 200ms: no external interface: default route: no IPv4 default route in the main table; seen: "
	if err == nil || !strings.HasPrefix(err.Error(), prefix) || !strings.Contains(err.Error(), "d1 (") || !strings.Contains(err.Error(), "fe80::99") {
		t.Errorf("got error %v, want %s... with d1 and its address", err, prefix)
	}
	if !strings.Contains(log.String(), `"waiting for an external interface" timeout="200ms" reason="no external interface: default route: no IPv4`) {
		t.Errorf("log: %s", log)
	}

	// When the timeout has passed, Wait accepts a link-local address if there is no other.
	ctx, log = logged(t)
	i, err := Wait(ctx, Options{Families: v6, Ifaces: []string{"d1"}}, 200*time.Millisecond)
	if err != nil || len(i.Addrs) != 1 || !i.Addrs[0].Local.IsLinkLocalUnicast() {
		t.Errorf("got %s, error %v; want a link-local address", show(i), err)
	}
	if !strings.Contains(log.String(), `reason="d1 has only a link-local address"`) {
		t.Errorf("log: %s", log)
	}
}

func TestKernelWaitEndsWithContext(t *testing.T) {
	newKernel(t)
	before := goleak.IgnoreCurrent()
	ctx, _ := logged(t)
	ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := Wait(ctx, Options{Families: v4}, time.Hour)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got error %v, want the context's", err)
	}
	if took := time.Since(start); took > prompt {
		t.Errorf("took %s", took)
	}
	goleak.VerifyNone(t, before)
}

func TestKernelRelay(t *testing.T) {
	wake := wait.NewSignal()
	errs := []error{nil, unix.ENOBUFS, unix.EINTR, nil, unix.EBADF}
	calls := 0
	relay(wake.Send, func() error {
		calls++
		if calls == 3 {
			<-wake // an overflow counts as a change
		}
		return errs[calls-1]
	})
	if calls != len(errs) {
		t.Errorf("ended after %d calls, want %d", calls, len(errs))
	}
	select {
	case <-wake:
	default:
		t.Error("the last change did not wake")
	}
}
