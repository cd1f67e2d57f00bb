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

// sourceCheck makes the kernel accept packets from peers by either backend, because each
// direction between two hosts changes its backend on its own.
type sourceCheck struct{ logged bool }

// loosen makes the check of own devices loose if it is strict. It leaves shared, another device on
// which packets from peers arrive, as it is, and logs once if its check is strict. shared may be
// empty.
func (c *sourceCheck) loosen(ctx context.Context, own []string, shared string) {
	for _, name := range own {
		if strict(name) {
			// If this fails, the probes of peers do not come back, so that they go on by the
			// present backend.
			_ = os.WriteFile(filterPath(name), []byte(looseFilter), 0)
		}
	}
	if shared != "" && !c.logged && strict(shared) {
		c.logged = true
		klog.FromContext(ctx).Error(nil, "rp_filter is strict: the kernel drops packets of peers that come by another backend than they go, so that no peer can migrate",
			"device", shared, "remedy", "sysctl -w net.ipv4.conf."+shared+".rp_filter=2")
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
