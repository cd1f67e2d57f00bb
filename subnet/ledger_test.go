// SPDX-License-Identifier: Apache-2.0

package subnet_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"
	"weak"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// apply applies s, and returns all leases that the ledger knows afterwards, and the keys of the held
// peers.
func apply(l *subnet.Ledger, s subnet.Snapshot, now time.Time) (leases []subnet.Lease, held []string) {
	l.Apply(s, now)
	for _, p := range l.State().Peers {
		leases = append(leases, p.Lease)
	}
	return leases, l.Held()
}

func snapshot(store string, revision int64, leases ...subnet.Lease) subnet.Snapshot {
	return subnet.Snapshot{Leases: subnettest.Pointers(leases...), Store: subnet.StoreID{ID: store, Revision: revision}}
}

func another(s subnet.Snapshot) subnet.Snapshot {
	s.Another = true
	return s
}

// graced returns s with a grace period that ends so long after ledgerStart.
func graced(d time.Duration, s subnet.Snapshot) subnet.Snapshot {
	s.Grace = ledgerStart.Add(d)
	return s
}

// ledgerStart is when the ledgers of these tests begin.
var ledgerStart = time.Unix(1700000000, 0)

// ledgerStep is a snapshot that a ledger gets, and what it has after that.
type ledgerStep struct {
	after      time.Duration // since the step before
	snapshot   subnet.Snapshot
	want, held []string
}

func undecodable(s subnet.Snapshot, keys ...string) subnet.Snapshot {
	s.Undecodable = keys
	return s
}

