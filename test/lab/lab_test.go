// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/lab"
)

var (
	ipv4 = []prefix.Family{prefix.IPv4}
	ipv6 = []prefix.Family{prefix.IPv6}
	dual = []prefix.Family{prefix.IPv4, prefix.IPv6}
)

func newLab(t *testing.T, cfg lab.Config) *lab.Lab {
	t.Helper()
	l, err := lab.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

func TestKernelHostsReachEachOther(t *testing.T) {
	for _, tt := range []struct {
		name     string
		families []prefix.Family
		segments int
	}{
		{"IPv4", ipv4, 1},
		{"IPv6-only", ipv6, 1},
		{"dual stack", dual, 1},
		{"three segments", dual, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLab(t, lab.Config{
				Families: tt.families, Segments: tt.segments, MTU: 1600,
				Etcd: lab.EtcdOptions{Disabled: true},
			})
			for _, from := range l.Hosts() {
				for _, to := range l.Hosts() {
					for _, f := range tt.families {
						for _, size := range []int{0, 1600} {
							_, err := from.Ping(t.Context(), to.Addr(f), lab.Echo{Size: size, DontFragment: true})
							if err != nil {
								t.Error(err)
							}
						}
						_, err := from.Ping(t.Context(), to.Addr(f), lab.Echo{Size: 1601, DontFragment: true})
						if from != to && !errors.Is(err, ping.ErrTooBig) {
							t.Errorf("one byte more than the MTU: %v, want %v", err, ping.ErrTooBig)
						}
					}
				}
			}
		})
	}
}

// TestKernelManyHostsReachEachOther checks that 40 hosts reach each other. Together they
// have more neighbours than the kernel allows for all namespaces, unless the lab makes the
// neighbour entries permanent.
func TestKernelManyHostsReachEachOther(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 40, Families: dual, Etcd: lab.EtcdOptions{Disabled: true}})
	for _, from := range l.Hosts() {
		for _, to := range l.Hosts() {
			for _, f := range dual {
				if _, err := from.Ping(t.Context(), to.Addr(f), lab.Echo{}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func TestKernelFamiliesAreSeparate(t *testing.T) {
	l := newLab(t, lab.Config{Families: ipv6, Hosts: 2, Etcd: lab.EtcdOptions{Disabled: true}})
	_, err := l.Host(1).Ping(t.Context(), l.Host(2).Addr(prefix.IPv4), lab.Echo{})
	if err == nil {
		t.Error("an IPv6-only underlay carries IPv4")
	}
}

func TestKernelHostsHavePrivateFiles(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 2, Etcd: lab.EtcdOptions{Disabled: true}})
	for _, dir := range []string{"/run", "/var/lib"} {
		if err := os.WriteFile(l.Host(1).Path(dir+"/note"), []byte("one"), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := l.Host(1).Exec(t.Context(), "cat", dir+"/note"); err != nil || string(got) != "one" {
			t.Errorf("host1 reads %q, %v; want one", got, err)
		}
		for _, elsewhere := range []string{dir + "/note", l.Host(2).Path(dir + "/note")} {
			if _, err := os.Stat(elsewhere); err == nil {
				t.Errorf("host1's %s/note shows at %s", dir, elsewhere)
			}
		}
	}
	var ids []string
	for _, h := range l.Hosts() {
		out, err := h.Exec(t.Context(), "cat", "/etc/machine-id")
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, string(out))
	}
	outside, err := os.ReadFile("/etc/machine-id")
	if err != nil {
		t.Fatal(err)
	}
	if ids[0] != ids[1] || ids[0] == string(outside) {
		t.Errorf("machine-ids %q, outside %q: want the hosts' equal and their own", ids, outside)
	}
}

func TestKernelNsenter(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1, Etcd: lab.EtcdOptions{Disabled: true}})
	h := l.Host(1)
	writeSubnetFile(t, h, 1400, podSubnet(prefix.IPv4, 0))
	pod, err := h.AddPod(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	for enter, want := range map[string]string{
		h.Nsenter() + " cat " + lab.SubnetFile:                "FLANNEL_SUBNET=10.5.1.1/24",
		h.Nsenter() + " cat /proc/net/fib_trie":               "192.168.77.1",
		pod.Nsenter() + " cat /proc/thread-self/net/fib_trie": "10.5.1.2",
	} {
		args := strings.Fields(enter)
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v, %s; want %s", enter, err, out, want)
		}
	}
}

