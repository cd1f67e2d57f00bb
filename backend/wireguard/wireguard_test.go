// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

func text(k wgtypes.Key) string { return k.String() }

// key returns a key whose first byte is n, and all others 0.
func key(n byte) (k wgtypes.Key) {
	k[0] = n
	return k
}

func TestConfig(t *testing.T) {
	v4, v6, dual := backendtest.Env(1500, prefix.IPv4), backendtest.Env(1500, prefix.IPv6), backendtest.Env(1500, prefix.IPv4, prefix.IPv6)
	for _, tt := range []struct {
		name, raw string
		env       backend.Env
		mtu       int
		devices   string
		err       string
	}{
		{name: "defaults", raw: `{"Type":"wireguard"}`, env: v4, mtu: 1440, devices: "flannel-wg:51820"},
		{name: "IPv6", raw: `{}`, env: v6, mtu: 1420, devices: "flannel-wg-v6:51821"},
		{name: "dual", raw: `{}`, env: dual, mtu: 1420, devices: "flannel-wg:51820 flannel-wg-v6:51821"},
		{name: "auto", raw: `{"Mode":"auto"}`, env: dual, mtu: 1420, devices: "flannel-wg:51820"},
		{name: "outer IPv4", raw: `{"mode":"IPv4","listenport":7}`, env: dual, mtu: 1440, devices: "flannel-wg:7"},
		{name: "outer IPv6", raw: `{"Mode":"ipv6"}`, env: dual, mtu: 1420, devices: "flannel-wg:51820"},
		{name: "MTU too small", raw: `{"MTU":1359}`, env: v6, err: "leaves 1279 bytes inside flannel-wg-v6: want at least 1280"},
		{name: "unknown mode", raw: `{"Mode":"both"}`, env: v4, err: `Backend.Mode is "both": want one of separate, auto, ipv4, ipv6`},
		{name: "mode without network", raw: `{"Mode":"ipv6"}`, env: v4, err: `Backend.Mode is "ipv6", but the network has no IPv6`},
		{name: "one port for two devices", raw: `{"ListenPortV6":51820}`, env: dual, err: "both 51820"},
		{name: "port 0", raw: `{"ListenPort":0}`, env: v4, err: "Backend.ListenPort is 0: want 1 to 65535"},
		{name: "keepalive", raw: `{"PersistentKeepaliveInterval":-1}`, env: v4, err: "Backend.PersistentKeepaliveInterval is -1"},
		{name: "implementation", raw: `{"Implementation":"best"}`, env: v4, err: `Backend.Implementation is "best"`},
		{name: "PSK", raw: `{"PSK":"c2VjcmV0"}`, env: v4, err: "Backend.PSK is no key: want 32 bytes in base64"},
		{name: "two PSKs", raw: `{"PSK":"c2VjcmV0","PSKFile":"/x"}`, env: v4, err: "both set"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, _, err := NewHost().New(json.RawMessage(tt.raw), tt.env)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || strings.Contains(err.Error(), "c2VjcmV0") {
					t.Fatalf("error %v, want one with %q and without secrets", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			n := &network{Backend: b.(*Backend)}
			var devices []string
			for i, name := range n.scope().Devices {
				devices = append(devices, fmt.Sprintf("%s:%d", name, n.Describe().Ports[Type][i]))
			}
			if got := strings.Join(devices, " "); got != tt.devices || n.Describe().MTU != tt.mtu {
				t.Errorf("devices %q and MTU %d, want %q and %d", got, n.Describe().MTU, tt.devices, tt.mtu)
			}
		})
	}
}

func TestMTU(t *testing.T) {
	backendtest.MTU{
		New:      NewHost().New,
		Overhead: map[prefix.Family]int{prefix.IPv4: 60, prefix.IPv6: 80}, Key: true,
	}.Run(t)
}

func TestPSK(t *testing.T) {
	file := filepath.Join(t.TempDir(), "psk")
	for content, want := range map[string]string{text(key(3)) + "\n": "", "c2VjcmV0": "holds no key", "": "holds no key"} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := config{PSKFile: file}.psk()
		switch {
		case want == "" && (err != nil || got != key(3)):
			t.Errorf("%q: %v, %v", content, got, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "c2VjcmV0")):
			t.Errorf("%q: error %v, want one with %q and without the secret", content, err, want)
		}
	}
	if _, err := (config{PSKFile: file + "x"}).psk(); err == nil {
		t.Error("no error for a missing file")
	}
}