func TestLedger(t *testing.T) {
	a := lease("a", 1, "10.5.1.0/24", "192.0.2.1")
	b := lease("b", 2, "10.5.2.0/24", "192.0.2.2")
	c := lease("c", 3, "10.5.3.0/24", "192.0.2.3")
	all := ledgerStep{0, snapshot("s", 10, a, b), []string{"a", "b"}, nil}
	for _, tc := range []struct {
		name  string
		steps []ledgerStep
	}{
		{"same store, later revision: gone", []ledgerStep{all, {0, snapshot("s", 11, a), []string{"a"}, nil}}},
		{"same store, same revision: gone", []ledgerStep{all, {0, snapshot("s", 10, a), []string{"a"}, nil}}},
		{"rewound store: held", []ledgerStep{
			all,
			{0, snapshot("s", 9, a), []string{"a", "b"}, []string{"b"}},
			{time.Hour, snapshot("s", 10, a), []string{"a", "b"}, []string{"b"}},
			{subnet.TTL - time.Hour - 1, snapshot("s", 11, a), []string{"a", "b"}, []string{"b"}},
			{1, snapshot("s", 11, a), []string{"a"}, nil},
		}},
		{"wiped store: all held, then back one by one", []ledgerStep{
			all,
			{0, snapshot("s", 1), []string{"a", "b"}, []string{"a", "b"}},
			{0, snapshot("s", 2, b), []string{"a", "b"}, []string{"a"}},
			{0, snapshot("s", 3), []string{"a"}, []string{"a"}},
		}},
		{"other store, even at a later revision: held", []ledgerStep{
			all,
			{0, snapshot("t", 99, c), []string{"a", "b", "c"}, []string{"a", "b"}},
			{0, snapshot("s", 100, a, b), []string{"a", "b", "c"}, []string{"c"}},
		}},
		{"other store with the same ID and a later revision: held", []ledgerStep{all, {0, another(snapshot("s", 11, a)), []string{"a", "b"}, []string{"b"}}}},
		{"held until another key takes the subnet", []ledgerStep{
			all,
			{0, snapshot("t", 1), []string{"a", "b"}, []string{"a", "b"}},
			{0, snapshot("t", 2, lease("x", 1, "10.5.2.0/24", "192.0.2.9")), []string{"a", "x"}, []string{"a"}},
		}},
		{"held until a subnet of another length takes part of it", []ledgerStep{
			{0, snapshot("s", 10, lease("wide", 1, "10.5.2.0/23", "192.0.2.1")), []string{"wide"}, nil},
			{0, snapshot("t", 2, lease("x", 1, "10.5.3.0/24", "192.0.2.9")), []string{"x"}, nil},
		}},
		{"held until its public IP has another subnet", []ledgerStep{
			all,
			{0, snapshot("t", 2, lease("x", 1, "10.5.9.0/24", "192.0.2.2")), []string{"a", "x"}, []string{"a"}},
		}},
		{"held beside a node with the same public IP", []ledgerStep{
			{0, snapshot("s", 10, a, lease("twin", 2, "10.5.9.0/24", "192.0.2.1")), []string{"a", "twin"}, nil},
			{0, snapshot("t", 1, lease("twin", 2, "10.5.9.0/24", "192.0.2.1")), []string{"a", "twin"}, []string{"a"}},
			{0, snapshot("t", 2, lease("twin", 2, "10.5.8.0/24", "192.0.2.1")), []string{"twin"}, nil},
		}},
		{"held beside another lease without a public IP", []ledgerStep{
			{0, snapshot("s", 10, lease("b", 2, "10.5.2.0/24", ""), lease("c", 3, "10.5.3.0/24", "0.0.0.0")), []string{"b", "c"}, nil},
			{0, snapshot("t", 1, lease("x", 4, "10.5.4.0/24", ""), lease("y", 5, "10.5.5.0/24", "0.0.0.0")), []string{"b", "c", "x", "y"}, []string{"b", "c"}},
		}},
		{"the same key with other content is current, not held", []ledgerStep{
			all,
			{0, snapshot("t", 2, lease("a", 1, "10.5.1.0/24", "192.0.2.9"), b), []string{"a", "b"}, nil},
		}},
		{"undecodable keeps its last good lease until the key goes", []ledgerStep{
			all,
			{0, undecodable(snapshot("s", 11, a), "b"), []string{"a", "b"}, nil},
			{48 * time.Hour, undecodable(snapshot("s", 12, a), "b"), []string{"a", "b"}, nil},
			{0, snapshot("s", 13, a), []string{"a"}, nil},
		}},
		{"undecodable and never seen is no peer", []ledgerStep{
			{0, undecodable(snapshot("s", 11, a), "b"), []string{"a"}, nil},
		}},
		{"undecodable in another store is current", []ledgerStep{
			all, {0, undecodable(snapshot("t", 1), "b"), []string{"a", "b"}, []string{"a"}},
		}},
		{"a clock set back does not hold for longer than a TTL", []ledgerStep{
			all,
			{0, snapshot("t", 1, a), []string{"a", "b"}, []string{"b"}},
			{-1000 * time.Hour, snapshot("t", 1, a), []string{"a", "b"}, []string{"b"}},
			{subnet.TTL, snapshot("t", 1, a), []string{"a"}, nil},
		}},
	} {
		for _, persist := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, persisted %v", tc.name, persist), func(t *testing.T) { playLedger(t, tc.steps, persist) })
		}
	}
}

// playLedger applies the snapshots of steps. If persist is set, the ledger is restored before each.
func playLedger(t *testing.T, steps []ledgerStep, persist bool) {
	t.Helper()
	ledger, now := new(subnet.Ledger), ledgerStart
	for i, s := range steps {
		if persist {
			ledger = reload(t, ledger)
		}
		now = now.Add(s.after)
		leases, held := apply(ledger, s.snapshot, now)
		if diff := cmp.Diff(s.want, keys(leases)); diff != "" {
			t.Errorf("step %d: leases differ (-want +got):\n%s", i, diff)
		}
		if diff := cmp.Diff(s.held, held); diff != "" {
			t.Errorf("step %d: held differ (-want +got):\n%s", i, diff)
		}
	}
}

