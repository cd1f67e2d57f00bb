// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/test/lab"
)

// receivedBytes returns the number of bytes that eth0 of a host has received so far.
func receivedBytes(t *testing.T, h *lab.Host) (bytes uint64) {
	t.Helper()
	err := h.Netlink(testContext(t), func(nl *netlink.Handle) error {
		link, err := nl.LinkByName("eth0")
		if err == nil {
			bytes = link.Attrs().Statistics.RxBytes
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// TestRestartReadsWhatHasChanged checks that a restarted daemon reads only the leases
// that changed while it was down. For this it counts all bytes that the host receives
// until the daemon is ready.
func TestRestartReadsWhatHasChanged(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c := etcdClient(t, l)
	for i := 2; i < 252; i++ {
		putKey(t, c, fmt.Sprintf("%s10.5.%d.0-24", subnets, i), vxlanLease(fmt.Sprintf("192.168.78.%d", i), fmt.Sprintf("02:00:00:00:00:%02x", i)))
	}
	h := l.Host(1)
	start := func() (bytes uint64, took time.Duration) {
		before, began := receivedBytes(t, h), time.Now()
		startOne(t, h, lab.FlanneldOptions{})
		return receivedBytes(t, h) - before, time.Since(began)
	}
	first, took := start()
	expectStop(t, h.Daemon())
	again, tookAgain := start()
	t.Logf("the first start received %d bytes in %s, the restart %d in %s", first, took, again, tookAgain)
	if again >= 10_000 || first < 2*again {
		t.Errorf("a restart receives %d bytes, and the first start %d, want less than 10 kB and less than half", again, first)
	}
	expectStop(t, h.Daemon())
	removeKey(t, c, subnets+"10.5.200.0-24")
	putKey(t, c, subnets+"10.5.252.0-24", vxlanLease("192.168.78.252", "02:00:00:00:00:fc"))
	changed, _ := start()
	if changed >= 15_000 {
		t.Errorf("a restart after two changes receives %d bytes, want less than 15 kB", changed)
	}
	eventually(t, "the peers of the store", func() error {
		if got := metric(t, h, `flannel_peers{state="served"}`); got != 250 {
			return fmt.Errorf("%v peers are served, want 250", got)
		}
		return nil
	})
}