func TestKernelDoNests(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1, Etcd: lab.EtcdOptions{Disabled: true}})
	h := l.Host(1)
	err := h.Do(t.Context(), func() error {
		return h.Do(t.Context(), func() error { return os.ErrInvalid })
	})
	if !errors.Is(err, os.ErrInvalid) {
		t.Errorf("got %v, want the inner error", err)
	}
}

func TestConfigIsRefused(t *testing.T) {
	for _, tt := range []struct {
		cfg  lab.Config
		want string
	}{
		{lab.Config{Hosts: 201}, "hosts: 201 is not in 1 to 200"},
		{lab.Config{Hosts: -1}, "hosts: -1 is not in 1 to 200"},
		{lab.Config{Segments: 101}, "L2 segments: 101 is not in 1 to 100"},
		{lab.Config{MTU: 1279}, "underlay MTU: 1279 is not in 1280 to 65535"},
		{lab.Config{Loss: 101}, "loss: 101 is not a percentage"},
		{lab.Config{Latency: -1}, "latency: -1ns is negative"},
		{lab.Config{Families: []prefix.Family{5}}, "address family: 5 is neither 4 nor 6"},
	} {
		l, err := lab.New(t.Context(), tt.cfg)
		if err == nil {
			l.Close()
			t.Errorf("no error, want %s", tt.want)
		} else if err.Error() != tt.want {
			t.Errorf("got %q, want %q", err, tt.want)
		}
	}
}