// TestLedgerGrace expects that leases which have run out during an outage are kept for the grace period,
// unless others contradict them, and do not count as held.
func TestLedgerGrace(t *testing.T) {
	a := lease("a", 1, "10.5.1.0/24", "192.0.2.1")
	b := lease("b", 2, "10.5.2.0/24", "192.0.2.2")
	all := ledgerStep{0, snapshot("s", 10, a, b), []string{"a", "b"}, nil}
	for _, tc := range []struct {
		name  string
		steps []ledgerStep
	}{
		{"kept", []ledgerStep{
			all,
			{0, graced(time.Minute, snapshot("s", 11, a)), []string{"a", "b"}, nil},
			{time.Minute - 1, graced(time.Minute, snapshot("s", 12, a)), []string{"a", "b"}, nil},
			{1, snapshot("s", 13, a), []string{"a"}, nil},
		}},
		{"taken again", []ledgerStep{
			all,
			{0, graced(time.Minute, snapshot("s", 11)), []string{"a", "b"}, nil},
			{0, graced(time.Minute, snapshot("s", 12, b)), []string{"a", "b"}, nil},
			{time.Minute, snapshot("s", 13, b), []string{"b"}, nil},
			{0, snapshot("s", 14), []string{}, nil},
		}},
		{"others have the subnet or the address", []ledgerStep{
			all,
			{0, graced(time.Minute, snapshot("s", 11)), []string{"a", "b"}, nil},
			{0, graced(time.Minute, snapshot("s", 12, lease("x", 1, "10.5.1.0/25", "192.0.2.9"), lease("y", 2, "10.5.8.0/24", "192.0.2.2"))), []string{"x", "y"}, nil},
		}},
		{"after the grace period", []ledgerStep{all, {time.Minute, graced(time.Minute, snapshot("s", 11, a)), []string{"a"}, nil}}},
		{"another store in the grace period", []ledgerStep{
			all,
			{0, graced(time.Minute, snapshot("s", 11, a)), []string{"a", "b"}, nil},
			{0, graced(time.Minute, snapshot("t", 1, a)), []string{"a", "b"}, []string{"b"}},
			{subnet.TTL - 1, snapshot("t", 2, a), []string{"a", "b"}, []string{"b"}},
			{1, snapshot("t", 3, a), []string{"a"}, nil},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) { playLedger(t, tc.steps, false) })
	}
}

// TestLedgerGraceWithoutTheStore lets a store go away again in a grace period. While it is away no node can take its
// lease again, so all peers stay until the store has said something after that period.
func TestLedgerGraceWithoutTheStore(t *testing.T) {
	a := lease("a", 1, "10.5.1.0/24", "192.0.2.1")
	for _, whole := range []bool{false, true} {
		ledger := new(subnet.Ledger)
		ledger.Apply(snapshot("s", 10, a), ledgerStart)
		end := ledgerStart.Add(time.Minute)
		store := subnet.StoreID{ID: "s", Revision: 11}
		u := subnet.Update{Store: store, Changed: map[string]*subnet.Lease{"a": nil}, Grace: end}
		if _, ok := ledger.Follow(u, ledgerStart); !ok {
			t.Fatal("the ledger needs the snapshot")
		}
		if later := end.Add(time.Hour); ledger.Expire(later) || ledger.Len() != 1 {
			t.Error("the peer has gone although the store has said nothing")
		}

		if whole {
			ledger.Apply(snapshot("s", 12), end)
		} else if dropped, _ := ledger.Follow(subnet.Update{Store: store, Changed: map[string]*subnet.Lease{}}, end); !slices.Equal(dropped, []string{"a"}) {
			t.Errorf("dropped %v, want a", dropped)
		}
		if ledger.Len() != 0 {
			t.Errorf("the peer stays after the grace period, with a whole snapshot: %v", whole)
		}
	}
}

