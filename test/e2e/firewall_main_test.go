// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// flavour is a kind of firewall that can contain a host's traffic rules.
type flavour struct {
	name string
	args []string
	list string // a script that prints flannel's rules of both families, and nothing if there are none
}

// legacy reports whether the rules are in iptables-legacy.
func (f flavour) legacy() bool { return f.name == "iptables-legacy" }

// flavours returns nftables, iptables-nft and iptables-legacy.
func flavours() []flavour {
	iptables := func(variant string) flavour {
		return flavour{"iptables-" + variant, []string{"--firewall=iptables"}, fmt.Sprintf(
			`for f in ip ip6; do for t in nat filter mangle; do ${f}tables-%s-save -t $t 2>/dev/null | grep -E '[fF]lannel|FLANNEL' || true; done; done`, variant)}
	}
	return []flavour{
		{"nftables", []string{"--firewall=nftables"},
			`for t in "ip flannel-ipv4" "ip6 flannel-ipv6"; do nft list table $t 2>/dev/null || true; done`},
		iptables("nft"), iptables("legacy"),
	}
}

// shell runs a script in a namespace and returns its output. The test fails if a command of the
// script fails.
func shell(t *testing.T, n *lab.Namespace, script string) string {
	t.Helper()
	out, err := n.Exec(testContext(t), "sh", "-ec", script)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// programs is a folder with programs of iptables that record each run. Those without a variant
// in their name are of the flavour's variant, and for nftables of the variant nft. env sets PATH
// so that daemons find these programs first.
type programs struct{ dir, env string }

// newPrograms creates the folder for a flavour. It exists until the test ends.
func newPrograms(t *testing.T, f flavour) programs {
	t.Helper()
	dir, err := os.MkdirTemp("", "programs") //nolint:usetesting // daemons may still run when t.TempDir is removed
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := programs{dir: dir}
	p.env = "PATH=" + p.dir + ":" + os.Getenv("PATH") + ":/usr/sbin:/sbin"
	variant := strings.TrimPrefix(f.name, "iptables")
	if f.name == "nftables" {
		variant = "-nft"
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			for _, v := range []string{"", "-nft", "-legacy"} {
				name := family + v + suffix
				if v == "" {
					name = family + variant + suffix
				}
				behind, err := exec.LookPath("/usr/sbin/" + name)
				if err != nil {
					t.Fatal(err)
				}
				p.write(t, family+v+suffix, fmt.Sprintf("echo %s \"$@\" >>%s/log\nexec %s \"$@\"", name, p.dir, behind))
			}
		}
	}
	return p
}

// write creates or replaces a program in the folder. script is a shell script.
func (p programs) write(t *testing.T, name, script string) {
	t.Helper()
	if err := writeProgram(filepath.Join(p.dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// run returns the command lines that have been recorded so far.
func (p programs) run(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(p.dir, "log"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.FieldsFunc(string(text), func(r rune) bool { return r == '\n' })
}

// masqueradeConfig returns a dual-stack network configuration with NonMasqueradeCIDRs. keys are
// added to it, and replace keys with the same name.
func masqueradeConfig(keys map[string]any) json.RawMessage {
	config := map[string]any{
		"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:5::/48", "Backend": map[string]any{"Type": "vxlan"},
		"NonMasqueradeCIDRs": []string{"198.51.100.0/28", "2001:db8:77::/64"},
	}
	maps.Copy(config, keys)
	text, err := json.Marshal(config)
	if err != nil {
		panic(err)
	}
	return text
}

// outside contains addresses behind the router: any is an ordinary address, exempt is in
// NonMasqueradeCIDRs, and TestMasquerade gives packets to marked the mark of kube-proxy.
type outside struct{ any, exempt, marked netip.Addr }

// outsideOf returns the addresses of this family.
func outsideOf(f prefix.Family) outside {
	if f == prefix.IPv4 {
		return outside{netip.MustParseAddr("198.51.100.200"), netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("198.51.100.201")}
	}
	return outside{netip.MustParseAddr("2001:db8:88::1"), netip.MustParseAddr("2001:db8:77::1"), netip.MustParseAddr("2001:db8:88::2")}
}

// addOutsideAddresses gives the router the outside addresses, and routes to the pods, so that it
// can answer packets that are not masqueraded.
func addOutsideAddresses(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, f := range l.Families() {
		o := outsideOf(f)
		for _, a := range []netip.Addr{o.any, o.exempt, o.marked} {
			shell(t, l.Underlay(), fmt.Sprintf("ip addr add %s dev lo nodad 2>/dev/null || ip addr add %[1]s dev lo", prefix.Host(a)))
		}
		for _, p := range l.Pods() {
			shell(t, l.Underlay(), fmt.Sprintf("ip route replace %s via %s", prefix.Host(p.Addr(f)), p.Host().Addr(f)))
		}
	}
}

// connection is a TCP connection. near is the end that has opened it.
type connection struct{ near, far net.Conn }

// connect opens a TCP connection from one namespace, the parameter from, to an address in
// another one. The parameter at is the other namespace, and the parameter to is the address.
// connect listens there on a free port. The connection lasts until the test ends. local is the
// source address; if it is the zero value, the kernel chooses one.
func connect(t *testing.T, from *lab.Namespace, local netip.Addr, at *lab.Namespace, to netip.Addr) connection {
	t.Helper()
	ctx := testContext(t)
	l, err := at.Listen(ctx, "tcp", netip.AddrPortFrom(to, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var c connection
	err = from.Do(ctx, func() (err error) {
		d := net.Dialer{}
		if local.IsValid() {
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0))
		}
		c.near, err = d.DialContext(ctx, "tcp", l.Addr().String())
		return err
	})
	if err != nil {
		t.Fatalf("connect %s to %s: %v", from.Name(), to, err)
	}
	t.Cleanup(func() { c.near.Close() })
	if c.far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.far.Close() })
	return c
}

// sourceAddr returns the source address that the far end of the connection sees, or the zero
// value if that is not an IP address.
func (c connection) sourceAddr() netip.Addr {
	a, err := netip.ParseAddrPort(c.far.RemoteAddr().String())
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr().Unmap()
}
