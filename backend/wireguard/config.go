// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// IANA has not assigned a port to WireGuard. These are the customary ones.
const (
	defaultPort   = 51820
	defaultPortV6 = 51821
)

const maxSharingInterval = 86400 // a day, in seconds

// The values of Mode. With separate, each family has its own device. With the other values, one
// device carries both families: ipv4 and ipv6 name the family of its outer packets, and auto
// chooses that family for each peer.
const (
	modeSeparate = "separate"
	modeAuto     = "auto"
	modeIPv4     = "ipv4"
	modeIPv6     = "ipv6"
)

// The values of Implementation.
const (
	implAuto      = "auto"
	implKernel    = "kernel"
	implUserspace = "userspace"
)

// config is the Backend object of the network configuration.
type config struct {
	ListenPort   int // UDP port on which the host receives packets; in mode separate, that of the IPv4 device
	ListenPortV6 int // UDP port of the IPv6 device in mode separate
	// MTU in bytes of the network between the hosts, at most that of the external interface, which 0 means. "probe" is
	// like 0, and each host also finds the MTU of the path to each peer
	MTU     int
	PSK     string // preshared key of all peers, in addition to the key pair of each host
	PSKFile string // path of a file on each host that contains the preshared key; instead of PSK
	// seconds between packets to each peer that make a NAT on the path keep its mapping; 0 means that there
	// are no such packets
	PersistentKeepaliveInterval int
	// separate: a device for each address family; ipv4 or ipv6: one device for both, with outer packets of
	// that family; auto: one device, which uses IPv6 towards a peer if the addresses of both hosts are global
	// and the peer's IPv4 address is private, and otherwise IPv4
	Mode string
	// kernel: the WireGuard of the kernel; userspace: that of flanneld; auto: that of the kernel if it has one
	Implementation string
	// seconds for which an endpoint of a peer behind NAT must be the same before a host publishes it in its lease,
	// and minimum time between two changes of a lease. With 0, hosts neither publish endpoints nor try those of others
	EndpointSharingInterval int
	// backend between hosts of one location, where packets need no encryption
	SameLocation backend.Inner
}

func defaults() config {
	return config{
		ListenPort: defaultPort, ListenPortV6: defaultPortV6, Mode: modeSeparate, Implementation: implAuto,
		EndpointSharingInterval: 120,
	}
}

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return defaults() }

func parseConfig(raw json.RawMessage, env backend.Env) (config, []string, error) {
	c := defaults()
	warnings, err := subnet.DecodeBackend(raw, &c)
	if err != nil {
		return c, nil, err
	}

	for _, n := range []struct {
		key          string
		have, lo, hi int
	}{
		{"ListenPort", c.ListenPort, 1, 65535}, {"ListenPortV6", c.ListenPortV6, 1, 65535}, {"MTU", c.MTU, 0, 65535},
		{"PersistentKeepaliveInterval", c.PersistentKeepaliveInterval, 0, 65535},
		{"EndpointSharingInterval", c.EndpointSharingInterval, 0, maxSharingInterval},
	} {
		if n.have < n.lo || n.have > n.hi {
			return c, nil, fmt.Errorf("Backend.%s is %d: want %d to %d", n.key, n.have, n.lo, n.hi)
		}
	}

	c.Mode = strings.ToLower(c.Mode)
	c.Implementation = strings.ToLower(c.Implementation)
	if modes := []string{modeSeparate, modeAuto, modeIPv4, modeIPv6}; !slices.Contains(modes, c.Mode) {
		return c, nil, fmt.Errorf("Backend.Mode is %q: want one of %s", subnet.Shorten(c.Mode), strings.Join(modes, ", "))
	}
	if impls := []string{implAuto, implKernel, implUserspace}; !slices.Contains(impls, c.Implementation) {
		return c, nil, fmt.Errorf("Backend.Implementation is %q: want one of %s", subnet.Shorten(c.Implementation), strings.Join(impls, ", "))
	}
	if c.PSK != "" && c.PSKFile != "" {
		return c, nil, fmt.Errorf("Backend.PSK and Backend.PSKFile are both set: want one")
	}
	if c.PSK != "" {
		if _, err := wgtypes.ParseKey(c.PSK); err != nil { // the error's text would contain the key
			return c, nil, fmt.Errorf("Backend.PSK is no key: want 32 bytes in base64, as wg genpsk makes them")
		}
	}
	return c, warnings, c.check(env)
}