// reload returns a new ledger that is restored from l's state in JSON, as after a restart.
func reload(t *testing.T, l *subnet.Ledger) *subnet.Ledger {
	t.Helper()
	raw, err := json.Marshal(l.State())
	if err != nil {
		t.Fatal(err)
	}
	var state subnet.LedgerState
	if err := json.Unmarshal(raw, &state); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(l.State(), state, netipComparer); diff != "" {
		t.Errorf("state changed on disk (-before +after):\n%s", diff)
	}
	again := new(subnet.Ledger)
	again.Restore(state, time.Now())
	return again
}

// TestLedgerFirst asks for the peers with the smallest keys.
func TestLedgerFirst(t *testing.T) {
	var l subnet.Ledger
	l.Apply(snapshot("s", 1, lease("c", 1, "10.5.3.0/24", "192.0.2.3"), lease("a", 2, "10.5.1.0/24", "192.0.2.1"),
		lease("d", 3, "10.5.4.0/24", "192.0.2.4"), lease("b", 4, "10.5.2.0/24", "192.0.2.2")), time.Now())
	for n, want := range map[int]string{0: "[]", 1: "[a]", 3: "[a b c]", 4: "[a b c d]", 9: "[a b c d]"} {
		keys := []string{}
		for _, peer := range l.First(n) {
			keys = append(keys, peer.Key)
		}
		if got := fmt.Sprint(keys); got != want {
			t.Errorf("the first %d are %s, want %s", n, got, want)
		}
	}
}

// TestLedgerHasUnreadable expects that a lease counts as unreadable only if no good state of it is
// known, and until it can be read or is gone.
func TestLedgerHasUnreadable(t *testing.T) {
	a := lease("a", 1, "10.5.1.0/24", "192.0.2.1")
	var l subnet.Ledger
	expect := func(what string, want bool) {
		t.Helper()
		if got := l.HasUnreadable(); got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	follow := func(revision int64, changed map[string]*subnet.Lease, unreadable ...string) {
		t.Helper()
		u := subnet.Update{Store: subnet.StoreID{ID: "s", Revision: revision}, Changed: changed, Undecodable: unreadable}
		if _, ok := l.Follow(u, time.Now()); !ok {
			t.Fatal("the ledger does not follow")
		}
	}
	none := map[string]*subnet.Lease{}
	expect("at the start", false)
	l.Apply(undecodable(snapshot("s", 1, a), "b"), time.Now())
	expect("a new lease in a snapshot", true)
	l.Apply(undecodable(snapshot("s", 2, a)), time.Now())
	expect("it is gone", false)
	follow(3, none, "a")
	expect("a known lease", false)
	follow(4, none, "c")
	expect("a new lease in an update", true)
	follow(5, map[string]*subnet.Lease{"c": nil})
	expect("it is gone with an update", false)
	follow(6, none, "c")
	c := lease("c", 3, "10.5.3.0/24", "192.0.2.3")
	follow(7, map[string]*subnet.Lease{"c": &c})
	expect("it can be read", false)
	follow(8, none, "d")
	l.Restore(l.State(), time.Now())
	expect("the ledger begins again with a last known state", false)
}

// TestLedgerWalk applies random snapshots, with restarts between them. The leases of a snapshot must
// be known and not held. The ledger must drop a lease that is missing from the snapshot if the store
// proves that it is gone, if its hold is over or if another lease contradicts it, and in no other case.
// If a snapshot is applied a second time, nothing may change.
//
//stages:rest it checks 8,000 steps
func TestLedgerWalk(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		ledger, now := new(subnet.Ledger), time.Unix(1700000000, 0)
		var last subnet.Snapshot
		for step := range 40 {
			s := randomSnapshot(rnd, last)
			now = now.Add(time.Duration(rnd.IntN(12)) * time.Hour)
			if rnd.IntN(4) == 0 {
				ledger = reload(t, ledger)
				isHeld := func(p subnet.Peer) bool { return ledger.IsHeld(p.Lease.Key) }
				if ledger.Expire(now.Add(2*subnet.TTL)) || len(ledger.Held()) > 0 || slices.ContainsFunc(ledger.State().Peers, isHeld) {
					t.Fatalf("seed %d step %d: peers count as held before the store has answered", seed, step)
				}
			}
			before := ledger.State()
			leases, held := apply(ledger, s, now)
			check := func(ok bool, format string, args ...any) {
				if !ok {
					t.Fatalf("seed %d step %d: %s\nbefore %+v\nsnapshot %+v\nafter %+v, held %v",
						seed, step, fmt.Sprintf(format, args...), before, s, leases, held)
				}
			}
			have := keys(leases)
			for _, l := range s.Leases {
				check(slices.Contains(have, l.Key) && !slices.Contains(held, l.Key), "%s is not current", l.Key)
			}
			for _, p := range before.Peers {
				gone := before.Store.ID == s.Store.ID && before.Store.Revision <= s.Store.Revision && p.HeldUntil.IsZero()
				expired := !p.HeldUntil.IsZero() && !now.Before(p.HeldUntil)
				kept := slices.Contains(have, p.Lease.Key)
				if slices.Contains(s.Undecodable, p.Lease.Key) {
					check(kept, "undecodable %s went", p.Lease.Key)
				} else if !slices.ContainsFunc(s.Leases, func(l *subnet.Lease) bool { return l.Key == p.Lease.Key }) {
					check(kept == (!gone && !expired && !contradicts(s.Leases, before.Peers, p.Lease)), "%s: kept %v", p.Lease.Key, kept)
				}
			}
			again, heldAgain := apply(ledger, s, now)
			check(slices.Equal(keys(again), have) && slices.Equal(held, heldAgain), "applied again: %v, %v", again, heldAgain)
			last = s
		}
	}
}

