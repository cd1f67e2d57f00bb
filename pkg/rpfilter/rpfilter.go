// SPDX-License-Identifier: Apache-2.0

// Package rpfilter keeps the kernel's reverse path filter (rp_filter) from dropping packets that arrive
// on another device than that of the route back. Two hosts that can reach each other by two ways change
// the way of each direction on their own, so packets may come by one way and go by the other.
package rpfilter

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

// Filter is the reverse path filter on the devices of a network. The zero Filter is usable.
type Filter struct{ logged bool }

// Loosen makes the filter of own devices loose if it is strict. It leaves shared, another device on
// which packets from peers arrive, as it is, and logs once if its filter is strict. effect is what follows
// from that. shared may be empty.
func (f *Filter) Loosen(ctx context.Context, own []string, shared, effect string) {
	for _, name := range own {
		if strict(name) {
			// If this fails, packets that come by the other way are lost, probes too.
			_ = os.WriteFile(path(name), []byte(looseFilter), 0)
		}
	}
	if shared != "" && !f.logged && strict(shared) {
		f.logged = true
		klog.FromContext(ctx).Error(nil, "rp_filter is strict: the kernel drops packets of peers that come by another backend than they go, "+effect,
			"device", shared, "remedy", "sysctl -w net.ipv4.conf."+shared+".rp_filter=2")
	}
}

func path(device string) string { return "/proc/sys/net/ipv4/conf/" + device + "/rp_filter" }

// strict reports whether the kernel checks strictly on a device. The higher one of the values
// for the device and for all devices counts.
func strict(device string) bool {
	own, all := read(device), read("all")
	return max(own, all) == strictFilter
}

// read returns the value for a device, or "" if it cannot be read.
func read(device string) string {
	text, err := os.ReadFile(path(device))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
