// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/tunnel"
	"github.com/flanneld/flanneld/subnet"
)

const defaultPort = 8285

// deviceName is the name of the device if the process serves one network. flannel creates
// flannel%d, for which the kernel chooses the first free number.
const deviceName = "flannel0"

// config is the Backend object of the network configuration.
type config struct {
	Port int    // UDP port on which all hosts receive packets
	Mode string // userspace: flanneld carries the packets. The other values of earlier versions, kernel and auto, mean the same
}

func defaults() config { return config{Port: defaultPort, Mode: modeUserspace} }

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return defaults() }

const modeUserspace = "userspace"

func parseConfig(raw json.RawMessage, env backend.Env) (config, []string, error) {
	c := defaults()
	warnings, err := subnet.DecodeBackend(raw, &c)
	if err != nil {
		return c, nil, err
	}
	if c.Port < 1 || c.Port > 65535 {
		return c, nil, fmt.Errorf("Backend.Port is %d: want 1 to 65535", c.Port)
	}

	switch mode := strings.ToLower(c.Mode); mode {
	case "", modeUserspace:
	case "auto", "kernel":
		warnings = append(warnings, fmt.Sprintf("Backend.Mode is %q, which means userspace: the kernel path no longer exists", mode))
	default:
		return c, nil, fmt.Errorf("Backend.Mode is %q: want userspace", subnet.Shorten(c.Mode))
	}

	c.Mode = modeUserspace
	for _, n := range env.Config.Networks {
		f := n.Family()
		if mtu := mtu(env); mtu < f.MinMTU() {
			return c, nil, fmt.Errorf("%s has an MTU of %d, which leaves %d bytes inside udp: %s needs %d",
				env.Underlay.Name, env.Underlay.MTU, mtu, f, f.MinMTU())
		}
	}
	return c, warnings, nil
}

// mtu is that of the one device of all families, so the longest outer header counts.
func mtu(env backend.Env) int {
	return env.MTU(func(f prefix.Family) int { return env.Underlay.MTU - tunnel.Overhead(f == prefix.IPv6) })
}
