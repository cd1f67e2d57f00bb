// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"context"
	"os"
	"strings"

	"k8s.io/klog/v2"
)

// strictFilter is the value of rp_filter with which the kernel drops packets that arrive on
// another device than that of the route back. looseFilter only wants some route back.
const (
	strictFilter = "1"
	looseFilter  = "2"
)

// acceptBoth makes the kernel accept packets from peers on the devices of both backends,
// because each direction between two hosts changes its backend on its own. It leaves other
// devices alone, and logs once if they would drop such packets.
func (n *network) acceptBoth(ctx context.Context) {
	names := n.Scope().Devices
	for _, name := range names {
		if strict(name) {
			// A failure is not worth more: the probes of peers do not come back then, so that
			// they go on by the present backend.
			_ = os.WriteFile(filterPath(name), []byte(looseFilter), 0)
		}
	}
	direct := false
	for _, p := range n.parts {
		direct = direct || len(p.be.Scope().Devices) == 0
	}
	if name := n.env.Underlay.Name; direct && !n.strict && strict(name) {
		n.strict = true
		klog.FromContext(ctx).Error(nil, "rp_filter is strict: the kernel drops packets of peers that come by another backend than they go, so that no peer can migrate",
			"device", name, "remedy", "sysctl -w net.ipv4.conf."+name+".rp_filter=2")
	}
}

func filterPath(device string) string { return "/proc/sys/net/ipv4/conf/" + device + "/rp_filter" }

// strict reports whether the kernel checks strictly on a device. The higher one of the values
// for the device and for all devices counts.
func strict(device string) bool {
	own, all := readFilter(device), readFilter("all")
	return max(own, all) == strictFilter
}

// readFilter returns the value for a device, or "" if it cannot be read.
func readFilter(device string) string {
	text, err := os.ReadFile(filterPath(device))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
