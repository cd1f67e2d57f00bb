// SPDX-License-Identifier: Apache-2.0

// Package rpfilter keeps the kernel's reverse path filter (rp_filter) from dropping packets that arrive
// on a device other than the device of the route to their source. If two hosts can reach each other in
// two ways, each host chooses the way of its own packets. So packets may come one way and go the other.
package rpfilter

import (
	"context"
	"os"
	"strings"

	"k8s.io/klog/v2"
)

// With strictFilter as the value of rp_filter, the kernel drops packets that arrive on a device
// other than the device of the route to their source. With looseFilter it drops packets only if
// it has no route to their source.
const (
	strictFilter = "1"
	looseFilter  = "2"
)

// Filter is the reverse path filter on the devices of a network. The zero Filter is usable.
type Filter struct{ logged bool }

// Loosen makes the filter loose on each device in own, flanneld's devices, where it is strict. It ignores
// failures. shared is another device on which packets from peers arrive, or empty. Loosen does not change
// the filter of shared, but logs, once for f, if it is strict. effect is the part of the log message that
// names the consequence.
func (f *Filter) Loosen(ctx context.Context, own []string, shared, effect string) {
	for _, name := range own {
		if strict(name) {
			// If this fails, the kernel drops the packets whose way back leads through another
			// device. Probes are among them.
			_ = os.WriteFile(path(name), []byte(looseFilter), 0)
		}
	}
	if shared != "" && !f.logged && strict(shared) {
		f.logged = true
		klog.FromContext(ctx).Error(nil, "rp_filter is strict: the kernel drops packets of peers that come by another backend than they go, "+effect,
			"device", shared, "remedy", "sysctl -w net/ipv4/conf/"+shared+"/rp_filter=2") // the name may contain a dot
	}
}

func path(device string) string { return "/proc/sys/net/ipv4/conf/" + device + "/rp_filter" }

// strict reports whether the filter of a device is strict. The kernel uses the higher one
// of the values for the device and for all devices.
func strict(device string) bool { return max(read(device), read("all")) == strictFilter }

// read returns the value of rp_filter for a device, or "" if it cannot be read.
func read(device string) string {
	text, _ := os.ReadFile(path(device))
	return strings.TrimSpace(string(text))
}
