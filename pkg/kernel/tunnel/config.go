// SPDX-License-Identifier: Apache-2.0

package tunnel

import "net/netip"

// SourceCheck selects which source addresses a packet from a peer may have. With every
// check, a packet from an unspecified, loopback, multicast or broadcast address is dropped.
type SourceCheck string

// The source checks.
const (
	// CheckStrict accepts a packet only if its datagram comes from the public address
	// and the port of a peer, and its source is in the subnet of a peer with that public
	// address.
	CheckStrict SourceCheck = "strict"
	// CheckNetwork also accepts sources outside of the networks from any peer, because
	// packets that enter the network at a peer may keep their source.
	CheckNetwork SourceCheck = "network"
	// CheckOff accepts any other source from any sender.
	CheckOff SourceCheck = "off"
)

// Config configures a tunnel. All fields except Check are required.
type Config struct {
	// Device is the TUN device. It stays open when the tunnel ends. Only one tunnel at a
	// time may use it.
	Device *Device
	// Local contains the addresses to send from and listen on, at most one per address
	// family. Peers must listen on the same port.
	Local []netip.AddrPort
	// Own contains this host's addresses in the network, one per family. They are the
	// sources of ICMP errors.
	Own []netip.Addr
	// Networks contains the prefixes in which the subnets of all peers are.
	Networks []netip.Prefix
	Check    SourceCheck // empty means CheckNetwork
	Table    *Table
	Counters *Counters
}
