// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"errors"
	"net/netip"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// enterLossyNamespace moves the test into a network namespace of its own. Packets to 198.51.100.1 and
// fd00:5::1 get lost there, at the peer of a veth device.
func enterLossyNamespace(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root)", err)
	}
	if out, err := exec.Command("sh", "-ec", `ip link set lo up mtu 1500
		ip link add one type veth peer name two; ip link set one up; ip link set two up
		ip addr add 198.51.100.2/24 dev one; ip addr add fd00:5::2/64 dev one nodad
		ip neigh add 198.51.100.1 lladdr 02:00:00:00:00:01 dev one; ip neigh add fd00:5::1 lladdr 02:00:00:00:00:01 dev one`).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestKernelPinger sends many requests at a time in both families, of which some get no answer or are
// too big. Each call must return the result of its own request.
func TestKernelPinger(t *testing.T) {
	enterLossyNamespace(t)
	p := NewPinger()
	type result struct {
		rtt time.Duration
		err error
	}
	ping := func(to string, size int, timeout time.Duration) result {
		rtt, err := p.Ping(t.Context(), netip.MustParseAddr(to), Path{Size: size, Whole: true}, timeout)
		return result{rtt, err}
	}
	// The first request of a family opens the socket, in the namespace of this thread.
	for _, to := range []string{"127.0.0.1", "::1"} {
		if r := ping(to, 1500, 5*time.Second); r.err != nil || r.rtt <= 0 {
			t.Fatalf("%s: %v, %v", to, r.rtt, r.err)
		}
	}
	tests := []struct {
		to   string
		size int
		want error
	}{
		{"127.0.0.2", 84, nil}, {"127.0.0.3", 1500, nil}, {"::1", 84, nil}, {"::1", 1500, nil},
		{"127.0.0.4", 1501, ErrTooBig}, {"::1", 1501, ErrTooBig},
		{"198.51.100.1", 84, errNoAnswer}, {"fd00:5::1", 84, errNoAnswer},
	}
	var wg sync.WaitGroup
	for range 50 {
		for _, tt := range tests {
			wg.Go(func() {
				timeout := 20 * time.Second
				if tt.want != nil {
					timeout = 100 * time.Millisecond
				}
				if r := ping(tt.to, tt.size, timeout); !errors.Is(r.err, tt.want) {
					t.Errorf("%d bytes to %s: error %v, want %v", tt.size, tt.to, r.err, tt.want)
				}
			})
		}
	}
	wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Ping(ctx, netip.MustParseAddr("198.51.100.1"), Path{Size: 84}, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v after the context has ended", err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := p.Ping(t.Context(), netip.MustParseAddr("127.0.0.1"), Path{Size: 84}, time.Second); err == nil {
		t.Error("an answer after Close")
	}
}
