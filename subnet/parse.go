// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// wireConfig is the configuration as stored. Addresses stay raw, because null
// and absent mean different things.
type wireConfig struct {
	EnableIPv4     bool // pods have IPv4 addresses
	EnableIPv6     bool // pods have IPv6 addresses
	EnableNFTables bool // traffic rules are in nftables instead of iptables

	// destinations outside of the network that get packets with the address of the pod, and not with
	// that of its host
	NonMasqueradeCIDRs []string

	Network   json.RawMessage // range of the IPv4 addresses of all pods; required with IPv4
	SubnetLen uint16          // prefix length of each host's IPv4 subnet; 0 means that flanneld derives it from Network
	SubnetMin json.RawMessage // base address of the first IPv4 subnet that a host can get; derived from Network if absent
	SubnetMax json.RawMessage // base address of the last IPv4 subnet that a host can get; derived from Network if absent

	IPv6Network   json.RawMessage // range of the IPv6 addresses of all pods; required with IPv6
	IPv6SubnetLen uint16          // prefix length of each host's IPv6 subnet; 0 means that flanneld derives it from IPv6Network
	IPv6SubnetMin json.RawMessage // base address of the first IPv6 subnet that a host can get; derived from IPv6Network if absent
	IPv6SubnetMax json.RawMessage // base address of the last IPv6 subnet that a host can get; derived from IPv6Network if absent

	// how packets travel between hosts: an object with the Type of a backend and its keys; udp if absent
	Backend json.RawMessage
	// backend to which the network migrates, in the form of Backend; absent if there is no migration
	NextBackend json.RawMessage
}

// Defaults returns the keys of the network configuration with their defaults, as a struct. The
// reference of the documentation is generated from it and from the comments of its fields.
func Defaults() any { return defaults() }

func defaults() wireConfig { return wireConfig{EnableIPv4: true} }

// wireNetwork is the part of a wireConfig that belongs to one address family.
type wireNetwork struct {
	family    prefix.Family
	enabled   bool
	network   json.RawMessage
	subnetLen uint16
	min, max  json.RawMessage // with IPv6 null means absent
}

func (w wireConfig) networks() []wireNetwork {
	return []wireNetwork{
		{prefix.IPv4, w.EnableIPv4, w.Network, w.SubnetLen, w.SubnetMin, w.SubnetMax},
		{prefix.IPv6, w.EnableIPv6, w.IPv6Network, w.IPv6SubnetLen, w.IPv6SubnetMin, w.IPv6SubnetMax},
	}
}

// ParseConfig decodes the network configuration. An error is one line and wraps ErrInvalidConfig; the
// Config then has only Warnings. Network.Pool, not ParseConfig, checks whether a network can be divided
// into subnets, because not every store needs that.
func ParseConfig(raw []byte) (Config, error) {
	w := defaults()
	if err := decodeObject(raw, &w); err != nil {
		return Config{}, invalid("%w", err)
	}

	warnings := keyWarnings(raw, fieldNames(&w)...)
	cfg, err := w.config()
	if err != nil {
		return Config{Warnings: warnings}, invalid("%w", err)
	}
	cfg.Warnings = warnings
	return cfg, nil
}

func (w wireConfig) config() (cfg Config, err error) {
	cfg = Config{NFTables: w.EnableNFTables, BackendType: "udp", Backend: w.Backend}
	for _, s := range w.NonMasqueradeCIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Addr().Is4In6() {
			return cfg, fmt.Errorf("NonMasqueradeCIDRs: %q is not a CIDR (want for example %q)", Shorten(s), example(prefix.IPv4))
		}
		cfg.NonMasquerade = append(cfg.NonMasquerade, p.Masked())
	}

	for _, n := range w.networks() {
		network, err := n.parse()
		switch {
		case err != nil:
			return cfg, err
		case !n.enabled:
			continue
		case !network.Prefix.IsValid():
			return cfg, w.missing(n.family)
		}

		for _, r := range unroutable {
			if prefix.Contains(r.Prefix, network.Prefix) {
				return cfg, fmt.Errorf("%s: %s is %s and reaches no other host: want another range, for example %q",
					keyName(n.family, "Network"), network.Prefix, r.use, example(n.family))
			}
		}
		cfg.Networks = append(cfg.Networks, network)
	}
	if len(cfg.Networks) == 0 {
		return cfg, errors.New("no address family is enabled: EnableIPv4 and EnableIPv6 are both false")
	}

	if w.Backend != nil {
		if cfg.BackendType, err = backendType("Backend", w.Backend); err != nil {
			return cfg, err
		}
	}
	if w.NextBackend != nil && !isNull(w.NextBackend) {
		if cfg.NextType, err = backendType("NextBackend", w.NextBackend); err != nil {
			return cfg, err
		}
		if cfg.NextType == "" {
			return cfg, errors.New("NextBackend has no Type: want an object with the Type of the backend to migrate to")
		}
		cfg.NextBackend = w.NextBackend
	}
	return cfg, nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrInvalidConfig, fmt.Errorf(format, args...))
}