func contradicts(leases []*subnet.Lease, before []subnet.Peer, known subnet.Lease) bool {
	moved := func(e subnet.Endpoint) bool {
		return !slices.ContainsFunc(before, func(p subnet.Peer) bool {
			return slices.ContainsFunc(p.Lease.Endpoints, func(o subnet.Endpoint) bool { return o.PublicIP == e.PublicIP && o.Subnet == e.Subnet })
		})
	}
	for _, l := range leases {
		for _, e := range l.Endpoints {
			for _, k := range known.Endpoints {
				if e.Subnet.Overlaps(k.Subnet) || e.PublicIP == k.PublicIP && moved(e) {
					return true
				}
			}
		}
	}
	return false
}

func randomSnapshot(rnd *rand.Rand, last subnet.Snapshot) subnet.Snapshot {
	s := subnet.Snapshot{Store: last.Store}
	s.Store.Revision += int64(rnd.IntN(5))
	if rnd.IntN(6) == 0 {
		s.Store.ID = string(rune('s' + rnd.IntN(2)))
	}
	if rnd.IntN(6) == 0 {
		s.Store.Revision = int64(rnd.IntN(10))
	}
	for i := range 8 {
		key := fmt.Sprintf("k%d", i)
		switch rnd.IntN(5) {
		case 0:
			s.Undecodable = append(s.Undecodable, key)
		case 1, 2:
			bits := 24 - rnd.IntN(2)
			l := lease(key, uint64(i), fmt.Sprintf("10.5.%d.0/%d", rnd.IntN(6)*2, bits), fmt.Sprintf("192.0.2.%d", i+rnd.IntN(2)))
			s.Leases = append(s.Leases, &l)
		}
	}
	return s
}