// TestData checks that the encoded bytes are the ones that other flannel daemons write and
// read, and which data is refused.
func TestData(t *testing.T) {
	raw := encodeData(leaseData{PublicKey: text(key(1)), Port: 51820})
	if string(raw) != `{"PublicKey":"AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","Port":51820}` {
		t.Errorf("%s", raw)
	}
	subnettest.CheckLeaseData(t, "wireguard", leaseData{}, func(raw json.RawMessage) error {
		_, err := decodeData(raw)
		return err
	})
	if _, err := decodeData(nil); err == nil || !strings.Contains(err.Error(), "no backend data") {
		t.Errorf("no data: %v", err)
	}
}

func FuzzData(f *testing.F) {
	f.Add([]byte(`{"PublicKey":"AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","Port":51820}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		d, err := decodeData(raw)
		if err == nil && (d.key == wgtypes.Key{} || d.port < 0 || d.port > 65535) {
			t.Errorf("%q gives key %v and port %d", raw, d.key, d.port)
		}
	})
}

func TestKey(t *testing.T) {
	dir := t.TempDir()
	k := keyStore{path: filepath.Join(dir, "state", "wgkey"), fallback: filepath.Join(dir, "old")}
	first, err := k.key(wgtypes.Key{})
	if err != nil {
		t.Fatal(err)
	}
	if again, err := k.key(key(9)); err != nil || again != first {
		t.Errorf("%v, %v, want the stored key", again, err)
	}
	info, err := os.Stat(k.path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v, want mode 0600", info, err)
	}
	remove := func() {
		t.Helper()
		if err := os.Remove(k.path); err != nil {
			t.Fatal(err)
		}
	}
	remove()
	if adopted, err := k.key(key(9)); err != nil || adopted != key(9) {
		t.Errorf("%v, %v, want the device's key", adopted, err)
	}
	remove()
	if err := os.WriteFile(k.fallback, []byte(text(key(7))), 0o400); err != nil {
		t.Fatal(err)
	}
	if old, err := k.key(wgtypes.Key{}); err != nil || old != key(7) {
		t.Errorf("%v, %v, want the key of the earlier daemon", old, err)
	}
	if kept, err := readKey(k.path); err != nil || kept != key(7) {
		t.Errorf("%v, %v, want the earlier daemon's key to be stored", kept, err)
	}
	if err := os.WriteFile(k.path, []byte("c2VjcmV0"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := k.key(wgtypes.Key{}); err == nil || !strings.Contains(err.Error(), k.path) || strings.Contains(err.Error(), "c2VjcmV0") {
		t.Errorf("error %v, want one that contains the file's name and not the key", err)
	}
}

// TestWrittenKeys checks that a cleanup finds the files that flanneld has written, and no file
// of another program. A damaged list must be an error of the cleanup, and not of the start.
func TestWrittenKeys(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	expect := func(want ...string) {
		t.Helper()
		got, err := WrittenKeys(state)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%v, %v, want %v", got, err, want)
		}
	}
	expect()
	given, made := filepath.Join(dir, "given"), filepath.Join(dir, "keys", "made")
	if err := os.WriteFile(given, []byte(text(key(7))), 0o400); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{given, made} {
		t.Setenv("WIREGUARD_KEY_FILE", path)
		if _, err := newKeyStore(state, "").key(wgtypes.Key{}); err != nil {
			t.Fatal(err)
		}
	}
	expect(made)
	if raw, err := os.ReadFile(filepath.Join(state, writtenFile)); err != nil || !strings.Contains(string(raw), made) {
		t.Fatalf("%v: %s", err, raw)
	} else if private, _ := os.ReadFile(made); strings.Contains(string(raw), string(private)) {
		t.Errorf("the list shows the private key: %s", raw)
	}
	if err := os.WriteFile(made, []byte(text(key(7))), 0o600); err != nil {
		t.Fatal(err)
	}
	expect()
	if err := os.Remove(made); err != nil {
		t.Fatal(err)
	}
	expect()
	if _, err := newKeyStore(state, "").key(wgtypes.Key{}); err != nil {
		t.Fatal(err)
	}
	expect(made)
	if err := os.WriteFile(filepath.Join(state, writtenFile), []byte("["), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := WrittenKeys(state); err == nil || !strings.Contains(err.Error(), writtenFile) {
		t.Errorf("error %v, want one that names the file", err)
	}
	if err := os.Remove(made); err != nil {
		t.Fatal(err)
	}
	if _, err := newKeyStore(state, "").key(wgtypes.Key{}); err != nil {
		t.Errorf("a damaged list prevents the start: %v", err)
	}
	expect(made)
}

// TestMakeRoom checks that removeKernelDevices removes the kernel's WireGuard devices, so that TUN
// devices can have their names. It must remove nothing if one of the devices may belong to another
// program.
func TestMakeRoom(t *testing.T) {
	for _, tt := range []struct{ four, six, left, err string }{
		{},
		{four: "tun", six: "wireguard", left: "tun"},
		{four: "wireguard", six: "wireguard"},
		{four: "wireguard", six: "bridge", left: "wireguard bridge", err: "device flannel-wg-v6 is of type bridge, want tun: remove it (ip link delete flannel-wg-v6)"},
	} {
		t.Run(tt.four+" "+tt.six, func(t *testing.T) {
			k := dataplanetest.New()
			for name, kind := range map[string]string{"flannel-wg": tt.four, "flannel-wg-v6": tt.six} {
				if kind == "" {
					continue
				}
				if err := k.Append(dataplane.Link{Name: name, Kind: kind}); err != nil {
					t.Fatal(err)
				}
			}
			env := backendtest.Env(1500, prefix.IPv4, prefix.IPv6)
			env.Kernel = k
			links := func() map[string]dataplane.Link {
				links, err := env.Links(t.Context(), "flannel-wg", "flannel-wg-v6")
				if err != nil {
					t.Fatal(err)
				}
				return links
			}
			n := &network{Backend: &Backend{env: env}}
			err := n.removeKernelDevices(t.Context(), links())
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			left := links()
			got := strings.TrimSpace(left["flannel-wg"].Kind + " " + left["flannel-wg-v6"].Kind)
			if got != tt.left {
				t.Errorf("%q remains, want %q", got, tt.left)
			}
		})
	}
}

// lease returns the lease of a peer with these public addresses and ports. An empty address
// leaves out its family.
func lease(t *testing.T, addr4, addr6 string, port4, port6 int) subnet.Lease {
	t.Helper()
	var l subnet.Lease
	add := func(subnetOf, addr string, port int) {
		if addr == "" {
			return
		}
		data := encodeData(leaseData{PublicKey: text(key(2)), Port: port})
		l.Endpoints = append(l.Endpoints, subnet.Endpoint{
			Subnet: netip.MustParsePrefix(subnetOf), PublicIP: netip.MustParseAddr(addr), Data: data,
		})
	}
	add("10.5.2.0/24", addr4, port4)
	add("fd00:10:5:2::/64", addr6, port6)
	return l
}

func TestPeer(t *testing.T) {
	dual := backendtest.Env(1500, prefix.IPv4, prefix.IPv6)
	global := backendtest.Env(1500, prefix.IPv4, prefix.IPv6)
	global.Underlay.Addrs[1] = underlay.Address{Local: netip.MustParseAddr("2001:db8::1"), Public: netip.MustParseAddr("2001:db8::1")}
	const both = " [10.5.2.0/24 fd00:10:5:2::/64]"
	for _, tt := range []struct {
		name  string
		env   backend.Env
		mode  string
		lease subnet.Lease
		want  []string
	}{
		{"separate", dual, modeSeparate, lease(t, "192.168.77.2", "fd00:77::2", 51820, 51821), []string{"192.168.77.2:51820 [10.5.2.0/24]", "[fd00:77::2]:51821 [fd00:10:5:2::/64]"}},
		{"separate, own ports", dual, modeSeparate, lease(t, "192.168.77.2", "fd00:77::2", 7, 8), []string{"192.168.77.2:7 [10.5.2.0/24]", "[fd00:77::2]:8 [fd00:10:5:2::/64]"}},
		{"separate, no ports", dual, modeSeparate, lease(t, "192.168.77.2", "fd00:77::2", 0, 0), []string{"192.168.77.2:51820 [10.5.2.0/24]", "[fd00:77::2]:51821 [fd00:10:5:2::/64]"}},
		{"separate, IPv4 only", dual, modeSeparate, lease(t, "192.168.77.2", "", 51820, 0), []string{"192.168.77.2:51820 [10.5.2.0/24]", ""}},
		{"ipv4", dual, modeIPv4, lease(t, "192.168.77.2", "fd00:77::2", 51820, 51820), []string{"192.168.77.2:51820" + both}},
		{"ipv6", dual, modeIPv6, lease(t, "192.168.77.2", "fd00:77::2", 51820, 51820), []string{"[fd00:77::2]:51820" + both}},
		{"ipv6, the known flannel's port", dual, modeIPv6, lease(t, "192.168.77.2", "fd00:77::2", 51820, 51821), []string{"[fd00:77::2]:51820" + both}},
		{"ipv6, the known flannel's port alone", backendtest.Env(1500, prefix.IPv6), modeIPv6, lease(t, "", "fd00:77::2", 0, 51821), []string{"[fd00:77::2]:51820 [fd00:10:5:2::/64]"}},
		{"ipv6, peer without", dual, modeIPv6, lease(t, "192.168.77.2", "", 51820, 0), []string{""}},
		{"auto, private", dual, modeAuto, lease(t, "192.168.77.2", "fd00:77::2", 51820, 51820), []string{"192.168.77.2:51820" + both + " or [fd00:77::2]:51820"}},
		{"auto, public IPv4", dual, modeAuto, lease(t, "203.0.113.2", "2001:db8::2", 51820, 51820), []string{"203.0.113.2:51820" + both + " or [2001:db8::2]:51820"}},
		{"auto, peer global, own not", dual, modeAuto, lease(t, "192.168.77.2", "2001:db8::2", 51820, 51820), []string{"192.168.77.2:51820" + both + " or [2001:db8::2]:51820"}},
		{"auto, both global", global, modeAuto, lease(t, "192.168.77.2", "2001:db8::2", 51820, 51820), []string{"[2001:db8::2]:51820" + both + " or 192.168.77.2:51820"}},
		{"auto, IPv4 only", global, modeAuto, lease(t, "192.168.77.2", "", 51820, 0), []string{"192.168.77.2:51820 [10.5.2.0/24]"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, _, err := NewHost().New(json.RawMessage(`{"Mode":"`+tt.mode+`"}`), tt.env)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, d := range b.(*Backend).tunnels() {
				p, ok := b.(*Backend).peer(d, tt.lease)
				if !ok {
					got = append(got, "")
					continue
				}
				_, line, _ := strings.Cut(p.String(), " endpoint ")
				if p.Other.IsValid() {
					line += " or " + p.Other.String()
				}
				got = append(got, strings.Replace(line, " allowed ips", "", 1))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDiff(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	s := settings{key: key(1), port: 51820, psk: key(5), keepalive: 25 * time.Second}
	p := discovery.Peer{Key: key(2), Endpoint: netip.MustParseAddrPort("192.168.77.2:51820"), Allowed: []netip.Prefix{netip.MustParsePrefix("10.5.2.0/24")}}
	moved := p
	moved.Endpoint = netip.MustParseAddrPort("192.168.77.3:51820")
	learnt := asWritten(moved, s)
	learnt.LastHandshakeTime = now.Add(-time.Minute)
	dead := learnt
	dead.LastHandshakeTime = now.Add(-time.Hour)
	elsewhere := asWritten(p, s)
	elsewhere.AllowedIPs = ipNets([]netip.Prefix{netip.MustParsePrefix("10.5.9.0/24")})
	otherPSK := asWritten(p, settings{keepalive: s.keepalive})
	aged := func(age time.Duration) wgtypes.Peer {
		h := otherPSK
		h.LastHandshakeTime = now.Add(-age)
		return h
	}
	stranger := asWritten(discovery.Peer{Key: key(3)}, s)
	for _, tt := range []struct {
		name           string
		have           []wgtypes.Peer
		want           discovery.Peer
		known          []discovery.Peer
		removeUnwanted bool
		fromMemory     bool
		does           string
		waits          int
	}{
		{name: "right", have: []wgtypes.Peer{asWritten(p, s)}, want: p, removeUnwanted: true},
		{name: "missing", want: p, does: "add"},
		{name: "surplus, kept", have: []wgtypes.Peer{asWritten(p, s), stranger}, want: p},
		{name: "surplus", have: []wgtypes.Peer{asWritten(p, s), stranger}, want: p, removeUnwanted: true, does: "remove"},
		{name: "rotated", have: []wgtypes.Peer{stranger}, want: p, removeUnwanted: true, does: "add remove"},
		{name: "learnt", have: []wgtypes.Peer{learnt}, want: p},
		{name: "learnt, known before", have: []wgtypes.Peer{learnt}, want: p, known: []discovery.Peer{p}},
		{name: "learnt, but dead", have: []wgtypes.Peer{dead}, want: p, does: "endpoint"},
		{name: "lease has moved", have: []wgtypes.Peer{learnt}, want: p, known: []discovery.Peer{moved}, does: "endpoint"},
		{name: "lease has moved, and the peer may be missing", have: []wgtypes.Peer{asWritten(moved, s)}, want: p, known: []discovery.Peer{moved}, fromMemory: true, does: "add"},
		{name: "networks of a peer that may be missing", have: []wgtypes.Peer{elsewhere}, want: p, known: []discovery.Peer{p}, fromMemory: true, does: "allowed"},
		{name: "networks", have: []wgtypes.Peer{elsewhere}, want: p, does: "allowed"},
		{name: "PSK", have: []wgtypes.Peer{otherPSK}, want: p, does: "psk"},
		{name: "PSK, young session", have: []wgtypes.Peer{aged(9 * time.Second)}, want: p, does: "psk"},
		{name: "PSK, session", have: []wgtypes.Peer{aged(11 * time.Second)}, want: p, waits: 1},
		{name: "PSK, session about to be replaced", have: []wgtypes.Peer{aged(130 * time.Second)}, want: p, waits: 1},
		{name: "PSK, old session", have: []wgtypes.Peer{aged(136 * time.Second)}, want: p, does: "psk"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ages := map[wgtypes.Key]time.Duration{}
			for _, h := range tt.have {
				ages[h.PublicKey] = now.Sub(h.LastHandshakeTime)
			}
			d := diff{
				have:     &wgtypes.Device{PrivateKey: s.key, ListenPort: s.port, Peers: tt.have},
				want:     discovery.Peers{tt.want.Key: tt.want},
				known:    discovery.Peers{},
				settings: s, removeUnwanted: tt.removeUnwanted, fromMemory: tt.fromMemory, ages: ages,
			}
			for _, k := range tt.known {
				d.known[k.Key] = k
			}
			c, changed := d.config()
			if got := describe(c); got != tt.does || changed != (tt.does != "") {
				t.Errorf("changes %q (changed %v), want %q", got, changed, tt.does)
			}
			if got := d.waiting(); got != tt.waits {
				t.Errorf("%d peers wait for their preshared key, want %d", got, tt.waits)
			}
		})
	}
	fresh := diff{have: &wgtypes.Device{}, settings: s}
	if c, changed := fresh.config(); !changed || *c.PrivateKey != s.key || *c.ListenPort != s.port {
		t.Errorf("a fresh device gets %+v, want key and port", c)
	}
}

// describe returns a word for each peer that c changes, in the order of c: remove, add, or the
// first of endpoint, allowed (allowed IPs) and psk that the change sets.
func describe(c wgtypes.Config) string {
	var words []string
	for _, p := range c.Peers {
		switch {
		case p.Remove:
			words = append(words, "remove")
		case !p.UpdateOnly:
			words = append(words, "add")
		case p.Endpoint != nil:
			words = append(words, "endpoint")
		case p.ReplaceAllowedIPs:
			words = append(words, "allowed")
		case p.PresharedKey != nil:
			words = append(words, "psk")
		}
	}
	return strings.Join(words, " ")
}

// TestFilesOfTheKey expects that the key goes with its network, unless it belongs to an operator.
func TestFilesOfTheKey(t *testing.T) {
	env := backendtest.Env(1500, prefix.IPv4)
	env.StateDir = "/state"
	env.Network = "red"
	b, _, err := NewHost().New(json.RawMessage(`{}`), env)
	if err != nil {
		t.Fatal(err)
	}
	if d := b.Describe(); len(d.Files) > 0 || !slices.Equal(d.Kept, []string{"/state/wgkey-red"}) {
		t.Errorf("files %v, kept %v", d.Files, d.Kept)
	}
	t.Setenv(keyFileVariable, "/state/operator")
	if d := b.Describe(); len(d.Kept) > 0 || !slices.Equal(d.Files, []string{"/state/operator"}) {
		t.Errorf("of an operator: files %v, kept %v", d.Files, d.Kept)
	}
}
