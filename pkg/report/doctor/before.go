// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Before is what is known of a host on which no daemon runs yet. The report of its Facts is about a daemon that would
// start now.
type Before struct {
	Findings []Finding // problems that the start of a daemon would have
	// Former are the networks that a daemon has served here before. The host has routes to them.
	Former []netip.Prefix
	Ranges []Range
}

// Range is a range of addresses that the host reaches without flanneld.
type Range struct {
	To  netip.Prefix
	Dev string
	Via netip.Addr // zero if there is no gateway
}

// String describes the range in the form of ip(8).
func (r Range) String() string {
	if r.Via.IsValid() {
		return fmt.Sprintf("%s via %s dev %s", r.To, r.Via, r.Dev)
	}
	return fmt.Sprintf("%s dev %s", r.To, r.Dev)
}

func (h Facts) before(found finder) {
	if h.Before == nil {
		return
	}
	for _, f := range h.Before.Findings {
		found(f)
	}
	h.oldKernel(found)
	h.limits(found)
	h.overlaps(found)
}

// oldKernel checks the version of the kernel.
func (h Facts) oldKernel(found finder) {
	var major, minor int
	if n, _ := fmt.Sscanf(h.release(), "%d.%d", &major, &minor); n == 2 && (major < 4 || major == 4 && minor < 20) {
		found(serious("the kernel is "+h.release()+", and flanneld needs 4.20", "update the kernel"))
	}
}

// limits checks whether a control group limits the memory or the CPU time of the daemon's unit.
func (h Facts) limits(found finder) {
	for version, files := range map[int][]string{
		1: {"memory/system.slice/memory.limit_in_bytes", "cpu/system.slice/cpu.cfs_quota_us"},
		2: {"system.slice/memory.max", "system.slice/memory.high", "system.slice/cpu.max"},
	} {
		var limits []string
		for _, name := range files {
			const none = "9223372036854771712" // of version 1: the greatest number of whole pages
			text, ok := h.text("sys/fs/cgroup/" + name)
			if ok && text != none && text != "-1" && !strings.HasPrefix(text, "max") {
				limits = append(limits, path.Base(name)+" "+text)
			}
		}
		if len(limits) > 0 {
			found(note(fmt.Sprintf("cgroup v%d limits system.slice, in which systemd starts flanneld: %s",
				version, strings.Join(limits, ", ")),
				"systemctl set-property system.slice MemoryMax=infinity CPUQuota=, or compare with sizing.md"))
		}
	}
}

// overlaps checks whether the network takes addresses that are in use already. Routes of flanneld are longer than those
// to a range that contains the network, so the host would lose only a part of that range.
func (h Facts) overlaps(found finder) {
	const choose = "choose another Network, or remove the route if nothing needs it"
	for _, n := range h.Report.Network.Prefixes {
		if slices.Contains(h.Before.Former, n) {
			continue
		}
		for _, r := range h.Before.Ranges {
			switch {
			case !r.To.Overlaps(n) || strings.HasPrefix(r.Dev, "flannel"):
			case prefix.Contains(n, r.To):
				found(serious(fmt.Sprintf("%s is in the network %s: pods of other hosts with these addresses are not reached", r, n), choose))
			default:
				found(note(fmt.Sprintf("the network %s is in %s: hosts there with addresses of pods are not reached", n, r), choose))
			}
		}
	}
}
