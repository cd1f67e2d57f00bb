// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
)

// TestKernelHops sends packets that the other end of a link has to forward, but may not.
func TestKernelHops(t *testing.T) {
	enterLossyNamespace(t)
	other := exec.CommandContext(t.Context(), "unshare", "--net", "sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()

	run := func(script string) error {
		out, err := exec.Command("sh", "-ec", fmt.Sprintf("far() { nsenter --net --target %d \"$@\"; }\n%s", other.Process.Pid, script)).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	waittest.Until(t, 10*time.Second, "another network namespace", func() bool { return run("! far ip link show one") == nil })
	if err := run(fmt.Sprintf(`ip link add near type veth peer name outer; ip link set outer netns %d
ip addr add 192.0.2.1/24 dev near; ip addr add 2001:db8::1/64 dev near nodad; ip link set near up
far ip addr add 192.0.2.2/24 dev outer; far ip addr add 2001:db8::2/64 dev outer nodad; far ip link set outer up
far ip link add pods type bridge; far ip link set pods up; far ip addr add 10.5.1.1/24 dev pods; far ip addr add fd00:6::1/64 dev pods nodad
far sysctl -q -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
ip route add 10.5.1.0/24 via 192.0.2.2; ip route add fd00:6::/64 via 2001:db8::2`, other.Process.Pid)); err != nil {
		t.Fatal(err)
	}

	p := NewPinger()
	defer p.Close()
	for to, at := range map[string]string{"10.5.1.254": "192.0.2.2", "fd00:6::fe": "2001:db8::2"} {
		_, err := p.Ping(t.Context(), netip.MustParseAddr(to), Path{Hops: 1}, 5*time.Second)
		if e, ok := errors.AsType[ExpiredError](err); !ok || e.At != netip.MustParseAddr(at) {
			t.Errorf("ping to %s: %v, want that %s reports the end of the hop limit", to, err, at)
		}
		if _, err := p.Ping(t.Context(), netip.MustParseAddr(at), Path{Hops: 1}, 5*time.Second); err != nil {
			t.Errorf("ping to %s: %v, want an answer, which needs no forwarding", at, err)
		}
	}
}
