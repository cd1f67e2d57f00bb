// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// The folders of CNI plugins: those of Debian's package containernetworking-plugins, and
// those that `make components` builds, because Debian's do not support CNI 1.1.
const (
	debianPlugins = "/usr/lib/cni"
	newPlugins    = "../../bin/tools/cni"
)

// The folders on a host that contain its plugins and the cache of its container runtime.
const (
	ownPlugins   = "/run/cni/bin"
	runtimeCache = "/var/lib/cni/cache"
)

// cni is the container runtime of one host.
type cni struct {
	t    *testing.T
	host *lab.Host
	list *libcni.NetworkConfigList
}

// manifestDelegate is the delegate configuration that flannel's manifests install. It switches the
// plugin's masquerading off, because the manifests start flanneld with masquerading.
const manifestDelegate = `"delegate":{"hairpinMode":true,"isDefaultGateway":true,"ipMasq":false}`

// newCNI installs plugins on a host and returns its container runtime. As in the configuration
// that flannel's manifests install, the runtime calls the plugin flannel, and then portmap.
// version is the version of the CNI specification. keys are the JSON keys of the plugin flannel
// with their values, such as manifestDelegate.
func newCNI(t *testing.T, h *lab.Host, version, keys string) *cni {
	t.Helper()
	from := debianPlugins
	if version == "1.1.0" {
		from = newPlugins
	}
	return newCNIFrom(t, h, from, fmt.Sprintf(`{"name":"cbr0","cniVersion":%q,"plugins":[
		{"type":"flannel",%s},
		{"type":"portmap","capabilities":{"portMappings":true}}]}`, version, keys))
}

// newCNIFrom installs the plugins of a list on a host and returns its container runtime. All plugins
// except flannel, and those that flannel calls, are in the folder from.
func newCNIFrom(t *testing.T, h *lab.Host, from, plugins string) *cni {
	t.Helper()
	list, err := libcni.ConfListFromBytes([]byte(plugins))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(h.Path(ownPlugins), 0o700); err != nil {
		t.Fatal(err)
	}
	folders := map[string]string{"bridge": from, "host-local": from}
	for _, plugin := range list.Plugins {
		folders[plugin.Network.Type] = from
	}
	folders["flannel"] = filepath.Dir(flanneld())
	for name, dir := range folders {
		binary, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatalf("a plugin is missing (make deps components build): %v", err)
		}
		if err := writeProgram(h.Path(filepath.Join(ownPlugins, name)), binary, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return &cni{t, h, list}
}

// do runs f in the network namespace and file system of the host, as its runtime would.
func (c *cni) do(f func(runtime *libcni.CNIConfig) error) error {
	return c.host.Do(testContext(c.t), func() error {
		return f(libcni.NewCNIConfigWithCacheDir([]string{ownPlugins}, runtimeCache, nil))
	})
}

// conf returns what the runtime tells the plugins about a pod: its container ID, network
// namespace, interface eth0 and port mappings.
func conf(p *lab.Pod, ports ...map[string]any) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{ContainerID: strings.ReplaceAll(p.Name(), "/", "-"), NetNS: p.NetNS(), IfName: "eth0"}
	if len(ports) > 0 {
		rt.CapabilityArgs = map[string]any{"portMappings": ports}
	}
	return rt
}

// tryAdd executes ADD for a container. It returns the error of a plugin, or else the result.
func (c *cni) tryAdd(rt *libcni.RuntimeConf) (result *current.Result, err error) {
	err = c.do(func(runtime *libcni.CNIConfig) error {
		r, err := runtime.AddNetworkList(testContext(c.t), c.list, rt)
		if err == nil {
			result, err = current.NewResultFromResult(r)
		}
		return err
	})
	return result, err
}

// add creates a pod and attaches it with the plugins. The test fails unless ADD succeeds and its
// result contains the addresses of the pod.
func (c *cni) add(name string, ports ...map[string]any) *lab.Pod {
	c.t.Helper()
	p, err := c.host.AddEmptyPod(testContext(c.t), name)
	if err != nil {
		c.t.Fatal(err)
	}
	result, err := c.tryAdd(conf(p, ports...))
	if err != nil {
		c.t.Fatalf("ADD %s: %v", p.Name(), err)
	}
	if err := p.Adopt(testContext(c.t)); err != nil {
		c.t.Fatal(err)
	}
	var got []netip.Addr
	for _, ip := range result.IPs {
		got = append(got, netip.MustParsePrefix(ip.Address.String()).Addr())
	}
	if !slices.Equal(got, p.Addrs()) {
		c.t.Errorf("%s has the addresses %v, the result contains %v", p.Name(), p.Addrs(), got)
	}
	return p
}