// TestLedgerFollows changes a store at random, and replaces it now and then. It compares a
// ledger that follows the changes with one that applies every snapshot.
//
//stages:rest it compares many random changes
func TestLedgerFollows(t *testing.T) {
	followed, whileHeld, contradicted := 0, 0, 0
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 11))
		byChange, bySnapshot := new(subnet.Ledger), new(subnet.Ledger)
		now, store := time.Unix(1700000000, 0), subnet.StoreID{ID: "s"}
		all, broken, former := map[string]*subnet.Lease{}, map[string]bool{}, map[string]*subnet.Lease{}
		for step := range 60 {
			now = now.Add(time.Duration(rnd.IntN(3)) * time.Hour)
			if rnd.IntN(40) == 0 {
				now = now.Add(-30 * time.Hour)
			}
			if rnd.IntN(40) == 0 {
				now = now.Add(30 * time.Hour)
			}
			store.Revision++
			u := subnet.Update{Changed: map[string]*subnet.Lease{}}
			for range 1 + rnd.IntN(3) {
				key := fmt.Sprintf("k%d", rnd.IntN(8))
				if u.Changed[key] != nil || slices.Contains(u.Undecodable, key) {
					continue
				}
				delete(u.Changed, key)
				switch _, have := all[key]; {
				case (have || broken[key] || rnd.IntN(4) == 0) && rnd.IntN(3) == 0: // the store may never have had it
					delete(all, key)
					delete(broken, key)
					u.Changed[key] = nil
				case rnd.IntN(8) == 0:
					delete(all, key)
					broken[key] = true
					u.Undecodable = append(u.Undecodable, key)
				case former[key] != nil && rnd.IntN(3) == 0: // its host writes the same lease again
					l := *former[key]
					all[key] = &l
					delete(broken, key)
					u.Changed[key] = &l
				default:
					l := randomLease(rnd, key, step)
					all[key] = &l
					former[key] = &l
					delete(broken, key)
					u.Changed[key] = &l
				}
			}
			if rnd.IntN(20) == 0 { // another store, or another revision of the same one, without leases
				store = subnet.StoreID{ID: string(rune('s' + rnd.IntN(3))), Revision: int64(rnd.IntN(50))}
				clear(all)
				clear(broken)
				u.Changed = nil
			}
			u.Store = store
			if rnd.IntN(10) == 0 {
				u.Grace = now.Add(time.Hour)
			}
			s := subnet.Snapshot{Store: store, Leases: slices.Collect(maps.Values(all)), Undecodable: slices.Collect(maps.Keys(broken)), Grace: u.Grace}
			bySnapshot.Expire(now)
			n := byChange.Len()
			if expired := byChange.Expire(now); expired != (byChange.Len() < n) {
				t.Fatalf("seed %d step %d: Expire returns %v, and %d of %d peers are left", seed, step, expired, byChange.Len(), n)
			}
			before := byChange.State()
			held := len(byChange.Held())
			if dropped, ok := byChange.Follow(u, now); ok {
				followed++
				contradicted += len(dropped)
				if held > 0 {
					whileHeld++
				}
				expectReported(t, before, byChange, u, dropped)
			} else {
				byChange.Apply(s, now)
			}
			bySnapshot.Apply(s, now)
			if diff := cmp.Diff(bySnapshot.State(), byChange.State(), netipComparer); diff != "" {
				t.Fatalf("seed %d step %d (-by snapshot +by change):\n%s", seed, step, diff)
			}
			if diff := cmp.Diff(bySnapshot.Held(), byChange.Held()); diff != "" {
				t.Fatalf("seed %d step %d: held peers (-by snapshot +by change):\n%s", seed, step, diff)
			}
		}
	}
	if followed < 200*60/2 || whileHeld < 200*60/10 || contradicted < 200 {
		t.Errorf("%d changes were followed, %d of them while peers were held, which dropped %d: not enough to prove anything", followed, whileHeld, contradicted)
	}
}

