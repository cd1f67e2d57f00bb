// Package status is what a daemon tells about itself to a person: the report,
// its JSON and its page, the journal of recent events, and the local socket
// that serves them.
package status

import (
	"net/netip"
	"time"
)

// Report is one look at a daemon. Its JSON is an interface: names stay, new
// ones may come. A zero time means never.
type Report struct {
	Version string    `json:"version"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	Now     time.Time `json:"now"`

	// Ready says what /readyz says, and Reasons why not, one line each.
	Ready   bool     `json:"ready"`
	Reasons []string `json:"reasons,omitempty"`
	// RestartNeeded says what about the configuration has changed since the
	// start; empty if nothing has.
	RestartNeeded string `json:"restartNeeded,omitempty"`

	Network   Network   `json:"network"`
	Interface Interface `json:"interface"`
	Lease     Lease     `json:"lease"`
	Datastore Datastore `json:"datastore"`
	Firewall  Firewall  `json:"firewall"`
	Kernel    Kernel    `json:"kernel"`
	Peers     []Peer    `json:"peers"`
	Events    []Event   `json:"events"` // oldest first
}

// Network is the network configuration in use.
type Network struct {
	BackendType string         `json:"backendType"`
	Mode        string         `json:"mode,omitempty"` // of the backend, where it has several ways to carry packets
	Prefixes    []netip.Prefix `json:"prefixes"`
	MTU         int            `json:"mtu"`               // bytes, of every path
	Devices     []string       `json:"devices,omitempty"` // of the backend; host-gw, alloc and extension have none
	Ports       []int          `json:"ports,omitempty"`   // UDP, that peers send to
	SubnetFile  string         `json:"subnetFile"`
	Pool        *Pool          `json:"pool,omitempty"` // nil where the store hands out no subnets
}

// Pool counts the subnets of the range that hosts get theirs from: of the
// address family that has the least left, if there are two.
type Pool struct {
	Free     uint64 `json:"free"`
	Leased   uint64 `json:"leased"`
	Reserved uint64 `json:"reserved"`
}

// Interface is the external interface, and why it was chosen.
type Interface struct {
	Name      string    `json:"name"`
	Index     int       `json:"index"`
	MTU       int       `json:"mtu"` // bytes
	Reason    string    `json:"reason"`
	Addresses []Address `json:"addresses"`
}

// Address is an address of the interface and the one that peers send to.
type Address struct {
	Local  netip.Addr `json:"local"`
	Public netip.Addr `json:"public"`
}

// Lease is the own lease, or a peer's.
type Lease struct {
	Key       string         `json:"key"`
	Subnets   []netip.Prefix `json:"subnets"`
	PublicIPs []netip.Addr   `json:"publicIPs"`
	Type      string         `json:"type,omitempty"`
	Permanent bool           `json:"permanent,omitempty"` // a reservation, or a node's own podCIDR
	Expires   time.Time      `json:"expires,omitzero"`    // own lease only
}

// Datastore is the store that leases are agreed in.
type Datastore struct {
	Kind      string    `json:"kind"` // etcd or kubernetes
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since,omitzero"` // of Connected as it is
	Error     string    `json:"error,omitempty"`
}

// Firewall is the state of masquerade and forward rules.
type Firewall struct {
	Kind  string `json:"kind"`            // iptables or nftables; empty: not chosen yet or, without an Error, no rules asked for
	Error string `json:"error,omitempty"` // why the rules are not in place
}

// Kernel is what the data path holds in the kernel.
type Kernel struct {
	LastSync time.Time `json:"lastSync,omitzero"` // the last that succeeded
	Error    string    `json:"error,omitempty"`
	// Objects counts what is wanted and what is there, by kind: link, address,
	// neighbour, fdb, route.
	Objects map[string]Count `json:"objects,omitempty"`
}

// Count is a number of kernel objects.
type Count struct {
	Wanted  int `json:"wanted"`
	Present int `json:"present"`
}

// State says how a peer is served.
type State string

// The states of a peer.
const (
	InPlace State = "in place"
	Missing State = "missing" // not everything is in the kernel
	Held    State = "held"    // served, though the store has forgotten it
	Refused State = "refused"
)

// Peer is another node as this one sees it.
type Peer struct {
	Lease
	State   State     `json:"state"`
	Error   string    `json:"error,omitempty"`
	Changed time.Time `json:"changed,omitzero"`  // since when the lease is as it is
	Objects []Object  `json:"objects,omitempty"` // what the kernel should hold for it
}

// Object is a kernel object, written as ip(8) would.
type Object struct {
	Text    string `json:"text"`
	Present bool   `json:"present"`
}

// Event is something that happened, as the log has it.
type Event struct {
	Time  time.Time `json:"time"`
	Error bool      `json:"error,omitempty"`
	Text  string    `json:"text"`
}
