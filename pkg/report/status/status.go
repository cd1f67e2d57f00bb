// SPDX-License-Identifier: Apache-2.0

// Package status describes a running daemon to an operator: the report, its JSON and its
// web page, the journal of recent events, and the local socket that serves them.
package status

import (
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/flanneld/flanneld/pkg/base/version"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/probe/paths"
)

// Report describes a daemon at one moment. Its JSON is a stable interface: fields may be
// added, but are not renamed or removed. A zero time means never.
type Report struct {
	Host    string    `json:"host"` // its name
	Version string    `json:"version"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	Now     time.Time `json:"now"`

	// Ready is the answer of /readyz. Reasons says why it is false, one line each.
	Ready   bool     `json:"ready"`
	Reasons []string `json:"reasons,omitempty"`
	// RestartNeeded describes a difference between the configuration in the store and the one in use
	// that only a restart applies, or why the one in the store cannot be used. If the store has no
	// configuration, it says so. It is empty if there is no difference, or if the daemon follows changes
	// without a restart.
	RestartNeeded string `json:"restartNeeded,omitempty"`
	// ConfigRejected says why this host continues with its present configuration, because the one in the
	// store cannot be used. It is empty if the one in the store can be used.
	ConfigRejected string `json:"configRejected,omitempty"`

	Network   Network   `json:"network"`
	Interface Interface `json:"interface"`
	Lease     Lease     `json:"lease"`
	Datastore Datastore `json:"datastore"`
	Firewall  Firewall  `json:"firewall"`
	Kernel    Kernel    `json:"kernel"`
	Peers     []Peer    `json:"peers"`
	// SharedPublicIPs are the public addresses that several peers have. All these peers are served.
	SharedPublicIPs []SharedPublicIP `json:"sharedPublicIPs,omitempty"`
	// Paths are the results of probes: of the 20 worst paths or, with Query.AllPaths, of all that were checked. It is
	// nil without --probe.
	Paths *paths.Outcome `json:"paths,omitempty"`
	// Networks is the overview of several networks, sorted by name. In an overview the fields that
	// are about one network are empty.
	Networks []NetworkSummary `json:"networks,omitempty"`
	Events   []Event          `json:"events"` // oldest first
}

// NewReport returns a report that is only about this process, which has run since started. Its lists are
// never nil, so that programs can iterate over the JSON. store is the kind of the datastore.
func NewReport(started time.Time, j *Journal, store string) Report {
	host, _ := os.Hostname()
	return Report{
		Host: host, Version: version.String(), PID: os.Getpid(), Started: started, Now: time.Now(),
		Network:   Network{Prefixes: []netip.Prefix{}},
		Interface: Interface{Addresses: []Address{}},
		Lease:     Lease{Subnets: []netip.Prefix{}, PublicIPs: []netip.Addr{}},
		Datastore: Datastore{Kind: store},
		Kernel:    Kernel{Objects: map[string]dataplane.Count{}},
		Peers:     []Peer{},
		Events:    j.Events(),
	}
}

// PeerStates returns the number of peers in each state.
func (r Report) PeerStates() map[State]int {
	counts := map[State]int{}
	for _, p := range r.Peers {
		counts[p.State]++
	}
	return counts
}

// NetworkSummary is one of several networks.
type NetworkSummary struct {
	Name        string         `json:"name"`
	Phase       string         `json:"phase"`
	Ready       bool           `json:"ready"`
	Reasons     []string       `json:"reasons,omitempty"` // why it is not ready, or its configuration was refused
	BackendType string         `json:"backendType,omitempty"`
	Prefixes    []netip.Prefix `json:"prefixes"`
	Subnets     []netip.Prefix `json:"subnets"` // of this host
}

// Network is the network configuration in use.
type Network struct {
	Name        string `json:"name,omitempty"` // empty unless the daemon serves several
	Phase       string `json:"phase"`          // such as "serving"
	BackendType string `json:"backendType"`
	// NextBackendType is the type of the backend to which the network migrates.
	NextBackendType string `json:"nextBackendType,omitempty"`
	// NextError says why the next backend does not run on this host. It is empty if it does.
	NextError string `json:"nextError,omitempty"`
	NextMode  string `json:"nextMode,omitempty"` // as Mode
	// Waiting is the number of peers to which the host still sends by the present backend. It is nil if the
	// network does not migrate, or if the number is not known.
	Waiting    *int           `json:"waiting,omitempty"`
	Mode       string         `json:"mode,omitempty"` // of the backend, if it can carry packets in several ways
	Prefixes   []netip.Prefix `json:"prefixes"`
	MTU        int            `json:"mtu"`               // bytes, the same for every path
	Devices    []string       `json:"devices,omitempty"` // devices that the backend has created; none for host-gw, alloc, extension, and clouds without Overflow
	Ports      []int          `json:"ports,omitempty"`   // UDP ports that peers send to
	SubnetFile string         `json:"subnetFile"`
	Pool       *Pool          `json:"pool,omitempty"`     // nil if the store does not assign subnets
	Cloud      *Cloud         `json:"cloud,omitempty"`    // nil unless the backend uses the routes of a cloud
	Location   *Location      `json:"location,omitempty"` // nil without Backend.SameLocation
}

// Location tells which backends carry the packets inside and between locations. ByInside and ByBetween
// are the numbers of peers to which they carry packets.
type Location struct {
	Name      string `json:"name"`    // name of the location of this host; empty if it has none
	Inside    string `json:"inside"`  // type of the backend between hosts of one location
	Between   string `json:"between"` // type of the backend between locations
	ByInside  int    `json:"byInside"`
	ByBetween int    `json:"byBetween"`
}

// Cloud describes the routes of a cloud to the subnets of this host.
type Cloud struct {
	LastGood time.Time    `json:"lastGood,omitzero"` // the last comparison after which all routes were right
	Routes   []CloudRoute `json:"routes"`
	Overflow *Overflow    `json:"overflow,omitempty"` // nil without Backend.Overflow
}

// Overflow tells to how many peers the routers of the cloud carry the packets, and to how many a tunnel.
type Overflow struct {
	Tunnel   string `json:"tunnel"` // type of the tunnel's backend
	ByCloud  int    `json:"byCloud"`
	ByTunnel int    `json:"byTunnel"`
	// Problem says what is wrong with the routes of the cloud to this host, and the consequence.
	Problem string `json:"problem,omitempty"`
}

// CloudRoute is a route that a table of the cloud should have. Present is the result of the last
// comparison.
type CloudRoute struct {
	Table       string       `json:"table"`
	Destination netip.Prefix `json:"destination"`
	Target      string       `json:"target"` // in the words of the cloud
	Present     bool         `json:"present"`
}

// String returns the route in one line.
func (r CloudRoute) String() string {
	return fmt.Sprintf("%s to %s in table %s", r.Destination, r.Target, r.Table)
}

// Pool counts the subnets of the configured range. With two address families it is the
// family that has fewer free subnets.
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
	// Candidates are all interfaces of the host, best first.
	Candidates []underlay.Candidate `json:"candidates,omitempty"`
}

// Address is an address of the interface, and the address that peers send to.
type Address struct {
	Local  netip.Addr `json:"local"`
	Public netip.Addr `json:"public"`
}

// Lease is this host's lease, or a peer's.
type Lease struct {
	Key       string         `json:"key"`
	Subnets   []netip.Prefix `json:"subnets"`
	PublicIPs []netip.Addr   `json:"publicIPs"`
	Type      string         `json:"type,omitempty"`
	NextType  string         `json:"nextType,omitempty"`  // of the next backend, during a migration
	Permanent bool           `json:"permanent,omitempty"` // a reservation, or the podCIDR of the node
	Expires   time.Time      `json:"expires,omitzero"`    // of this host's lease; empty for peers
}

// Datastore is the store that contains the leases.
type Datastore struct {
	Kind      string    `json:"kind"` // etcd or kubernetes
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since,omitzero"` // when Connected last changed
	Error     string    `json:"error,omitempty"`
}

