// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"runtime"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// TestKernelAllocations checks that a tunnel allocates memory less than once for ten
// packets that it moves there and back.
func TestKernelAllocations(t *testing.T) {
	l := newTestLab(t, 2, prefix.IPv4)
	e := newEnd(t, l, 1, mode{})
	p := newSinglePeer(t, l, 2, 1, prefix.IPv4)
	request := echo("10.5.2.7", "10.5.1.0", 9)
	buf := make([]byte, 2000)
	exchange := func() {
		_, _ = p.WriteToUDPAddrPort(request, p.to)
		_, _, _ = p.ReadFromUDPAddrPort(buf)
	}
	exchange()
	const n = 2000
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range n {
		exchange()
	}
	runtime.ReadMemStats(&after)
	if per := float64(after.Mallocs-before.Mallocs) / n; per > 0.1 {
		t.Errorf("%.2f allocations for each packet there and back", per)
	}
	if e.Counters.Received() < n {
		t.Errorf("%d packets came in", e.Counters.Received())
	}
}
