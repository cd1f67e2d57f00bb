package tunnel

import "sync/atomic"

// Reason is why a packet was dropped.
type Reason uint8

// The reasons. What comes from the device is outbound, what comes in datagrams
// inbound.
const (
	NoRoute          Reason = iota // outbound: to no peer's subnet
	TooBig                         // outbound: for the way to the peer, and not to be fragmented
	SendFailed                     // outbound: the kernel did not take the datagram
	HopsExceeded                   // either way: no hops left
	OtherFamily                    // either way: the network does not have this address family
	Malformed                      // either way: too short, or a header that contradicts itself
	WrongChecksum                  // inbound: of the IPv4 header
	UnknownPeer                    // inbound: the datagram comes from no peer's public address
	WrongPort                      // inbound: the datagram comes from a peer's address, but not from the peers' port
	WrongSource                    // either way: the source is not one that the sender may have
	WrongDestination               // inbound: the destination is a loopback, multicast, broadcast or unspecified address
	DeviceFailed                   // inbound: the device did not take the packet
	SocketFull                     // inbound: the socket had no room; what came in together counts once
	reasons
)

// String returns the reason as metrics have it.
func (r Reason) String() string {
	names := [reasons]string{
		"no_route", "too_big", "send_failed", "hops_exceeded", "other_family",
		"malformed", "wrong_checksum", "unknown_peer", "wrong_port", "wrong_source", "wrong_destination", "device_failed", "socket_full",
	}
	if r < reasons {
		return names[r]
	}
	return "unknown"
}

// Counters count packets. They may be read at any time, and outlive the
// tunnels that feed them.
type Counters struct {
	sent, received atomic.Uint64
	dropped        [reasons]atomic.Uint64
}

// Sent returns how many packets went out in datagrams.
func (c *Counters) Sent() uint64 { return c.sent.Load() }

// Received returns how many packets from datagrams went into the device.
func (c *Counters) Received() uint64 { return c.received.Load() }

// Dropped returns how many packets were dropped, for each reason there is.
func (c *Counters) Dropped() map[string]uint64 {
	all := make(map[string]uint64, reasons)
	for r := range reasons {
		all[r.String()] = c.dropped[r].Load()
	}
	return all
}

func (c *Counters) drop(r Reason) { c.dropped[r].Add(1) }
