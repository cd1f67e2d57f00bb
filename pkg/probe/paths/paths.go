// SPDX-License-Identifier: Apache-2.0

// Package paths checks the paths from this host to its peers, and names the part of a path that does
// not work.
//
//   - diagnosis.go checks one path, for flannelctl check and for a path that has failed a probe.
//   - prober.go probes the paths to all peers, a few packets a second, for the daemon.
//   - direction.go finds out in which direction a path fails.
//   - limit.go divides these packets among the probers of several networks.
//   - outcome.go has the results of the prober.
//
// Nothing here acts on a result: a path that does not work is only reported.
package paths

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Path is the way from this host to one subnet of a peer.
type Path struct {
	Subnet   netip.Prefix `json:"subnet"`
	PublicIP netip.Addr   `json:"publicIP"` // of the peer
}

// Network describes how packets get to peers.
type Network struct {
	BackendType string
	MTU         int   // of the network in bytes
	Devices     bool  // the backend has devices, and so each peer has an address in the network
	Ports       []int // UDP ports of the backend
	// PathMTU returns the MTU in bytes of the path to a subnet, if that is known to be smaller than MTU, and
	// otherwise 0. PathMTU may be nil.
	PathMTU func(subnet netip.Prefix) int
}

func (n Network) mtu(p Path) int {
	if n.PathMTU != nil {
		if own := n.PathMTU(p.Subnet); own > 0 {
			return min(own, n.MTU)
		}
	}
	return n.MTU
}

// Part is a part of a path.
type Part string

// The parts of a path, from the outside to the inside.
const (
	Underlay Part = "underlay" // from host to host
	Tunnel   Part = "network"  // from network to network, small packets
	MTU      Part = "mtu"      // packets of the full MTU
	Checksum Part = "checksum" // TCP
	Unknown  Part = "unknown"  // it is not known whether a part is broken: the host answers, but may have no pods that answer, or hides its addresses, or ctx ended before the check did
)

// Parts returns the parts that can be broken.
func Parts() []Part { return []Part{Underlay, Tunnel, MTU, Checksum} }

// Verdict is the result of a check of one path. Its JSON, and that of Path, Result and Outcome, are parts of a stable
// interface, that of status.Report.
type Verdict struct {
	OK      bool    `json:"ok"`
	RTT     float64 `json:"rttMilliseconds,omitempty"` // of a packet in the network; zero if there was no answer
	Broken  Part    `json:"broken,omitempty"`          // the part that does not work; empty if OK
	Largest int     `json:"largest,omitempty"`         // size in bytes of the largest packet that passes, if Broken is MTU
	Advice  string  `json:"advice,omitempty"`          // one line for operators
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Result returns ok, the part that does not work, or unknown.
func (v Verdict) Result() string {
	if v.OK {
		return "ok"
	}
	return string(cmp.Or(v.Broken, Unknown))
}

// RoundTrip returns the time of a round trip, or "" if it is not known.
func (v Verdict) RoundTrip() string {
	if v.RTT <= 0 {
		return ""
	}
	return fmt.Sprintf("%.2f ms", v.RTT)
}

// end returns the address in the network at which the host of subnet s answers. This is the address of the
// host's tunnel device, which is the first address of the subnet. With a backend without a device it is the
// address of the pods' bridge, which is the second one.
func (n Network) end(s netip.Prefix) netip.Addr {
	if !n.Devices {
		return prefix.First(s)
	}
	return s.Masked().Addr()
}

// packets describes the packets that a firewall must let through.
func (n Network) packets() string {
	if len(n.Ports) == 0 {
		return n.BackendType
	}
	return n.BackendType + ": UDP " + strings.Trim(fmt.Sprint(n.Ports), "[]")
}
