// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// Inspector is a Network that can report the kernel objects that it maintains. Its
// methods are called from the goroutine that calls Sync.
type Inspector interface {
	// Objects returns the objects that the kernel should have for the peer with the lease key. It
	// returns nil if there are none.
	Objects(key string) []ObjectReport
	// Counts returns the numbers of wanted and existing objects, by kind.
	Counts() map[string]dataplane.Count
}

// Objects returns the objects of n for a peer, or nil if n is not an Inspector.
func Objects(n Network, key string) []ObjectReport {
	if i, ok := n.(Inspector); ok {
		return i.Objects(key)
	}
	return nil
}

// DataPath is a Network whose packets may be carried by the kernel or by this process. Its
// methods may be called at any time.
type DataPath interface {
	// Mode returns the data path in use, with the name that the configuration uses.
	Mode() string
	// Dropped returns the number of packets that flanneld or its own firewall rules have dropped,
	// by reason. It returns nil if the network does not count them.
	Dropped() map[string]uint64
}

// Mode returns the data path of n, or "" if n is not a DataPath.
func Mode(n Network) string {
	if path, ok := n.(DataPath); ok {
		return path.Mode()
	}
	return ""
}

// Dropped returns the numbers of packets that n has dropped, or nil if n is not a DataPath.
func Dropped(n Network) map[string]uint64 {
	if path, ok := n.(DataPath); ok {
		return path.Dropped()
	}
	return nil
}

// Chooser is a Network that chooses one of two backends for each peer. It prefers the next backend
// in a migration, the cloud with Overflow, and the backend of SameLocation for peers at the
// location of this host. Its method is called from the goroutine that calls Sync.
type Chooser interface {
	// Choice returns how the peer with the lease key is served.
	Choice(key string) Choice
}

// Choice is the backend that carries the packets to a peer.
type Choice struct {
	Backend string // type; empty if no backend carries them
	Waiting string // the reason why Backend is not the preferred one; empty if it is
}

// Migrator is a Network that changes to another backend. Its method is called from the goroutine that calls Sync.
type Migrator interface {
	// NotStarted returns why the next backend does not run on this host, or nil if it does.
	NotStarted() error
}

// CloudRouter is a Network whose packets follow routes in the tables of a cloud. Its method may
// be called at any time.
type CloudRouter interface {
	// CloudRoutes returns the state of the routes to this host.
	CloudRoutes() cloud.Report
}

// Overflower is a Network that reaches peers by a tunnel if the routers of a cloud do not carry the
// packets to them. Its method is called from the goroutine that calls Sync.
type Overflower interface {
	// Overflow returns how many peers are reached in which way, and a problem with the routes of
	// the cloud to this host, if there is one.
	Overflow() status.Overflow
}

// PathSizer is a Network whose paths to peers may be narrower than its device. Its method may be called
// at any time.
type PathSizer interface {
	// PathMTU returns the size in bytes of the largest packet that passes to a subnet of a peer. It
	// returns 0 if that is the MTU of the device, or unknown.
	PathMTU(subnet netip.Prefix) int
}

// ObjectReport is an object that the kernel should have, and whether it has it.
type ObjectReport struct {
	Object  string // in the form of ip(8)
	Present bool
}

// PeerReport describes how the lease of another node is served.
type PeerReport struct {
	Lease   subnet.Lease
	Refused string         // the reason why the lease is not served, or not in all families; empty if it is served in all
	Held    bool           // the store has lost the lease without removing it
	Changed time.Time      // when the lease last changed
	Objects []ObjectReport // nil if not requested, or if the network is not an Inspector
	// PathMTUs contains the sizes in bytes of the largest packets to those subnets of the peer whose path
	// is narrower than the device. It is nil if there are none.
	PathMTUs map[netip.Prefix]int
	// Choice is zero if the network is not a Chooser.
	Choice Choice
}

// Inspection is a snapshot of a Syncer.
type Inspection struct {
	Peers    []PeerReport               // sorted by key
	Counts   map[string]dataplane.Count // nil if the network is not an Inspector
	LastSync time.Time                  // time of the last successful sync; zero if there was none
	Err      error                      // error of the last sync
	Mode     string                     // data path in use; empty if the network is not a DataPath
	Dropped  map[string]uint64          // dropped packets by reason; nil if the network does not count them
	Cloud    *cloud.Report              // nil if the network is not a CloudRouter
	Overflow *status.Overflow           // nil if the network is not an Overflower
	Location *status.Location           // nil if the network is not a Locator, or has no locations
	Shared   []subnet.SharedPublicIP    // public addresses that several served leases have
	// NotStarted is why the next backend of a Migrator does not run; nil if it does, or if there is none.
	NotStarted error
}

// Inspect returns the state between two passes. objects selects whether the result includes the
// kernel objects of each peer, which costs more than counting them. Inspect waits for the present
// pass. If ctx ends before, it returns the error of ctx.
func (s *Syncer) Inspect(ctx context.Context, objects bool) (in Inspection, err error) {
	err = s.loop.Do(ctx, func() { in = s.inspect(objects) })
	return in, err
}

func (s *Syncer) inspect(objects bool) Inspection {
	s.mu.Lock()
	defer s.mu.Unlock()
	in := Inspection{LastSync: s.lastSync, Err: s.err, Shared: s.arbiter.Shared()}
	chooser, _ := s.Network.(Chooser)
	sizer, _ := s.Network.(PathSizer)
	if inspector, ok := s.Network.(Inspector); ok {
		in.Counts = inspector.Counts()
	}
	in.Mode = Mode(s.Network)
	in.Dropped = Dropped(s.Network)
	if router, ok := s.Network.(CloudRouter); ok {
		report := router.CloudRoutes()
		in.Cloud = &report
	}
	if overflower, ok := s.Network.(Overflower); ok {
		report := overflower.Overflow()
		in.Overflow = &report
	}
	if migrator, ok := s.Network.(Migrator); ok {
		in.NotStarted = migrator.NotStarted()
	}
	if locator, ok := s.Network.(Locator); ok {
		in.Location = locator.Location()
	}

	for l := range s.Ledger.Leases() {
		p := PeerReport{Lease: *l, Refused: s.log.refused[l.Key], Changed: s.Ledger.Since(l.Key), Held: s.Ledger.IsHeld(l.Key)}
		if objects {
			p.Objects = Objects(s.Network, l.Key)
		}
		if chooser != nil {
			p.Choice = chooser.Choice(l.Key)
		}
		if sizer != nil {
			p.PathMTUs = pathMTUs(sizer, l)
		}
		in.Peers = append(in.Peers, p)
	}
	slices.SortFunc(in.Peers, func(a, b PeerReport) int { return a.Lease.Compare(b.Lease) })
	return in
}

func pathMTUs(s PathSizer, l *subnet.Lease) map[netip.Prefix]int {
	var mtus map[netip.Prefix]int
	for _, e := range l.Endpoints {
		mtu := s.PathMTU(e.Subnet)
		if mtu == 0 {
			continue
		}
		if mtus == nil {
			mtus = map[netip.Prefix]int{}
		}
		mtus[e.Subnet] = mtu
	}
	return mtus
}
