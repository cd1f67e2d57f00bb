package backend

import (
	"cmp"
	"context"
	"slices"
	"time"

	"flanneld/pkg/dataplane"
	"flanneld/subnet"
)

// Inspector is a Network that can say what it holds the kernel to. Its methods
// are called from the goroutine that calls Sync.
type Inspector interface {
	// Holdings returns what the kernel should hold for the peer with that key.
	Holdings(key string) []Holding
	// Counts returns how much of what is wanted is there, by kind of object.
	Counts() map[string]dataplane.Count
}

// Carrier is a Network of a backend that has several ways to carry packets, or
// carries them itself. Its methods may be called at any time.
type Carrier interface {
	// Mode names the way.
	Mode() string
	// Dropped returns how many packets were dropped in user space, by reason.
	Dropped() map[string]uint64
}

// Holding is something that the kernel should hold.
type Holding struct {
	Object  string // as ip(8) would write it
	Present bool
}

// PeerReport says how one lease of another node is served.
type PeerReport struct {
	Lease    subnet.Lease
	Refused  string // why it is not served, or not in all families
	Held     bool   // the store has forgotten it
	Changed  time.Time
	Holdings []Holding // nil if not asked for, or the network is no Inspector
}

// Inspection is one look at a Syncer.
type Inspection struct {
	Peers    []PeerReport               // by key
	Counts   map[string]dataplane.Count // nil if the network is no Inspector
	LastSync time.Time                  // the last that succeeded; zero if none did
	Err      error                      // of the last sync
	Mode     string                     // empty if the network is no Carrier
	Dropped  map[string]uint64          // packets, by reason; nil if the network is no Carrier
}

// Inspect looks at how things are between two passes; holdings says whether
// to name the kernel objects of each peer, which costs more than to count them.
// It returns ctx's error if there is no such moment before ctx ends.
func (s *Syncer) Inspect(ctx context.Context, holdings bool) (in Inspection, err error) {
	err = s.loop.Do(ctx, func() { in = s.inspect(holdings) })
	return in, err
}

func (s *Syncer) inspect(holdings bool) Inspection {
	s.mu.Lock()
	defer s.mu.Unlock()
	in := Inspection{LastSync: s.lastSync, Err: s.err}
	inspector, _ := s.Network.(Inspector)
	if inspector != nil {
		in.Counts = inspector.Counts()
	}
	if carrier, ok := s.Network.(Carrier); ok {
		in.Mode, in.Dropped = carrier.Mode(), carrier.Dropped()
	}
	for l := range s.Ledger.Leases() {
		p := PeerReport{Lease: *l, Refused: s.refused[l.Key], Changed: s.Ledger.Since(l.Key), Held: s.Ledger.IsHeld(l.Key)}
		if holdings && inspector != nil {
			p.Holdings = inspector.Holdings(l.Key)
		}
		in.Peers = append(in.Peers, p)
	}
	slices.SortFunc(in.Peers, func(a, b PeerReport) int { return cmp.Compare(a.Lease.Key, b.Lease.Key) })
	return in
}