// addStaticNetwork replaces flanneld: it gives every host a subnet file with that MTU, and
// routes to the subnets of the others, as with host-gw. Then it adds a pod to every host.
func addStaticNetwork(t *testing.T, l *lab.Lab, mtu int) {
	t.Helper()
	for i, h := range l.Hosts() {
		writeSubnetFile(t, h, mtu, podSubnet(prefix.IPv4, i), podSubnet(prefix.IPv6, i))
		err := h.Netlink(t.Context(), func(nl *netlink.Handle) error {
			for j, peer := range l.Hosts() {
				for _, f := range dual {
					if i == j {
						continue
					}
					n, err := netlink.ParseIPNet(podSubnet(f, j).String())
					if err != nil {
						return err
					}
					if err := nl.RouteAdd(&netlink.Route{Dst: n, Gw: peer.Addr(f).AsSlice()}); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := l.AddPods(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func writeSubnetFile(t *testing.T, h *lab.Host, mtu int, subnets ...netip.Prefix) {
	t.Helper()
	file := subnetfile.File{MTU: mtu}
	for _, s := range subnets {
		file.Entries = append(file.Entries, subnetfile.Entry{Network: lab.PodNetwork(prefix.FamilyOf(s.Addr())), Subnet: s})
	}
	if err := subnetfile.Write(h.Path(lab.SubnetFile), file); err != nil {
		t.Fatal(err)
	}
}

func podSubnet(f prefix.Family, host int) netip.Prefix {
	if f == prefix.IPv4 {
		return netip.MustParsePrefix(fmt.Sprintf("10.5.%d.0/24", host+1))
	}
	return netip.MustParsePrefix(fmt.Sprintf("fd00:5:0:%d::/64", host+1))
}

func TestKernelPods(t *testing.T) {
	l := newLab(t, lab.Config{Families: dual, Etcd: lab.EtcdOptions{Disabled: true}})
	addStaticNetwork(t, l, 1400)
	pods := l.Pods()
	if got := fmt.Sprint(pods[2].Name(), pods[2].Addrs()); got != "host3/pod1[10.5.3.2 fd00:5:0:3::2]" {
		t.Errorf("third pod is %s", got)
	}
	cells := l.Matrix(t.Context(), dual, time.Second)
	if len(cells) != 12 {
		t.Errorf("%d cells, want 3 hosts × 2 others × 2 families", len(cells))
	}
	for _, c := range cells {
		if c.Err != nil {
			t.Error(c.Err)
		} else if c.RTT <= 0 || c.BitsPerSecond <= 0 {
			t.Errorf("%s to %s: %v, %g bit/s", c.From.Name(), c.To.Name(), c.RTT, c.BitsPerSecond)
		}
	}
	for _, f := range dual {
		for size, want := range map[int]error{1400: nil, 1401: ping.ErrTooBig} {
			_, err := pods[0].Ping(t.Context(), pods[1].Addr(f), lab.Echo{Size: size, DontFragment: true})
			if !errors.Is(err, want) {
				t.Errorf("%v, %d bytes: %v, want %v", f, size, err, want)
			}
		}
	}
	second, err := l.Host(1).AddPod(t.Context(), "web")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pods[2].Connect(t.Context(), second, prefix.IPv6); err != nil {
		t.Error(err)
	}
	routes, err := l.Host(1).Routes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"0.0.0.0/0 via 192.168.77.254 dev eth0", "10.5.1.0/24 dev cni0", "10.5.2.0/24 via 192.168.77.2 dev eth0",
		"::/0 via fd00:77::fe dev eth0", "fd00:5:0:3::/64 via fd00:77::3 dev eth0",
	} {
		if !strings.Contains(fmt.Sprint(routes), want) {
			t.Errorf("no route %s among %v", want, routes)
		}
	}
}

func TestKernelBridgeKeepsItsMAC(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1, Etcd: lab.EtcdOptions{Disabled: true}})
	h := l.Host(1)
	writeSubnetFile(t, h, 1500, podSubnet(prefix.IPv4, 0))
	if _, err := h.AddPod(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	err := h.Netlink(t.Context(), func(n *netlink.Handle) error {
		before, err := n.LinkByName(lab.PodBridge)
		if err != nil {
			return err
		}
		port := netlink.NewVeth(netlink.LinkAttrs{Name: "low", MasterIndex: before.Attrs().Index, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}})
		port.PeerName = "end"
		if err := n.LinkAdd(port); err != nil {
			return err
		}
		after, err := n.LinkByName(lab.PodBridge)
		if err == nil && after.Attrs().HardwareAddr.String() != before.Attrs().HardwareAddr.String() {
			t.Errorf("%s, before the port was added %s", after.Attrs().HardwareAddr, before.Attrs().HardwareAddr)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestKernelMatrixWithoutAddresses(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 2, Etcd: lab.EtcdOptions{Disabled: true}})
	for i, h := range l.Hosts() {
		writeSubnetFile(t, h, 1500, podSubnet(prefix.IPv4, i))
	}
	if err := l.AddPods(t.Context()); err != nil {
		t.Fatal(err)
	}
	cells := l.Matrix(t.Context(), ipv6, time.Second)
	if got := fmt.Sprint(cells[0].Err); len(cells) != 2 || got != "host1/pod1 has no IPv6 address" {
		t.Errorf("%d cells, the first is %s", len(cells), got)
	}
}

func TestKernelAddPodNeedsSubnet(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1, Etcd: lab.EtcdOptions{Disabled: true}})
	h := l.Host(1)
	if _, err := h.AddPod(t.Context(), ""); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}

	writeSubnetFile(t, h, 1500, netip.MustParsePrefix("10.5.1.1/32"))
	if _, err := h.AddPod(t.Context(), ""); err == nil || !strings.Contains(err.Error(), "no address left in 10.5.1.1/32") {
		t.Errorf("a subnet with one address: %v", err)
	}

	writeSubnetFile(t, h, 1500, podSubnet(prefix.IPv4, 0))
	if p, err := h.AddPod(t.Context(), ""); err != nil || p.Name() != "host1/pod1" || len(h.Pods()) != 1 {
		t.Errorf("after failures: %v, %d pods", err, len(h.Pods()))
	}
}

func TestRefusesWithoutRoot(t *testing.T) {
	cmd := exec.Command(executable(t))
	cmd.Env = append(os.Environ(), childEnv+"=nobody")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "a lab needs root") {
		t.Errorf("got %v, %s", err, out)
	}
}