// check executes CHECK for a pod and returns the error of a plugin, if any.
func (c *cni) check(p *lab.Pod) error {
	return c.do(func(runtime *libcni.CNIConfig) error {
		return runtime.CheckNetworkList(testContext(c.t), c.list, conf(p))
	})
}

// del executes DEL for a pod. The test fails if a plugin returns an error.
func (c *cni) del(p *lab.Pod) {
	c.t.Helper()
	if err := c.do(func(runtime *libcni.CNIConfig) error {
		return runtime.DelNetworkList(testContext(c.t), c.list, conf(p))
	}); err != nil {
		c.t.Errorf("DEL %s: %v", p.Name(), err)
	}
}

// left returns the paths on the host of the files that the plugins keep about pods: the notes of
// flannel's plugin and the reserved addresses.
func (c *cni) left() (files []string) {
	c.t.Helper()
	for _, dir := range []string{"/var/lib/cni/flannel", "/var/lib/cni/networks/cbr0"} {
		all, err := os.ReadDir(c.host.Path(dir))
		if err != nil {
			c.t.Error(err)
		}
		for _, f := range all {
			if name := f.Name(); name != "lock" && !strings.HasPrefix(name, "last_reserved_ip") {
				files = append(files, filepath.Join(dir, name))
			}
		}
	}
	return files
}

// TestCNI checks pods that the real plugins attach on two hosts, in every version of the CNI
// specification that the plugins support, also where new devices get no IPv6, which many guides on hardening
// recommend.
func TestCNI(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		version  string
		families []prefix.Family
		backend  string
		mtu      int
		off      string // net.ipv6.conf.default.disable_ipv6
	}{
		{"0.3.1", v4, `{"Type":"vxlan"}`, 1450, "0"},
		{"0.4.0", v6, `{"Type":"vxlan"}`, 1430, "1"},
		{"1.0.0", dual, `{"Type":"vxlan"}`, 1430, "1"},
		{"1.1.0", dual, `{"Type":"host-gw"}`, 1500, "0"},
	} {
		t.Run(tc.version+"/"+familiesName(tc.families), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: tc.families}, tc.backend)
			for _, h := range l.Hosts() {
				shell(t, h.Namespace, "sysctl -w net.ipv6.conf.default.disable_ipv6="+tc.off)
			}
			if err := l.StartFlanneld(testContext(t), lab.FlanneldOptions{}); err != nil {
				t.Fatal(err)
			}
			var runtimes []*cni
			for _, h := range l.Hosts() {
				c := newCNI(t, h, tc.version, manifestDelegate)
				runtimes = append(runtimes, c)
				for _, name := range []string{"a", "b"} {
					if p := c.add(name); len(p.Addrs()) != len(tc.families) || p.MTU() != tc.mtu {
						t.Errorf("%s has the addresses %v and an MTU of %d, want %d addresses and %d", p.Name(), p.Addrs(), p.MTU(), len(tc.families), tc.mtu)
					}
				}
			}
			expectMatrix(t, l)
			expectMTU(t, l, tc.mtu)
			expectAttached(t, runtimes, tc.version != "0.3.1")
		})
	}
}

// expectAttached executes CHECK for all pods, before and after it deletes their addresses: the
// second CHECK must fail. Then it executes DEL, which must leave nothing. checks is false for
// versions of CNI without CHECK.
func expectAttached(t *testing.T, runtimes []*cni, checks bool) {
	t.Helper()
	for _, c := range runtimes {
		for i, p := range c.host.Pods() {
			if checks {
				if err := c.check(p); err != nil {
					t.Errorf("CHECK %s: %v", p.Name(), err)
				}
				if out, err := p.Exec(testContext(t), "ip", "addr", "flush", "dev", "eth0"); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				if err := c.check(p); err == nil {
					t.Errorf("CHECK %s succeeds without the address, want an error", p.Name())
				}
			}
			if i == 0 {
				c.del(p)
			}
			c.del(p) // DEL must succeed for a detached pod, too
			if out, err := p.Exec(testContext(t), "ip", "link", "show", "eth0"); err == nil {
				t.Errorf("%s still has an interface: %s", p.Name(), out)
			}
		}
		if files := c.left(); len(files) > 0 {
			t.Errorf("DEL left %v on %s", files, c.host.Name())
		}
	}
}

