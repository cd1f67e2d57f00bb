package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"flanneld/pkg/lab"
	"flanneld/pkg/ping"
	"flanneld/pkg/prefix"
)

// tunNumber returns the number of the TUN device, 0 if there is none.
func tunNumber(t *testing.T, h *lab.Host) (n int) {
	t.Helper()
	out, err := h.Exec(background(t), "sh", "-c", "ip -o link show flannel0 2>/dev/null || true")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Sscanf(string(out), "%d:", &n)
	return n
}

// TestUDPWithoutABackend: a configuration that names none means udp.
func TestUDPWithoutABackend(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Network: []byte(`{"Network":"10.5.0.0/16"}`)}, "")
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	for _, lease := range leases(t, l) {
		if strings.Contains(lease.Value, "Backend") {
			t.Errorf("lease %s: %s, want neither backend type nor data", lease.Key, lease.Value)
		}
	}
}

// TestUDPHealing damages what the user-space path consists of.
func TestUDPHealing(t *testing.T) { newPatient(t, "udp", dual).healsAll(t) }

// TestUDPStop: a clean stop leaves nothing in the way of another daemon, and so
// does a kill; the next start makes all anew.
func TestUDPStop(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig("udp"))
	startAll(t, l, lab.FlanneldOptions{})
	h := l.Host(1)
	for _, end := range []func(){func() { expectStop(t, h.Daemon()) }, func() { h.Daemon().Kill() }, func() { expectStop(t, h.Daemon()) }} {
		expectMatrix(t, l)
		end()
		eventually(t, "nothing is left", func() error {
			out, err := h.Exec(background(t), "sh", "-c", "ip route show proto 98; ip -6 route show proto 98")
			if n := tunNumber(t, h); err == nil && (n != 0 || len(out) != 0) {
				err = fmt.Errorf("device %d, routes %q", n, out)
			}
			return err
		})
		startOne(t, h, lab.FlanneldOptions{})
	}
	expectMatrix(t, l)
}

// TestUDPNetworkInTheWay has another device take the packets of one family: those of
// the other are carried, also when all has to be made anew.
func TestUDPNetworkInTheWay(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig("udp"))
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	h := l.Host(1)
	network := lab.PodNetwork(prefix.IPv6)
	at := netip.PrefixFrom(network.Addr().Next(), network.Bits()).String() + " dev br0"
	shell(t, h.Namespace, "ip link add br0 up type bridge; ip addr add "+at+" nodad")
	eventually(t, "/readyz", func() error {
		if _, body, err := h.Daemon().Get(background(t), "/readyz"); err == nil || !strings.Contains(body, "directly connected to br0") {
			return fmt.Errorf("it answers %q, %w", body, err)
		}
		return nil
	})
	shell(t, h.Namespace, "ip link del flannel0")
	pods := l.Pods()
	eventually(t, "IPv4", func() error {
		_, err := pods[0].Ping(background(t), pods[1].Addrs()[0], ping.Options{})
		return err
	})
	shell(t, h.Namespace, "ip addr del "+at)
	expectReady(t, h.Daemon())
	expectMatrix(t, l)
}

// TestUDPPersist restarts daemons in every way while pods talk: the device
// stays, and what pods send meanwhile is late or lost, but no error.
func TestUDPPersist(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("udp"))
	options := lab.FlanneldOptions{Args: []string{"--udp-persist"}}
	startAll(t, l, options)
	h := l.Host(1)
	number := tunNumber(t, h)
	expectMatrix(t, l)
	for _, end := range []func(){func() { expectStop(t, h.Daemon()) }, func() { h.Daemon().Kill() }} {
		end()
		_, err := l.Pods()[0].Ping(background(t), l.Pods()[1].Addrs()[0], ping.Options{Timeout: 300 * time.Millisecond})
		if err == nil || errors.Is(err, ping.ErrUnreachable) {
			t.Errorf("without a daemon a ping ends with %v, want no answer", err)
		}
		startOne(t, h, options)
		if n := tunNumber(t, h); n != number {
			t.Errorf("device %d, want %d, as before", n, number)
		}
		expectMatrix(t, l)
	}
	expectStop(t, h.Daemon())
	startOne(t, h, lab.FlanneldOptions{})
	expectStop(t, h.Daemon())
	if n := tunNumber(t, h); n != 0 {
		t.Errorf("device %d stays, though it is not to persist any more", n)
	}
}

// TestUDPPeers: leases of other backends are no peers, and what comes from
// strangers is dropped and counted.
func TestUDPPeers(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("udp"))
	startAll(t, l, lab.FlanneldOptions{})
	c := store(t, l)
	put(t, c, lab.Prefix+"/subnets/10.5.201.0-24", `{"PublicIP":"192.168.77.201","BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}}`)
	put(t, c, lab.Prefix+"/subnets/10.5.202.0-24", `{"PublicIP":"192.168.77.202","BackendData":{"VNI":1}}`)
	put(t, c, lab.Prefix+"/subnets/10.5.203.0-24", `{"PublicIP":"192.168.77.203","BackendData":null}`)
	d := l.Host(1).Daemon()
	expectLog(t, d, `"lease refused" lease="10.5.201.0-24"`)
	expectLog(t, d, `"lease refused" lease="10.5.202.0-24"`)
	conn, err := l.Underlay().Dial(background(t), "udp", netip.AddrPortFrom(l.Host(1).Addr(v4[0]), 8285).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(make([]byte, 40)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the drop in the metrics", func() error {
		_, text, err := d.Get(background(t), "/metrics")
		for _, line := range []string{`flannel_udp_dropped_packets_total{reason="unknown_peer"} 1`, `flannel_backend_info{mode="userspace",type="udp"} 1`, `flannel_peers{state="served"} 2`} {
			if err == nil && !strings.Contains(text, line+"\n") {
				err = fmt.Errorf("no line %s", line)
			}
		}
		return err
	})
	expectMatrix(t, l)
}

// TestUDPRefuses: what cannot be is said in one line.
func TestUDPRefuses(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"udp","Mode":"warp"}`)
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{}), `Backend.Mode is \"warp\": want auto, userspace or kernel`)
	network, err := lab.NetworkConfig(v4, []byte(`{"Type":"udp"}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.PutNetwork(background(t), network); err != nil {
		t.Fatal(err)
	}
	if out, err := l.Host(1).Exec(background(t), "ip", "link", "add", "flannel0", "type", "bridge"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{}), "there is a device of that name which is no TUN device")
	if out, err := l.Host(1).Exec(background(t), "ip", "link", "del", "flannel0"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{Args: []string{"--udp-source-check=maybe"}}), "expected strict or network or off")
}
