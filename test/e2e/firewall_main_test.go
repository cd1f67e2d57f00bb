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

	"flanneld/pkg/lab"
	"flanneld/pkg/prefix"
)

// flavour is one way in which a host can hold traffic rules.
type flavour struct {
	name string
	args []string
	list string // prints what is ours, of both families
}

func (f flavour) legacy() bool { return f.name == "iptables-legacy" }

// flavours are all of them.
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

// shell runs a script on a host.
func shell(t *testing.T, n *lab.Namespace, script string) string {
	t.Helper()
	out, err := n.Exec(background(t), "sh", "-ec", script)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// programs is a folder with an iptables of the flavour's variant, which counts
// how often its programs are run; and the environment that has it.
type programs struct{ dir, env string }

func newPrograms(t *testing.T, f flavour) programs {
	t.Helper()
	dir, err := os.MkdirTemp("", "programs") //nolint:usetesting // daemons may end after the test's own is removed
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

// write makes a program of a script.
func (p programs) write(t *testing.T, name, script string) {
	t.Helper()
	if err := writeProgram(filepath.Join(p.dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// run returns the programs that have been run.
func (p programs) run(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(p.dir, "log"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.FieldsFunc(string(text), func(r rune) bool { return r == '\n' })
}

// masqueraded is a dual-stack network with exceptions.
func masqueraded(keys map[string]any) json.RawMessage {
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

// outside are addresses behind the router: one that is like any other, one in
// NonMasqueradeCIDRs, one to which packets are marked.
type outside struct{ any, exempt, marked netip.Addr }

func outsideOf(f prefix.Family) outside {
	if f == prefix.IPv4 {
		return outside{netip.MustParseAddr("198.51.100.200"), netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("198.51.100.201")}
	}
	return outside{netip.MustParseAddr("2001:db8:88::1"), netip.MustParseAddr("2001:db8:77::1"), netip.MustParseAddr("2001:db8:88::2")}
}

// makeOutside gives the router those addresses, and routes to the pods of the
// hosts: so that packets with a pod's address get an answer, too.
func makeOutside(t *testing.T, l *lab.Lab) {
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

// connection is a TCP connection, seen from both ends.
type connection struct{ near, far net.Conn }

// connect connects from one namespace to an address of another.
func connect(t *testing.T, from *lab.Namespace, local netip.Addr, at *lab.Namespace, to netip.Addr) connection {
	t.Helper()
	ctx := background(t)
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

// seen is the address that the far end of a connection sees.
func (c connection) seen() netip.Addr {
	a, err := netip.ParseAddrPort(c.far.RemoteAddr().String())
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr().Unmap()
}