// check returns an error if the Mode, the ports or the MTU do not fit this network.
func (c config) check(env backend.Env) error {
	have := families(env)
	if c.Mode == modeSeparate && len(have) == 2 && c.ListenPort == c.ListenPortV6 {
		return fmt.Errorf("Backend.ListenPort and Backend.ListenPortV6 are both %d: want different ports for two devices", c.ListenPort)
	}

	for mode, f := range map[string]prefix.Family{modeIPv4: prefix.IPv4, modeIPv6: prefix.IPv6} {
		if c.Mode == mode && !slices.Contains(have, f) {
			return fmt.Errorf("Backend.Mode is %q, but the network has no %s", c.Mode, f)
		}
	}

	for _, t := range c.tunnels(env.Network, have) {
		if mtu := c.deviceMTU(env.Underlay.MTU, t); mtu < t.minMTU() {
			return fmt.Errorf("the underlay MTU (Backend.MTU %d, %s %d) leaves %d bytes inside %s: want at least %d",
				c.MTU, env.Underlay.Name, env.Underlay.MTU, mtu, t.name, t.minMTU())
		}
	}
	return nil
}

func families(env backend.Env) []prefix.Family {
	var fs []prefix.Family
	for _, n := range env.Config.Networks {
		fs = append(fs, n.Family())
	}
	return fs
}

// psk returns zero if no preshared key is configured.
func (c config) psk() (wgtypes.Key, error) {
	text := c.PSK
	if c.PSKFile != "" {
		raw, err := os.ReadFile(c.PSKFile)
		if err != nil {
			return wgtypes.Key{}, fmt.Errorf("read Backend.PSKFile: %w", err)
		}
		text = strings.TrimSpace(string(raw))
	}
	if text == "" && c.PSKFile == "" {
		return wgtypes.Key{}, nil
	}

	key, err := wgtypes.ParseKey(text)
	if err != nil { // the error's text would contain the key
		return key, fmt.Errorf("Backend.PSKFile %s holds no key: want 32 bytes in base64, as wg genpsk makes them", c.PSKFile)
	}
	return key, nil
}

// tunnel describes a device.
type tunnel struct {
	name     string          // that of upstream flannel's device, if the process serves only one network
	port     int             // UDP port that it listens on
	families []prefix.Family // families of the packets inside the tunnel
	outer    []prefix.Family // families of the outer packets
}

// tunnels returns the devices of a network with these families. network is empty if the process serves
// only one.
func (c config) tunnels(network string, have []prefix.Family) []tunnel {
	name := func(base string, port int) string {
		if network == "" {
			return base
		}
		return fmt.Sprintf("flannel-wg%d", port)
	}

	if c.Mode != modeSeparate {
		outer := map[string][]prefix.Family{modeAuto: have, modeIPv4: {prefix.IPv4}, modeIPv6: {prefix.IPv6}}[c.Mode]
		return []tunnel{{name: name("flannel-wg", c.ListenPort), port: c.ListenPort, families: have, outer: outer}}
	}

	var ts []tunnel
	for _, f := range have {
		t := tunnel{name: name("flannel-wg", c.ListenPort), port: c.ListenPort, families: []prefix.Family{f}, outer: []prefix.Family{f}}
		if f == prefix.IPv6 {
			t.name = name("flannel-wg-v6", c.ListenPortV6)
			t.port = c.ListenPortV6
		}
		ts = append(ts, t)
	}
	return ts
}

// overhead is what encapsulation adds to a packet at most, in bytes.
func (t tunnel) overhead() int {
	const udp, wireguard = 8, 32
	return map[prefix.Family]int{prefix.IPv4: 20, prefix.IPv6: 40}[slices.Max(t.outer)] + udp + wireguard
}

func (t tunnel) minMTU() int { return slices.Max(t.families).MinMTU() }

func (c config) deviceMTU(link int, t tunnel) int {
	if c.MTU != 0 {
		link = min(link, c.MTU)
	}
	return link - t.overhead()
}