// TestCNIStatusAndGC checks that STATUS reports whether flanneld has run, and that GC releases the
// addresses and files of a pod that the runtime does not list, and no others.
func TestCNIStatusAndGC(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Families: dual}, `{"Type":"alloc"}`)
	h := l.Host(1)
	c := newCNI(t, h, "1.1.0", manifestDelegate)
	ready := func() error {
		return c.do(func(runtime *libcni.CNIConfig) error {
			return runtime.GetStatusNetworkList(testContext(t), c.list)
		})
	}
	if err := ready(); err == nil || !strings.Contains(err.Error(), "flanneld has not written it yet") {
		t.Errorf("STATUS without flanneld: %v, want that flanneld has not written the file", err)
	}
	startOne(t, h, lab.FlanneldOptions{})
	if err := ready(); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	listed, unlisted := c.add("listed"), c.add("unlisted")
	if err := os.RemoveAll(h.Path(runtimeCache)); err != nil {
		t.Fatal(err)
	}
	valid := []types.GCAttachment{{ContainerID: conf(listed).ContainerID, IfName: "eth0"}}
	if err := c.do(func(runtime *libcni.CNIConfig) error {
		return runtime.GCNetworkList(testContext(t), c.list, &libcni.GCArgs{ValidAttachments: valid})
	}); err != nil {
		t.Errorf("GC: %v", err)
	}
	left := c.left()
	if len(left) != 3 { // the plugin's note, and an address of each family
		t.Errorf("GC left %v, want 3 files of the listed pod", left)
	}
	for _, file := range left {
		for _, a := range unlisted.Addrs() {
			if strings.Contains(file, conf(unlisted).ContainerID) || filepath.Base(file) == a.String() {
				t.Errorf("GC left %s, which belongs to the unlisted pod", file)
			}
		}
	}
	c.del(listed)
	if left := c.left(); len(left) > 0 {
		t.Errorf("DEL left %v", left)
	}
}

// TestCNIPorts checks that a pod is reachable by a port of its host if the runtime passes a
// port mapping and the plugin portmap comes after flannel's.
func TestCNIPorts(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	if err := l.StartFlanneld(testContext(t), lab.FlanneldOptions{}); err != nil {
		t.Fatal(err)
	}
	c := newCNI(t, l.Host(1), "1.0.0", manifestDelegate)
	p := c.add("web", map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"})
	listener, err := p.Listen(testContext(t), "tcp", netip.AddrPortFrom(p.Addr(prefix.IPv4), 80).String())
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(conn, "hello")
			conn.Close()
		}
	}()
	conn, err := l.Host(2).Dial(testContext(t), "tcp", netip.AddrPortFrom(l.Host(1).Addr(prefix.IPv4), 8080).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 5)
	if _, err := conn.Read(answer); err != nil || string(answer) != "hello" {
		t.Errorf("the pod answers %q (%v) by the port of its host, want hello", answer, err)
	}
	listener.Close()
}