func (w wireConfig) missing(f prefix.Family) error {
	if f == prefix.IPv4 && w.IPv6Network != nil {
		return errors.New("please define a correct Network parameter, or set EnableIPv4 to false for IPv6 alone")
	}
	return fmt.Errorf("please define a correct %s parameter", keyName(f, "Network"))
}

func (n wireNetwork) parse() (out Network, err error) {
	out.SubnetLen = int(n.subnetLen)
	if n.network != nil {
		if out.Prefix, err = parseNetwork(n.family, n.network); err != nil {
			return out, err
		}
	}

	if out.Min, err = decodeAddr(n.family, "SubnetMin", n.min); err != nil {
		return out, err
	}
	out.Max, err = decodeAddr(n.family, "SubnetMax", n.max)
	return out, err
}

// parseNetwork parses the Network of family f from JSON, and masks it. A network of length 0 means
// that there is none: the result is then the zero prefix.
func parseNetwork(f prefix.Family, raw json.RawMessage) (netip.Prefix, error) {
	key := keyName(f, "Network")
	s, err := decodeString(key, raw)
	if err != nil {
		return netip.Prefix{}, err
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || !ofFamily(f, p.Addr()) {
		return netip.Prefix{}, fmt.Errorf("%s: invalid %s CIDR format: %q (want for example %q)",
			key, f, Shorten(s), example(f))
	}
	if p.Bits() == 0 {
		return netip.Prefix{}, nil
	}
	return p.Masked(), nil
}

// unroutable contains the ranges whose addresses mean no single host, or are valid on one host or one link
// alone (RFC 6890).
var unroutable = []rangeInUse{
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("::1/128"), "loopback"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
}

// rangeInUse is a range that hosts must not get subnets of.
type rangeInUse struct {
	netip.Prefix
	use string
}

// decodeAddr decodes the address of family f that is the JSON value of a key, which has that name with IPv4. The
// addresses 0.0.0.0 and :: mean that there is none, like an absent value: the result is then the zero address.
func decodeAddr(f prefix.Family, name string, raw json.RawMessage) (netip.Addr, error) {
	if raw == nil || f == prefix.IPv6 && isNull(raw) {
		return netip.Addr{}, nil
	}
	key := keyName(f, name)
	s, err := decodeString(key, raw)
	if err != nil {
		return netip.Addr{}, err
	}
	a, err := ParseAddr(f, s)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%s: %w", key, err)
	}
	if a.IsUnspecified() {
		return netip.Addr{}, nil
	}
	return a, nil
}

// ParseAddr parses an address of family f. An address with a zone is an error.
func ParseAddr(f prefix.Family, text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil || !ofFamily(f, a) || a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is not an %s address", Shorten(text), f)
	}
	return a, nil
}

// ofFamily reports whether a belongs to family f. An IPv4-mapped IPv6 address belongs to neither
// family.
func ofFamily(f prefix.Family, a netip.Addr) bool {
	return prefix.FamilyOf(a) == f && !a.Is4In6()
}

// backendType returns the Type in the object raw in lower case, and "" if raw is null or has no
// Type. raw is the value of key.
func backendType(key string, raw json.RawMessage) (string, error) {
	var b struct{ Type string }
	if isNull(raw) {
		return "", nil
	}
	if err := decodeObject(raw, &b); err != nil {
		return "", fmt.Errorf("%s: %w", key, err)
	}
	return Shorten(strings.ToLower(b.Type)), nil // no backend has such a long type
}

// keyName returns the key of the configuration of family f: "Network" becomes "IPv6Network" for IPv6,
// and stays the same for IPv4.
func keyName(f prefix.Family, name string) string {
	if f == prefix.IPv6 {
		return "IPv6" + name
	}
	return name
}

func example(f prefix.Family) string {
	if f == prefix.IPv6 {
		return "fd00:10:5::/48"
	}
	return "10.5.0.0/16"
}
