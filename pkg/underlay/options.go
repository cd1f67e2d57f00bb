package underlay

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"flanneld/pkg/prefix"
)

// Options is what the operator says about the external interface.
type Options struct {
	// Ifaces are interface names or addresses, tried in order.
	Ifaces []string
	// IfaceRegexes are unanchored regular expressions for an address or a
	// name, tried in order after Ifaces.
	IfaceRegexes []string
	// CanReach is an address; the interface that leads to it is tried last.
	CanReach string
	// PublicIP and PublicIPv6 are what peers send to; zero means the
	// interface's own address. One of a family that is not enabled has no
	// effect.
	PublicIP, PublicIPv6 netip.Addr
	// Families are the enabled address families, IPv4 first; never empty.
	Families []prefix.Family
	// Pods are the subnets of the pods here, if they are known. What has an
	// address of them is not the way to peers, unless Ifaces or a public address
	// say so.
	Pods []netip.Prefix
	// InUse is the choice so far, if there is one. Its addresses are not given
	// up for others of the interface that would have been chosen before them.
	InUse Interface
}

func (o Options) check() error {
	switch {
	case len(o.Families) == 0:
		return errors.New("no address family is enabled, want IPv4, IPv6 or both")
	case !slices.IsSorted(o.Families) || len(slices.Compact(slices.Clone(o.Families))) != len(o.Families) ||
		slices.ContainsFunc(o.Families, func(f prefix.Family) bool { return f != prefix.IPv4 && f != prefix.IPv6 }):
		return fmt.Errorf("address families %v: want IPv4, IPv6 or both, IPv4 first", o.Families)
	case o.PublicIP.IsValid() && (!o.PublicIP.Is4() || !isUnicast(o.PublicIP)):
		return fmt.Errorf("--public-ip %s: want an IPv4 unicast address", o.PublicIP)
	case o.PublicIPv6.IsValid() && (!o.PublicIPv6.Is6() || o.PublicIPv6.Is4In6() || o.PublicIPv6.Zone() != "" || !isUnicast(o.PublicIPv6)):
		return fmt.Errorf("--public-ipv6 %s: want an IPv6 unicast address", o.PublicIPv6)
	}
	return nil
}

func isUnicast(a netip.Addr) bool {
	return !a.IsUnspecified() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// named is an address and the option that gave it.
type named struct {
	option string
	addr   netip.Addr
}

func (n named) String() string { return n.option + " " + n.addr.String() }

// public returns the public address of family f; its addr is zero if not given.
func (o Options) public(f prefix.Family) named {
	if f == prefix.IPv4 {
		return named{"--public-ip", o.PublicIP}
	}
	return named{"--public-ipv6", o.PublicIPv6}
}

// asksForInterface reports whether any option names an interface, so that the
// default route has no say. An empty value counts as not given: manifests
// write --iface=$(IFACE).
func (o Options) asksForInterface() bool {
	given := func(v string) bool { return v != "" }
	return slices.ContainsFunc(o.Ifaces, given) || slices.ContainsFunc(o.IfaceRegexes, given) || o.CanReach != ""
}
