// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/flanneld/flanneld/pkg/status"
)

// healthy returns the report of a daemon without problems.
func healthy() *status.Report {
	return &status.Report{
		Ready: true, Interface: status.Interface{Name: "eth0"},
		Lease:   status.Lease{Subnets: []netip.Prefix{netip.MustParsePrefix("10.5.49.0/24"), netip.MustParsePrefix("fd00:10:5:49::/64")}},
		Network: status.Network{BackendType: "vxlan", MTU: 1450, Ports: []int{8472}, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16"), netip.MustParsePrefix("fd00:10:5::/48")}},
	}
}

// soundHost returns the files of a host without problems.
func soundHost() map[string]string {
	return map[string]string{
		"proc/sys/net/ipv4/ip_forward":                 "1\n",
		"proc/sys/net/ipv6/conf/all/forwarding":        "1\n",
		"proc/sys/net/bridge/bridge-nf-call-iptables":  "1\n",
		"proc/sys/net/bridge/bridge-nf-call-ip6tables": "1\n",
		"proc/sys/net/ipv4/conf/all/rp_filter":         "0\n",
		"proc/sys/net/ipv4/conf/eth0/rp_filter":        "2\n",
		"proc/net/udp":                                 "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n",
		"sys/module/vxlan/version":                     "",
		"sys/class/net/cni0/mtu":                       "1450\n",
		"usr/lib/systemd/network/99-default.link":      "[Link]\nMACAddressPolicy=persistent\n",
		"etc/systemd/network/50-flannel.link":          "[Match]\nOriginalName=flannel*\n",
	}
}

// newHost returns a host with these files. The content "-" stands for a missing file.
func newHost(t *testing.T, files map[string]string) host {
	t.Helper()
	h := host{root: t.TempDir(), report: healthy()}
	for path, text := range files {
		if path = filepath.Join(h.root, path); text != "-" {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return h
}

// udpSocket returns a list of UDP sockets that contains one socket on a port, which is in
// hexadecimal.
func udpSocket(port, inode string) string {
	return "head\n  1: 00000000:" + port + " 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 " + inode + " 2 0 0\n"
}

func TestDoctor(t *testing.T) {
	on4789 := func(r *status.Report) { r.Network.Ports = []int{4789} }
	kubernetes := func(r *status.Report) { r.Datastore.Kind = "kubernetes" }
	hostGW := func(r *status.Report) { r.Network.BackendType, r.Network.Ports = "host-gw", nil }
	shared := func(n int) func(*status.Report) {
		one := status.SharedPublicIP{PublicIP: netip.MustParseAddr("192.0.2.7")}
		for i := range n {
			one.Leases = append(one.Leases, fmt.Sprintf("lease%d", i+1))
		}
		return func(r *status.Report) { r.SharedPublicIPs = []status.SharedPublicIP{one} }
	}
	wireguard := func(r *status.Report) { r.Network.BackendType, r.Network.Ports = "wireguard", []int{51820, 51821} }
	for _, tc := range []struct {
		name    string
		change  map[string]string // file: content; "-" removes it
		report  func(*status.Report)
		want    string // part of the only finding's problem; empty if nothing should be found
		fix     string
		serious bool
	}{
		{name: "sound host"},
		{name: "no forwarding", change: map[string]string{"proc/sys/net/ipv4/ip_forward": "0"}, want: "IPv4 is not forwarded", fix: "sysctl -w net.ipv4.ip_forward=1", serious: true},
		{name: "no IPv6 forwarding", change: map[string]string{"proc/sys/net/ipv6/conf/all/forwarding": "0"}, want: "IPv6 is not forwarded", fix: "net.ipv6.conf.all.forwarding=1", serious: true},
		{name: "bridge filter off", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-iptables": "0"}, want: "bridge-nf-call-iptables is 0", fix: "sysctl -w net.bridge"},
		{name: "bridge filter off on Kubernetes", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-iptables": "0"}, report: kubernetes, want: "bridge-nf-call-iptables is 0", fix: "sysctl -w net.bridge", serious: true},
		{name: "no bridge filter on Kubernetes", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-iptables": "-"}, report: kubernetes, want: "br_netfilter is not loaded", fix: "modprobe br_netfilter", serious: true},
		{name: "no bridge filter", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-ip6tables": "-"}, want: "br_netfilter is not loaded", fix: "modprobe br_netfilter"},
		{name: "no bridge filter for both", change: map[string]string{"proc/sys/net/bridge/bridge-nf-call-iptables": "-", "proc/sys/net/bridge/bridge-nf-call-ip6tables": "-"}, want: "br_netfilter is not loaded"},
		{name: "strict reverse path", change: map[string]string{"proc/sys/net/ipv4/conf/eth0/rp_filter": "1"}, want: "rp_filter is strict on eth0", fix: "rp_filter=2"},
		{name: "strict, but loose for all", change: map[string]string{"proc/sys/net/ipv4/conf/eth0/rp_filter": "1", "proc/sys/net/ipv4/conf/all/rp_filter": "2"}},
		{name: "firewalld", change: map[string]string{"run/firewalld.pid": "1"}, want: "firewalld runs", fix: "--add-source=fd00:10:5::/48 && firewall-cmd --permanent --add-port=8472/udp && firewall-cmd --reload"},
		{name: "firewalld with host-gw", change: map[string]string{"run/firewalld.pid": "1"}, report: hostGW, want: "firewalld runs", fix: "--add-source=10.5.0.0/16 && firewall-cmd --permanent --zone=trusted --add-source=fd00:10:5::/48 && firewall-cmd --reload"},
		{name: "ufw", change: map[string]string{"etc/ufw/ufw.conf": "# set\nENABLED=yes\n"}, want: "ufw is enabled", fix: "ufw default allow routed; ufw allow 8472/udp"},
		{name: "ufw with wireguard", change: map[string]string{"etc/ufw/ufw.conf": "ENABLED=yes\n", "sys/module/wireguard/version": ""}, report: wireguard, want: "ufw is enabled", fix: "; ufw allow 51820/udp; ufw allow 51821/udp"},
		{name: "ufw off", change: map[string]string{"etc/ufw/ufw.conf": "ENABLED=no\n"}},
		{name: "bridge MTU", change: map[string]string{"sys/class/net/cni0/mtu": "1500"}, want: "cni0 has MTU 1500, the network carries 1450", fix: "ip link set cni0 mtu 1450", serious: true},
		{name: "udev", change: map[string]string{"etc/systemd/network/50-flannel.link": "-"}, want: "udev may change", fix: "MACAddressPolicy=none"},
		{name: "port taken", change: map[string]string{"proc/net/udp": udpSocket("2118", "4242")}, want: "process 77 uses UDP port 8472", fix: "ss -lunp", serious: true},
		{name: "port of the kernel", change: map[string]string{"proc/net/udp": udpSocket("2118", "43")}},
		{name: "another port taken", change: map[string]string{"proc/net/udp": udpSocket("12B5", "4242")}, report: on4789, want: "process 77 uses UDP port 4789", fix: "ss -lunp 'sport = :4789'", serious: true},
		{name: "the usual port taken, and not needed", change: map[string]string{"proc/net/udp": udpSocket("2118", "4242")}, report: on4789},
		{name: "no vxlan", change: map[string]string{"sys/module/vxlan/version": "-"}, report: func(r *status.Report) { r.Ready = false }, want: "has no module vxlan", fix: "linux-modules-extra", serious: true},
		{name: "leases with one public address", report: shared(2), want: "the leases lease1, lease2 have the public address 192.0.2.7", fix: "flannelctl revoke LEASE"},
		{name: "many leases with one public address", report: shared(10), want: "lease8, and 2 more have the public address 192.0.2.7", fix: "flannelctl revoke LEASE"},
		{name: "Nodes with one public address", report: func(r *status.Report) { shared(2)(r); kubernetes(r) }, want: "lease1, lease2 have", fix: "kubectl delete node NODE"},
		{name: "not ready", report: func(r *status.Report) { r.Ready, r.Reasons = false, []string{"data path: no"} }, want: "not ready: data path: no", fix: "flannelctl status", serious: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			files := soundHost()
			maps.Copy(files, tc.change)
			h := newHost(t, files)
			fds := filepath.Join(h.root, "proc/77/fd")
			if err := errors.Join(os.MkdirAll(fds, 0o755), os.Symlink("socket:[4242]", filepath.Join(fds, "3"))); err != nil {
				t.Fatal(err)
			}
			if text := files["sys/module/vxlan/version"]; text == "-" {
				os.RemoveAll(filepath.Join(h.root, "sys/module/vxlan"))
			}
			if tc.report != nil {
				tc.report(h.report)
			}
			found := h.examine(t.Context())
			switch {
			case tc.want == "" && len(found) > 0:
				t.Errorf("found %+v, want nothing", found)
			case tc.want == "":
			case len(found) != 1:
				t.Errorf("found %+v, want one finding with %q", found, tc.want)
			case !strings.Contains(found[0].Problem, tc.want) || !strings.Contains(found[0].Fix, tc.fix) || found[0].Serious != tc.serious:
				t.Errorf("found %+v, want %q, fix %q, serious %v", found[0], tc.want, tc.fix, tc.serious)
			}
		})
	}
}

func TestDoctorWithoutADaemon(t *testing.T) {
	for _, tc := range []struct {
		err          error
		problem, fix string
	}{
		{syscall.ENOENT, "no flanneld answers on the local socket: dial unix /x: no such file or directory", "systemctl status flanneld"},
		{syscall.EACCES, "only root may use the local socket: dial unix /x: permission denied", "sudo flannelctl doctor"},
	} {
		away := fmt.Errorf("ask flanneld: %w", &url.Error{Op: "Get", URL: "http://flanneld/statusz.json", Err: &net.OpError{Op: "dial", Net: "unix /x", Err: tc.err}})
		found := host{root: t.TempDir(), away: away}.examine(t.Context())
		if len(found) == 0 || !found[0].Serious || found[0].Problem != tc.problem || !strings.HasPrefix(found[0].Fix, tc.fix) {
			t.Errorf("found %+v, want first %q, fix %q", found, tc.problem, tc.fix)
		}
	}
}
