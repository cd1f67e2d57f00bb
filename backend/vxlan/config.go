// SPDX-License-Identifier: Apache-2.0

package vxlan

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/subnet"
)

const (
	defaultVNI  = 1
	defaultPort = 8472 // the Linux kernel's default, which is older than the IANA port 4789
	maxVNI      = 1<<24 - 1
	maxName     = 15 // maximum characters of a device name (IFNAMSIZ without the closing zero)
)

// config is the Backend object of the network configuration.
type config struct {
	VNI  int // VXLAN network identifier, which is also the number in the device's name
	Port int // UDP port on which all hosts receive packets; 0 means 8472, the kernel's default
	// MTU in bytes of the network between the hosts, at most that of the external interface, which 0 means. "probe" is
	// like 0, and each host also finds the MTU of the path to each peer
	MTU int
	GBP bool // group-based policy extension of VXLAN; must be the same on all hosts
	// the device also learns from packets which host has a MAC address; not needed
	Learning      bool
	DirectRouting bool // plain routes, without the tunnel, to peers on the same network as this host
	// where checksums are computed: by the network card (on), by the host's CPU (off), or as the kernel
	// decides (auto)
	ChecksumOffload string
}

func defaults() config {
	return config{VNI: defaultVNI, Port: defaultPort, ChecksumOffload: "auto"}
}

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return defaults() }

func parseConfig(raw json.RawMessage, env backend.Env) (config, []string, error) {
	c := defaults()
	// MacPrefix and Name have a meaning on other operating systems only.
	warnings, err := subnet.DecodeBackend(raw, &c, "MacPrefix", "Name")
	if err != nil {
		return c, nil, err
	}
	if c.VNI < 0 || c.VNI > maxVNI {
		return c, nil, fmt.Errorf("Backend.VNI is %d: want 0 to %d (24 bits)", c.VNI, maxVNI)
	}
	if c.Port < 0 || c.Port > 65535 {
		return c, nil, fmt.Errorf("Backend.Port is %d: want 0 (%d) to 65535", c.Port, defaultPort)
	}
	c.Port = cmp.Or(c.Port, defaultPort)

	if c.MTU < 0 || c.MTU > 65535 {
		return c, nil, fmt.Errorf("Backend.MTU is %d: want 0 (that of the external interface) to 65535", c.MTU)
	}
	if _, ok := c.txChecksum(); !ok {
		return c, nil, fmt.Errorf("Backend.ChecksumOffload is %q: want auto, on or off", subnet.Shorten(c.ChecksumOffload))
	}

	for _, n := range env.Config.Networks {
		f := n.Family()
		if name := c.deviceName(f); len(name) > maxName {
			return c, nil, fmt.Errorf("Backend.VNI is %d: the device for %s would be %s, and a name has at most %d characters", c.VNI, f, name, maxName)
		}
		if mtu := c.deviceMTU(env.Underlay.MTU, f); mtu < f.MinMTU() {
			return c, nil, fmt.Errorf("the underlay MTU %d (Backend.MTU %d, %s %d) leaves %d bytes inside vxlan: %s needs %d",
				mtu+overhead(f), c.MTU, env.Underlay.Name, env.Underlay.MTU, mtu, f, f.MinMTU())
		}
	}
	return c, warnings, nil
}

// txChecksum decodes ChecksumOffload. ok is false for an unknown value.
func (c config) txChecksum() (o dataplane.Offload, ok bool) {
	o, ok = map[string]dataplane.Offload{
		"": dataplane.OffloadAuto, "auto": dataplane.OffloadAuto, "on": dataplane.OffloadOn, "off": dataplane.OffloadOff,
	}[strings.ToLower(c.ChecksumOffload)]
	return o, ok
}

// overhead is what encapsulation adds to a packet, in bytes.
func overhead(f prefix.Family) int {
	const inner = 8 + 8 + 14 // UDP, VXLAN (RFC 7348), and the Ethernet header of the packet inside
	if f == prefix.IPv6 {
		return 40 + inner
	}
	return 20 + inner
}

// deviceMTU is the MTU of the device for family f on an underlay link whose MTU is link. Without
// Backend.MTU it is the largest one that the kernel accepts.
func (c config) deviceMTU(link int, f prefix.Family) int {
	if c.MTU != 0 {
		link = min(link, c.MTU)
	}
	return link - overhead(f)
}

// deviceName is the same in other flannel daemons.
func (c config) deviceName(f prefix.Family) string {
	if f == prefix.IPv6 {
		return fmt.Sprintf("flannel-v6.%d", c.VNI)
	}
	return fmt.Sprintf("flannel.%d", c.VNI)
}
