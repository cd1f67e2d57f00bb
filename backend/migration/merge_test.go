// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"context"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

var network4 = netip.MustParsePrefix("10.5.0.0/16")

// link returns a device with the name "old" or "new".
func link(name string) dataplane.Link {
	return dataplane.Link{
		Name: name, Kind: dataplane.KindVXLAN, MTU: 1450, Up: true, MAC: dataplane.MAC{2, name[0]},
		VXLAN: dataplane.VXLAN{VNI: int(name[0]), Port: 8472, Local: netip.MustParseAddr("192.168.77.1"), Underlay: "eth0"},
	}
}

func subnetOf(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(n), 0}), 24)
}

// bed is a network with two backends that have the devices "old" and "new", on a kernel in memory.
type bed struct {
	*network
	kernel *dataplanetest.Kernel
	narrow map[string]int // MTUs of routes of the next backend, by lease key
}

// newBed returns a bed whose backends have a route to each peer, or if wide is set, one to the whole network.
func newBed(t *testing.T, wide [sides]bool) *bed {
	t.Helper()
	k := dataplanetest.New()
	env := newEnv(k, hostGW, vni1)
	p, err := env.Programmer(t.Context(), dataplane.Scope{Devices: []string{"old", "new"}, Shared: []string{"eth0"}, Networks: []netip.Prefix{network4}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	b := &bed{kernel: k, narrow: map[string]int{}, network: &network{
		Backend: &Backend{env: env}, Programmer: p, peers: map[string]*peer{}, leases: [sides]map[string]*subnet.Lease{{}, {}},
	}}
	p.Share(t.Context(), b.merge)
	for side, dev := range []string{"old", "new"} {
		part := b.Parts[side]
		part.Spare = side == next
		part.Base.Add(link(dev), dataplane.Addr{Dev: dev, Prefix: netip.MustParsePrefix("10.5.1.0/32")})
		if wide[side] {
			part.Base.Add(dataplane.NewRoute(network4, netip.Addr{}, dev, false))
		}
		part.Desired = func(_ context.Context, l subnet.Lease) ([]dataplane.Object, error) {
			r := dataplane.NewRoute(l.Endpoints[0].Subnet, netip.Addr{}, dev, false)
			if side == next {
				r.MTU = b.narrow[l.Key]
			}
			if wide[side] && r.MTU == 0 {
				return nil, nil
			}
			return []dataplane.Object{r}, nil
		}
	}
	return b
}

// serve makes a backend serve peer n, or stop that. It returns the key of the peer.
func (b *bed) serve(n, side int, serves bool) string {
	l := lease(n, "", nil, "", nil)
	if b.peers[l.Key] == nil {
		b.peers[l.Key] = &peer{}
	}
	delete(b.leases[side], l.Key)
	if serves {
		b.leases[side][l.Key] = l
	}
	return l.Key
}

// pass gives both backends their leases, and makes the kernel match.
func (b *bed) pass(ctx context.Context, t *testing.T, set backend.Set) backend.Outcome {
	t.Helper()
	set.Complete = true
	for side, part := range b.Parts {
		set.Leases = b.leases[side]
		if _, err := part.Sync(ctx, set); err != nil {
			t.Fatal(err)
		}
	}
	set.Leases = map[string]*subnet.Lease{}
	for _, leases := range b.leases {
		maps.Copy(set.Leases, leases)
	}
	out, err := b.Programmer.Sync(ctx, set)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// routes returns the devices of the kernel's routes to dst, the best route first. A route that
// stands by has the suffix " standby".
func routes(ctx context.Context, t *testing.T, k *dataplanetest.Kernel, dst netip.Prefix) (all []string) {
	t.Helper()
	s, err := k.Read(ctx, dataplane.Scope{Devices: []string{"old", "new"}, Networks: []netip.Prefix{network4}})
	if err != nil {
		t.Fatal(err)
	}
	found := slices.Clone(s.Routes[dst])
	slices.SortFunc(found, func(a, b dataplane.Route) int { return a.Priority - b.Priority })
	for _, r := range found {
		text := r.Dev
		if r.Priority > 0 {
			text += " standby"
		}
		all = append(all, text)
	}
	return all
}

// TestMerge checks the routes in each step of a migration, for backends with a route to each peer
// and for backends with a route to the whole network.
func TestMerge(t *testing.T) {
	for _, tt := range []struct {
		name     string
		wide     [sides]bool
		wantWide []string // routes to the whole network
	}{
		{"routes to peers", [sides]bool{}, nil},
		{"the next one has a route to the network", [sides]bool{next: true}, nil},
		{"the present one has a route to the network", [sides]bool{present: true}, []string{"old"}},
		{"both have a route to the network", [sides]bool{true, true}, []string{"old"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBed(t, tt.wide)
			key := b.serve(2, present, true)
			b.serve(2, next, true)
			b.serve(3, present, true)
			expect := func(when string, dst netip.Prefix, want ...string) {
				t.Helper()
				if diff := cmp.Diff(want, routes(t.Context(), t, b.kernel, dst)); diff != "" {
					t.Errorf("%s, routes to %s (-want +got):\n%s", when, dst, diff)
				}
			}
			choose := func(side int) {
				t.Helper()
				b.peers[key].side = side
				b.Touch(key)
				b.pass(t.Context(), t, backend.Set{})
			}

			b.pass(t.Context(), t, backend.Set{All: true})
			expect("at first", subnetOf(2), "old", "new standby")
			expect("at first", subnetOf(3), "old")
			expect("at first", network4, tt.wantWide...)
			choose(next)
			expect("after the change", subnetOf(2), "new", "old standby")
			expect("after the change", network4, tt.wantWide...)
			choose(present)
			expect("after going back", subnetOf(2), "old", "new standby")

			b.peers[key].side = next // and at the same time the peer leaves the present backend
			b.serve(2, present, false)
			b.pass(t.Context(), t, backend.Set{Changed: []string{key}})
			expect("after the peer has finished", subnetOf(2), "new")
		})
	}
}

// TestMergeRandomWalk makes random changes, and applies them alone or several at once. After that the
// kernel must have exactly the routes that merge returns.
func TestMergeRandomWalk(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	// The next backend has one route to the network, and one to a peer only while its path is narrow.
	b := newBed(t, [sides]bool{next: true})
	var changed []string
	for step := range 2000 {
		n, side := 2+rnd.IntN(5), rnd.IntN(sides)
		switch rnd.IntN(4) {
		case 0:
			key := b.serve(n, present, rnd.IntN(2) == 0)
			b.peers[key].side = side
			changed = append(changed, key)
		case 1:
			changed = append(changed, b.serve(n, side, rnd.IntN(2) == 0))
		case 2:
			key := b.serve(n, next, true)
			b.narrow[key] = 1300 * rnd.IntN(2)
			changed = append(changed, key)
		case 3:
			b.pass(t.Context(), t, backend.Set{Changed: changed, All: rnd.IntN(5) == 0})
			changed = nil
			wanted := 0
			for key := range b.peers {
				if b.leases[present][key] == nil && b.leases[next][key] == nil {
					continue
				}
				for _, o := range b.merge(key) {
					wanted++
					if !b.Has(o) {
						t.Fatalf("seed %d, step %d: the kernel has no %s", seed, step, o)
					}
				}
			}
			if got := b.Counts()["route"]; got.Wanted != wanted || got.Present != wanted {
				t.Fatalf("seed %d, step %d: %+v routes, want %d", seed, step, got, wanted)
			}
		}
	}
}

// TestMergeTellsRefusals checks that a refused route of one backend is not reported as one of the other.
func TestMergeTellsRefusals(t *testing.T) {
	b := newBed(t, [sides]bool{next: true})
	bridge := dataplane.Link{Name: "br0", Kind: "bridge", Up: true}
	if err := b.kernel.Append(bridge, dataplane.Addr{Dev: "br0", Prefix: netip.MustParsePrefix("10.5.2.1/24")}); err != nil {
		t.Fatal(err)
	}
	refused, fine := b.serve(2, present, true), b.serve(3, next, true)
	b.peers[fine].side = next
	out := b.pass(t.Context(), t, backend.Set{All: true})
	if len(out.Refused) != 1 || out.Refused[0].Key != refused {
		t.Errorf("refused %v, want %s", out.Refused, refused)
	}
	for _, key := range []string{refused, fine} {
		for side := range sides {
			if got := b.refused(key, side) != ""; got != (key == refused && side == present) {
				t.Errorf("%s by backend %d is refused: %v", key, side, got)
			}
		}
	}
}
