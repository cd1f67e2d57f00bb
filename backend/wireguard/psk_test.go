// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
)

// TestSecret checks when a preshared key counts as new: after a start or a change, until all
// peers have it. Only during that time may a peer with another key still have the previous one.
func TestSecret(t *testing.T) {
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	c := config{PSKFile: filepath.Join(t.TempDir(), "psk")}
	var s secret
	for _, step := range []struct {
		name     string
		key      wgtypes.Key
		waiting  int  // waiting peers after the pass
		all      bool // the pass includes all peers
		rotating bool // during the pass
		says     string
	}{
		{"start, store away", key(1), 0, false, true, ""},
		{"start", key(1), 0, true, true, ""},
		{"at rest", key(1), 0, true, false, ""},
		{"another program changes it for a peer", key(1), 1, true, false, ""},
		{"the change is repaired", key(1), 0, true, false, ""},
		{"change", key(2), 2, true, true, "has changed"},
		{"one has it", key(2), 1, true, true, ""},
		{"all have it", key(2), 0, true, true, "all peers have"},
		{"at rest again", key(2), 0, true, false, ""},
		{"change that all take at once", key(3), 0, true, true, "all peers have"},
		{"at rest finally", key(3), 0, true, false, ""},
	} {
		log.Reset()
		if err := os.WriteFile(c.PSKFile, []byte(text(step.key)), 0o600); err != nil {
			t.Fatal(err)
		}
		if k, err := s.read(ctx, c); err != nil || k != step.key {
			t.Fatalf("%s: read %v, error %v", step.name, k, err)
		}
		if s.rotating != step.rotating {
			t.Errorf("%s: rotating is %v", step.name, s.rotating)
		}
		s.setWaiting(ctx, step.waiting, step.all)
		if said := log.String(); !strings.Contains(said, step.says) || step.says == "" && said != "" {
			t.Errorf("%s: log %q, want %q", step.name, said, step.says)
		}
	}
}

// TestForeign checks which changes of a peer countRepairs counts as repairs. A change of the endpoint
// does not count. A change of the preshared key does not count while the configured key is new.
func TestForeign(t *testing.T) {
	psk, p := key(5), discovery.Peer{Key: key(2)}
	peers := discovery.Peers{p.Key: p}
	for _, tt := range []struct {
		name     string
		change   wgtypes.PeerConfig
		rotating bool
		count    int
	}{
		{"preshared key", wgtypes.PeerConfig{PublicKey: p.Key, UpdateOnly: true, PresharedKey: &psk}, false, 1},
		{"new preshared key", wgtypes.PeerConfig{PublicKey: p.Key, UpdateOnly: true, PresharedKey: &psk}, true, 0},
		{"allowed IPs", wgtypes.PeerConfig{PublicKey: p.Key, UpdateOnly: true, ReplaceAllowedIPs: true}, true, 1},
		{"another endpoint", wgtypes.PeerConfig{PublicKey: p.Key, UpdateOnly: true, Endpoint: &net.UDPAddr{}}, false, 0},
		{"missing peer", diff{}.add(p), true, 1},
		{"missing peer that is new", diff{}.add(discovery.Peer{Key: key(4)}), true, 0},
		{"stranger", wgtypes.PeerConfig{PublicKey: key(3), Remove: true}, true, 1},
	} {
		d := diff{want: peers, known: peers, settings: settings{rotating: tt.rotating}}
		if got := countRepairs(wgtypes.Config{Peers: []wgtypes.PeerConfig{tt.change}}, d); got != tt.count {
			t.Errorf("%s: %d changes are another program's, want %d", tt.name, got, tt.count)
		}
	}
}
