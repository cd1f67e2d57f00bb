// SPDX-License-Identifier: Apache-2.0

package tunnel

import "sync/atomic"

// Reason is the reason why a packet was dropped.
type Reason uint8

// The reasons. Packets from the device are outbound, packets in datagrams inbound.
const (
	NoRoute          Reason = iota // outbound: the destination is in no peer's subnet
	TooBig                         // outbound: larger than the path to the peer allows, and fragmentation is forbidden
	SendFailed                     // outbound: the kernel did not accept the datagram
	HopsExceeded                   // both directions: the hop limit is used up
	OtherFamily                    // outbound: the tunnel has no socket of this family; inbound: the packet and its datagram have different families
	Malformed                      // both directions: too short, or a header that contradicts itself
	WrongChecksum                  // inbound: wrong checksum of the IPv4 header
	UnknownPeer                    // inbound: the datagram's source is not the public address of a peer
	WrongPort                      // inbound: the datagram's source is the address of a peer, but not the port of peers
	WrongSource                    // both directions: the sender may not use the source address
	WrongDestination               // inbound: the destination is a loopback, multicast, broadcast or unspecified address
	DeviceFailed                   // inbound: the device did not accept the packet
	SocketFull                     // inbound: the socket's buffer was full; datagrams that the kernel had combined count once
	reasons
)

// String returns the name of the reason in metrics.
func (r Reason) String() string {
	return [reasons]string{
		"no_route", "too_big", "send_failed", "hops_exceeded", "other_family",
		"malformed", "wrong_checksum", "unknown_peer", "wrong_port", "wrong_source", "wrong_destination", "device_failed", "socket_full",
	}[r]
}

// Counters counts packets. It may be read at any time, and outlives the tunnels that use
// it.
type Counters struct {
	sent, received atomic.Uint64
	dropped        [reasons]atomic.Uint64
}

// Sent returns the number of packets that were sent in datagrams. A packet that was sent in
// fragments counts once.
func (c *Counters) Sent() uint64 { return c.sent.Load() }

// Received returns the number of packets that were written to the device.
func (c *Counters) Received() uint64 { return c.received.Load() }

// Dropped returns the number of dropped packets for each reason, by the reason's name.
// It includes the reasons that have not occurred.
func (c *Counters) Dropped() map[string]uint64 {
	all := make(map[string]uint64, reasons)
	for r := range reasons {
		all[r.String()] = c.dropped[r].Load()
	}
	return all
}

// drop counts a packet, and returns that it has not passed.
func (c *Counters) drop(r Reason) (passed bool) {
	c.dropped[r].Add(1)
	return false
}