// TestLedgerNeedsTheSnapshot expects that the ledger does not follow changes without the state to which
// they belong.
func TestLedgerNeedsTheSnapshot(t *testing.T) {
	a := lease("a", 1, "10.5.1.0/24", "192.0.2.1")
	gone := map[string]*subnet.Lease{"a": nil}
	now := time.Unix(1700000000, 0)
	for _, tc := range []struct {
		name     string
		restored bool
		u        subnet.Update
		want     bool
	}{
		{"a later revision", false, subnet.Update{Store: subnet.StoreID{ID: "s", Revision: 11}, Changed: gone}, true},
		{"the same revision", false, subnet.Update{Store: subnet.StoreID{ID: "s", Revision: 10}, Changed: gone}, true},
		{"an earlier revision", false, subnet.Update{Store: subnet.StoreID{ID: "s", Revision: 9}, Changed: gone}, false},
		{"another store", false, subnet.Update{Store: subnet.StoreID{ID: "t", Revision: 11}, Changed: gone}, false},
		{"unknown changes", false, subnet.Update{Store: subnet.StoreID{ID: "s", Revision: 11}}, false},
		{"no snapshot since the start", true, subnet.Update{Store: subnet.StoreID{ID: "s", Revision: 11}, Changed: gone}, false},
	} {
		ledger := new(subnet.Ledger)
		ledger.Apply(snapshot("s", 10, a), now)
		if tc.restored {
			ledger = reload(t, ledger)
		}
		_, ok := ledger.Follow(tc.u, now)
		if ok != tc.want || (ledger.Lease("a") == nil) != tc.want {
			t.Errorf("%s: followed %v, want %v; the lease is %v", tc.name, ok, tc.want, ledger.Lease("a"))
		}
	}
}

// randomLease returns a lease of one or two families. Other leases often have the same subnets and
// addresses.
func randomLease(rnd *rand.Rand, key string, order int) subnet.Lease {
	bits := 24 - rnd.IntN(8)/7
	ends := []string{fmt.Sprintf("10.5.%d.0/%d", rnd.IntN(10)*2, bits), fmt.Sprintf("192.0.2.%d", rnd.IntN(20))}
	if rnd.IntN(3) == 0 {
		ends = append(ends, fmt.Sprintf("fd00:10:5:%x::/64", rnd.IntN(20)), fmt.Sprintf("2001:db8::%d", rnd.IntN(20)))
	}
	if rnd.IntN(10) == 0 {
		ends[1] = "0.0.0.0"
	}
	return lease(key, uint64(order), ends...)
}

// expectReported expects that every peer that is gone after Follow is in u.Changed or in dropped,
// because other code looks only at these, and that the ledger does not know the peers in dropped.
func expectReported(t *testing.T, before subnet.LedgerState, after *subnet.Ledger, u subnet.Update, dropped []string) {
	t.Helper()
	for _, p := range before.Peers {
		_, changed := u.Changed[p.Lease.Key]
		if after.Lease(p.Lease.Key) == nil && !changed && !slices.Contains(dropped, p.Lease.Key) {
			t.Fatalf("%s went, and dropped is %v after %+v", p.Lease.Key, dropped, u)
		}
	}
	for _, key := range dropped {
		if after.Lease(key) != nil {
			t.Fatalf("%s is reported as dropped and is still known", key)
		}
	}
}

// ledgerOf returns a ledger that knows n peers, and their leases. The parameter held is the number of
// peers that the ledger holds, because they are missing from the store: they are the first ones.
func ledgerOf(n, held int) (*subnet.Ledger, []*subnet.Lease) {
	all := make([]*subnet.Lease, n)
	for i := range all {
		l := lease(fmt.Sprintf("10.%d.%d.0-24", i>>8, i&0xff), uint64(i), fmt.Sprintf("10.%d.%d.0/24", i>>8, i&0xff), fmt.Sprintf("172.16.%d.%d", i>>8, i&0xff))
		all[i] = &l
	}
	now, ledger := time.Unix(1700000000, 0), new(subnet.Ledger)
	ledger.Apply(subnet.Snapshot{Leases: all, Store: subnet.StoreID{ID: "s", Revision: 1}}, now)
	ledger.Apply(subnet.Snapshot{Leases: all[held:], Store: subnet.StoreID{ID: "t", Revision: 1}}, now)
	return ledger, all
}

