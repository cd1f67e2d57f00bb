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

// NetworkReport is the state of a network. A network that consists of others copies the report of one of them, so that
// it loses nothing that it does not know.
type NetworkReport struct {
	Counts  map[string]dataplane.Count // numbers of wanted and existing objects, by kind
	Mode    string                     // data path in use, with the name that the configuration uses; empty if there is only one
	Dropped map[string]uint64          // packets that flanneld or its own firewall rules have dropped, by reason; nil if they are not counted
	Cloud   *cloud.Report              // routes of a cloud to this host; nil if packets follow none
	// Overflow is nil unless the network reaches peers by a tunnel if the routers of a cloud do not
	// carry the packets to them.
	Overflow *status.Overflow
	Location *status.Location // nil if the network has no locations
	// NotStarted is why the next backend of a migration does not run; nil if it does, or if there is none.
	NotStarted error
	NextMode   string // Mode of the next backend of a migration
	// PathMTU returns the size in bytes of the largest packet that passes to a subnet of a peer. It returns 0 if that is
	// the MTU of the device, or unknown. It may be called at any time. It is nil if no path is narrower than the device.
	PathMTU func(netip.Prefix) int
	// Objects returns the objects that the kernel should have for the peer with the lease key. It is called from the
	// goroutine that calls Sync, before the next call. It is nil if the network knows none.
	Objects func(key string) []status.Object
}

// PeerReport describes how the lease of another node is served.
type PeerReport struct {
	Lease    subnet.Lease
	Refused  string          // the reason why the lease is not served, or not in all families; empty if it is served in all
	Reserved bool            // the lease only reserves a subnet, and is neither served nor refused
	Held     bool            // the store has lost the lease without removing it
	Changed  time.Time       // when the lease last changed
	Objects  []status.Object // nil if not requested
	// PathMTUs contains the sizes in bytes of the largest packets to those subnets of the peer whose path
	// is narrower than the device. It is nil if there are none.
	PathMTUs map[netip.Prefix]int
	Choice   Choice // zero if the network chooses nothing
}

// Inspection is a snapshot of a Syncer.
type Inspection struct {
	NetworkReport
	Peers    []PeerReport            // sorted by key
	LastSync time.Time               // time of the last successful sync; zero if there was none
	Err      error                   // error of the last sync
	Shared   []subnet.SharedPublicIP // public addresses that several served leases have
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
	in := Inspection{NetworkReport: s.Network.Report(), LastSync: s.lastSync, Err: s.err, Shared: s.arbiter.Shared()}
	in.Peers = make([]PeerReport, 0, s.Ledger.Len())
	for l := range s.Ledger.Leases() {
		p := PeerReport{
			Lease: *l, Refused: s.log.refused[l.Key], Reserved: s.unusable[l.Key] == reserved,
			Changed: s.Ledger.Since(l.Key), Held: s.Ledger.IsHeld(l.Key),
		}
		if objects && in.Objects != nil {
			p.Objects = in.Objects(l.Key)
		}
		if s.choice != nil {
			p.Choice = s.choice(l.Key)
		}
		if in.PathMTU != nil {
			p.PathMTUs = pathMTUs(in.PathMTU, l)
		}
		in.Peers = append(in.Peers, p)
	}
	slices.SortFunc(in.Peers, func(a, b PeerReport) int { return a.Lease.Compare(b.Lease) })
	return in
}

func pathMTUs(sizeOf func(netip.Prefix) int, l *subnet.Lease) map[netip.Prefix]int {
	var mtus map[netip.Prefix]int
	for _, e := range l.Endpoints {
		mtu := sizeOf(e.Subnet)
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
