// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"encoding/json"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/subnet"
)

// TestKernelTakeover starts networks one after the other, and checks which of them take over
// the tunnel of the network before. CloseUnused and FreePorts must close it only when no network uses it.
func TestKernelTakeover(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root)", err)
	}
	if out, err := exec.Command("sh", "-ec", `ip link set lo up; ip link add eth0 type veth peer name far
		ip link set eth0 up; ip addr add 192.168.77.1/24 dev eth0`).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	k, err := linux.Open(linux.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	env := backendtest.Env(1500, prefix.IPv4)
	env.Kernel, env.Resync = k, time.Hour
	h := NewHost(Settings{})
	defer h.Close()
	start := func(raw, own string) *network {
		t.Helper()
		b, _, err := h.New(json.RawMessage(raw), env)
		if err != nil {
			t.Fatal(err)
		}
		l := subnet.Lease{Endpoints: []subnet.Endpoint{{Subnet: netip.MustParsePrefix(own), PublicIP: netip.MustParseAddr("192.168.77.1")}}}
		n, err := b.Start(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.Sync(t.Context(), backend.Set{All: true, Complete: true}); err != nil {
			t.Fatal(err)
		}
		return n.(*network)
	}
	last := start("{}", "10.5.1.0/24")
	for _, tt := range []struct {
		name, raw, own string
		same           bool
	}{
		{"same settings", "{}", "10.5.1.0/24", true},
		{"another subnet of the host", "{}", "10.5.2.0/24", false},
		{"another port", `{"Port":7}`, "10.5.2.0/24", false},
		{"same settings again", `{"Port":7}`, "10.5.2.0/24", true},
	} {
		if err := last.Close(); err != nil {
			t.Fatal(err)
		}
		now := start(tt.raw, tt.own)
		if same := now.tunnel == last.tunnel; same != tt.same {
			t.Errorf("%s: the same tunnel: %v, want %v", tt.name, same, tt.same)
		}
		if err := now.tunnel.Err(); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		last = now
	}
	if err := last.Close(); err != nil {
		t.Fatal(err)
	}
	before := last.tunnel
	if last = start(`{"Port":7}`, "10.5.2.0/24"); last.tunnel != before || last.tunnel.Err() != nil {
		t.Errorf("the tunnel is the same: %v, %v", last.tunnel == before, last.tunnel.Err())
	}
	exists := func() bool {
		_, err := net.InterfaceByName(deviceName)
		return err == nil
	}
	if err := h.CloseUnused(); err != nil || !exists() {
		t.Errorf("while a network uses the device: %v, and it exists: %v", err, exists())
	}
	if err := h.FreePorts([]int{7}); err != nil || last.tunnel.Err() != nil {
		t.Errorf("while a network uses the port: %v, and the tunnel: %v", err, last.tunnel.Err())
	}
	if err := last.Close(); err != nil || !exists() {
		t.Errorf("after the end of the network: %v, and the device exists: %v", err, exists())
	}
	if err := h.FreePorts([]int{8285}); err != nil || last.tunnel.Err() != nil {
		t.Errorf("when nothing uses another port: %v, and the tunnel: %v", err, last.tunnel.Err())
	}
	if err := h.FreePorts([]int{8285, 7}); err != nil || exists() {
		t.Errorf("when nothing uses the port: %v, and the device exists: %v", err, exists())
	}
	last = start(`{"Port":7}`, "10.5.2.0/24")
	if err := last.Close(); err != nil || !exists() {
		t.Errorf("after the end of another network: %v, and the device exists: %v", err, exists())
	}
	if err := h.CloseUnused(); err != nil || exists() {
		t.Errorf("when nothing uses the device: %v, and it exists: %v", err, exists())
	}
}