// BenchmarkLedgerEvent measures one changed lease of 10,000, with no peer held and with one.
func BenchmarkLedgerEvent(b *testing.B) {
	for _, held := range []int{0, 1} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			ledger, all := ledgerOf(10_000, held)
			now := time.Unix(1700000000, 0)
			changed := map[string]*subnet.Lease{}
			for i := 0; b.Loop(); i++ {
				l := all[held+i%(len(all)-held)]
				clear(changed)
				changed[l.Key] = l
				if _, ok := ledger.Follow(subnet.Update{Store: subnet.StoreID{ID: "t", Revision: int64(i + 2)}, Changed: changed}, now); !ok {
					b.Fatal("not followed")
				}
				ledger.Expire(now)
			}
			if n := len(ledger.Held()); n != held {
				b.Fatalf("%d peers are held, want %d", n, held)
			}
		})
	}
}

// BenchmarkLedgerWiped measures how long the ledger takes to follow all peers that come back one by
// one after the store was emptied. The metric ns/peer is the time for one of them.
func BenchmarkLedgerWiped(b *testing.B) {
	for _, n := range []int{4_000, 10_000} {
		b.Run(fmt.Sprintf("peers=%d", n), func(b *testing.B) {
			now := time.Unix(1700000000, 0)
			for b.Loop() {
				b.StopTimer()
				ledger, all := ledgerOf(n, n)
				b.StartTimer()
				for i, l := range all {
					u := subnet.Update{Store: subnet.StoreID{ID: "t", Revision: int64(i + 2)}, Changed: map[string]*subnet.Lease{l.Key: l}}
					if _, ok := ledger.Follow(u, now); !ok {
						b.Fatal("not followed")
					}
					ledger.Expire(now)
				}
				if n := len(ledger.Held()); n != 0 {
					b.Fatalf("%d peers are held", n)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/peer")
		})
	}
}

// TestLedgerLetsGoOfListings keeps one lease of a listing longer than the others: because it has
// become unreadable, or because the ledger holds it after the store was replaced. The listing must not
// stay in memory for that lease, whether it came from a store or from disk.
func TestLedgerLetsGoOfListings(t *testing.T) {
	now := time.Unix(1700000000, 0)
	listed := func() []subnet.Lease {
		return []subnet.Lease{lease("a", 1, "10.5.1.0/24", "192.0.2.1"), lease("b", 2, "10.5.2.0/24", "192.0.2.2")}
	}
	for _, tc := range []struct {
		name string
		next subnet.Snapshot
	}{
		{"unreadable", undecodable(snapshot("s", 2), "a")},
		{"held", snapshot("t", 2)},
	} {
		for _, restored := range []bool{false, true} {
			ledger := new(subnet.Ledger)
			var first weak.Pointer[subnet.Lease]
			if restored {
				state := subnet.LedgerState{Store: subnet.StoreID{ID: "s", Revision: 1}}
				for _, l := range listed() {
					state.Peers = append(state.Peers, subnet.Peer{Lease: l})
				}
				first = weak.Make(&state.Peers[0].Lease)
				ledger.Restore(state, now)
			} else {
				s := snapshot("s", 1, listed()...)
				first = weak.Make(s.Leases[0])
				ledger.Apply(s, now)
			}
			ledger.Apply(tc.next, now)
			runtime.GC()
			if first.Value() != nil {
				t.Errorf("%s, restored %v: the listing of the lease is still in memory", tc.name, restored)
			}
			if ledger.Lease("a") == nil {
				t.Errorf("%s, restored %v: the lease is gone", tc.name, restored)
			}
		}
	}
}