// TestCNIOverrides checks that the CNI configuration can set the bridge, the MTU, an additional
// route and masquerading. flanneld does not masquerade in this test.
//
//stages:rest TestCNI uses the defaults; TestDelegation of cmd/flannel-cni has overrides
func TestCNIOverrides(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	if err := l.StartFlanneld(testContext(t), lab.FlanneldOptions{}); err != nil {
		t.Fatal(err)
	}
	one := newCNI(t, l.Host(1), "0.4.0",
		`"delegate":{"bridge":"mybr","mtu":1400,"ipMasq":false,"isDefaultGateway":true},"ipam":{"routes":[{"dst":"203.0.113.0/24"}]}`)
	p := one.add("a")
	if p.MTU() != 1400 {
		t.Errorf("the MTU is %d, want 1400", p.MTU())
	}
	routes, err := p.Exec(testContext(t), "ip", "route")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"203.0.113.0/24 via ", "10.5.0.0/16 via ", "default via "} {
		if !strings.Contains(string(routes), want) {
			t.Errorf("the pod has no route %q:\n%s", want, routes)
		}
	}
	if out, err := l.Host(1).Exec(testContext(t), "ip", "link", "show", "mybr"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	other := newCNI(t, l.Host(2), "0.4.0", `"delegate":{"isDefaultGateway":true}`).add("b")
	seenAs := func(from, to *lab.Pod) netip.Addr {
		seen, err := from.Connect(testContext(t), to, prefix.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		return seen
	}
	expectConverged(t, l)
	if seen := seenAs(p, other); seen != p.Addr(prefix.IPv4) {
		t.Errorf("without ipMasq the peer sees %v, want the pod's address %v", seen, p.Addr(prefix.IPv4))
	}
	if seen := seenAs(other, p); seen == other.Addr(prefix.IPv4) {
		t.Errorf("with ipMasq the peer sees the pod's address %v, want another", seen)
	}
}

// TestCNIFailures checks ADD without flanneld, a second ADD, CHECK without the plugin's note,
// CHECK in a newer version of CNI than ADD, and DEL after the host has got another subnet.
//
//stages:rest TestCNI has the calls that succeed; TestErrors and TestAddTwice of cmd/flannel-cni have failures
func TestCNIFailures(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"alloc"}`)
	h := l.Host(1)
	c := newCNI(t, h, "1.0.0", manifestDelegate)
	p, err := h.AddEmptyPod(testContext(t), "a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.tryAdd(conf(p)); err == nil || !strings.Contains(err.Error(), "/run/flannel/subnet.env: no such file or directory") {
		t.Errorf("ADD without flanneld: %v, want that subnet.env does not exist", err)
	}
	c.del(p)
	startOne(t, h, lab.FlanneldOptions{})
	if _, err := c.tryAdd(conf(p)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.tryAdd(conf(p)); err == nil {
		t.Error("a second ADD succeeds, want an error")
	}
	if err := c.check(p); err != nil {
		t.Errorf("CHECK after the second ADD: %v", err)
	}
	// Lose the plugin's notes, as if the disk had been replaced.
	if err := os.RemoveAll(h.Path("/var/lib/cni/flannel")); err != nil {
		t.Fatal(err)
	}
	if err := c.check(p); err == nil {
		t.Error("CHECK without the plugin's note succeeds, want an error")
	}
	c.del(p)

	// A pod that was attached in CNI 0.3.1 must pass CHECK in the newer version, and DEL must
	// work after the host's subnet has changed.
	raised := *c.list
	c.list.CNIVersion = "0.3.1"
	q := c.add("q")
	c.list = &raised
	if err := c.check(q); err != nil {
		t.Errorf("CHECK in %s of a pod that was attached in 0.3.1: %v", raised.CNIVersion, err)
	}
	expectStop(t, h.Daemon())
	text, err := os.ReadFile(h.Path(lab.SubnetFile))
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.ReplaceAll(string(text), "FLANNEL_SUBNET=10.5.", "FLANNEL_SUBNET=10.55.")
	if err := os.WriteFile(h.Path(lab.SubnetFile), []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	c.del(q)
	if _, err := os.Stat(h.Path("/var/lib/cni/networks/cbr0/" + q.Addr(prefix.IPv4).String())); err == nil {
		t.Errorf("%v is still reserved after DEL", q.Addr(prefix.IPv4))
	}
}

// TestCNIAfterFlannelPlugin checks DEL of one interface of a pod that flannel's own plugin has
// attached twice, as eth0 and as net1. flannel's plugin keeps one note for each pod, which
// describes the interface that it has attached last. The test attaches the pod with the plugin of
// this project, and then leaves only such a note. The plugin of this project must read that note
// in DEL of net1, and leave eth0 as it is.
//
//stages:rest TestDelAfterFlannelsPlugin of cmd/flannel-cni has one interface
func TestCNIAfterFlannelPlugin(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"alloc"}`)
	h := l.Host(1)
	startOne(t, h, lab.FlanneldOptions{})
	c := newCNI(t, h, "1.0.0", `"delegate":{"ipMasq":false}`)
	p := c.add("a")
	second := conf(p)
	second.IfName = "net1"
	if _, err := c.tryAdd(second); err != nil {
		t.Fatal(err)
	}
	note := h.Path("/var/lib/cni/flannel/" + second.ContainerID)
	if err := os.Rename(note+"@net1", note); err != nil {
		t.Fatal(err)
	}
	if err := c.do(func(runtime *libcni.CNIConfig) error {
		return runtime.DelNetworkList(testContext(t), c.list, second)
	}); err != nil {
		t.Errorf("DEL of net1: %v", err)
	}
	if left := c.left(); len(left) != 2 { // the note, and the address of eth0
		t.Errorf("DEL of net1 left %v, want the note and the address of eth0", left)
	}
	if err := c.check(p); err != nil {
		t.Errorf("CHECK of eth0 after DEL of net1: %v", err)
	}
	c.del(p)
	if left := c.left(); len(left) > 0 {
		t.Errorf("DEL of eth0 left %v", left)
	}
}

// TestCNIPowerLoss checks that DEL releases a pod's addresses although the plugin's note is empty,
// as after a power failure. flanneld does not run, and there is no subnet file.
func TestCNIPowerLoss(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"1.0.0", "1.1.0"} { // the two versions use different plugins
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 1, Families: dual}, `{"Type":"alloc"}`)
			h := l.Host(1)
			startOne(t, h, lab.FlanneldOptions{})
			c := newCNI(t, h, version, manifestDelegate)
			p := c.add("a")
			expectStop(t, h.Daemon())
			if err := os.Remove(h.Path(lab.SubnetFile)); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(h.Path("/var/lib/cni/flannel/"+conf(p).ContainerID), 0); err != nil {
				t.Fatal(err)
			}
			c.del(p)
			if left := c.left(); len(left) > 0 {
				t.Errorf("DEL left %v", left)
			}
		})
	}
}