// Firewall is the state of masquerade and forward rules.
type Firewall struct {
	Kind  string `json:"kind"`            // iptables or nftables; empty if no rules are configured, or none is chosen yet: then there is an Error
	Error string `json:"error,omitempty"` // why the rules are not in place
}

// Kernel is the state of the kernel objects of the data path.
type Kernel struct {
	LastSync time.Time `json:"lastSync,omitzero"` // the last pass that succeeded
	Error    string    `json:"error,omitempty"`
	// Objects counts the wanted and the present objects by kind: link, address,
	// neighbour, fdb, route.
	Objects map[string]dataplane.Count `json:"objects,omitempty"`
}

// State says whether and how this host serves a peer.
type State string

// The states of a peer.
const (
	InPlace State = "in place"
	Missing State = "missing" // some of its objects are not in the kernel
	Held    State = "held"    // still served although the store no longer contains it
	Refused State = "refused"
	// Reserved means that the lease only reserves a subnet, for a host that has not started.
	Reserved State = "reserved"
)

// Served reports whether this host sends packets to a peer in state s.
func (s State) Served() bool { return s != Refused && s != Reserved }

// Peer is a peer as this host sees it.
type Peer struct {
	Lease
	State   State     `json:"state"`
	Error   string    `json:"error,omitempty"`
	Changed time.Time `json:"changed,omitzero"` // when the lease last changed
	// Backend is the type of the backend that carries the packets to the peer. It is set during a
	// migration, with Backend.Overflow and with Backend.SameLocation. Waiting is the reason why another
	// backend does not carry them yet: during a migration the next backend, with Backend.Overflow the
	// cloud, and with Backend.SameLocation, for a peer at the location of this host, the backend of
	// SameLocation.
	Backend string `json:"backend,omitempty"`
	Waiting string `json:"waiting,omitempty"`
	// PathMTU contains the subnets of the peer to which only packets smaller than the MTU of the device
	// pass, with the size in bytes of the largest packet that passes. It needs Backend.MTU "probe".
	PathMTU map[netip.Prefix]int `json:"pathMTU,omitempty"`
	Objects []Object             `json:"objects,omitempty"` // objects that the kernel should contain for this peer
}

// SharedPublicIP is a public address that several peers have.
type SharedPublicIP struct {
	PublicIP netip.Addr `json:"publicIP"`
	Leases   []string   `json:"leases"` // keys of the peers' leases, the oldest lease first
}

// Object is a kernel object, in the syntax of ip(8).
type Object struct {
	Text    string `json:"text"`
	Present bool   `json:"present"`
}
