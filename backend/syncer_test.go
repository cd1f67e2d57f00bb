// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// network records the calls of Sync and Check. A lease's data is its identity.
type network struct {
	fail    int     // how many of the next Syncs fail
	errs    []error // errors of the next Syncs that fail; further ones return "kernel says no"
	outcome backend.Outcome

	mu      sync.Mutex
	sets    []string // keys of each set, with "*" in front if the set was complete
	last    backend.Set
	refused []string // keys of the refused leases at the last Sync
	checked []string // keys of the leases that were checked since the last call of checks
}

// checks returns the sorted keys of the leases that were checked since its last call.
func (n *network) checks() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := n.checked
	n.checked = nil
	return slices.Sorted(slices.Values(all))
}

// hint returns the sorted changed keys of the last set, or nil if any lease may have changed.
func (n *network) hint() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.last.All {
		return nil
	}
	return slices.Sorted(slices.Values(n.last.Changed))
}

func (n *network) syncs() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.sets)
}

func (*network) Changed() <-chan struct{} { return nil }
func (*network) Close() error             { return nil }

func (n *network) Check(l subnet.Lease) ([]string, error) {
	n.mu.Lock()
	n.checked = append(n.checked, l.Key)
	n.mu.Unlock()
	var ids []string
	for _, e := range l.Endpoints {
		var id string
		if err := json.Unmarshal(e.Data, &id); err != nil {
			return nil, errors.New("no identity")
		}
		ids = append(ids, "MAC "+id)
	}
	return ids, nil
}

func (*network) Report() backend.NetworkReport { return backend.NetworkReport{} }

func (n *network) Sync(_ context.Context, peers backend.Set) (backend.Outcome, error) {
	s := strings.Join(slices.Sorted(maps.Keys(peers.Leases)), " ")
	if peers.Complete {
		s = "*" + s
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.sets, n.last, n.refused = append(n.sets, s), peers, nil
	for _, l := range peers.Refused() {
		n.refused = append(n.refused, l.Key)
	}
	slices.Sort(n.refused)
	if n.fail > 0 {
		n.fail--
		return backend.Outcome{}, n.err()
	}
	return n.outcome, nil
}

// err returns the error of the next Sync that fails, and removes it from errs. The caller holds
// n.mu.
func (n *network) err() error {
	if len(n.errs) == 0 {
		return errors.New("kernel says no")
	}
	err := n.errs[0]
	n.errs = n.errs[1:]
	return err
}

// lease returns the lease of host i, with the key "host<i>", the subnet 10.5.i.0/24 and the public
// address 192.168.77.i. id is its identity.
func lease(i int, id string) subnet.Lease {
	return subnet.Lease{
		Key: fmt.Sprintf("host%d", i), Order: uint64(i), BackendType: "test",
		Endpoints: []subnet.Endpoint{{
			Subnet:   netip.MustParsePrefix(fmt.Sprintf("10.5.%d.0/24", i)),
			PublicIP: netip.MustParseAddr(fmt.Sprintf("192.168.77.%d", i)),
			Data:     json.RawMessage(fmt.Sprintf("%q", id)),
		}},
	}
}

func snapshot(revision int64, leases ...subnet.Lease) subnet.Snapshot {
	return subnet.Snapshot{Leases: subnettest.Pointers(leases...), Store: subnet.StoreID{ID: "a", Revision: revision}}
}

// fullUpdate returns an update with a snapshot and without a hint about changes.
func fullUpdate(s subnet.Snapshot) subnet.Update {
	return subnet.Update{Store: s.Store, Snapshot: func() subnet.Snapshot { return s }}
}

// deltaUpdate returns an update with changed leases only. gone contains the keys of
// removed leases.
func deltaUpdate(revision int64, leases []subnet.Lease, gone ...string) subnet.Update {
	u := subnet.Update{Store: subnet.StoreID{ID: "a", Revision: revision}, Changed: map[string]*subnet.Lease{}}
	for _, l := range leases {
		u.Changed[l.Key] = &l
	}
	for _, key := range gone {
		u.Changed[key] = nil
	}
	return u
}

// run starts a Syncer of host 1 in the synctest bubble. known contains the peers in the state on
// disk, if there is one. The returned function returns the text that was logged until now.
func run(t *testing.T, n backend.Network, known ...subnet.Lease) (*backend.Syncer, func() string) {
	t.Helper()
	return runOnSync(t, n, nil, known...)
}

// testSides are the sides of the backend of this host.
var testSides = []backend.Side{{Type: "test", LeaseType: "test"}}

// runOnSync is like run, and calls onSync after every pass.
func runOnSync(t *testing.T, n backend.Network, onSync func(backend.Pass), known ...subnet.Lease) (*backend.Syncer, func() string) {
	t.Helper()
	ledger := &subnet.Ledger{}
	if known != nil {
		ledger.Apply(snapshot(1, known...), time.Now())
	}
	s := backend.NewSyncer(backend.SyncerConfig{
		Config: subnet.Config{Networks: []subnet.Network{{Prefix: netip.MustParsePrefix("10.5.0.0/16")}}, BackendType: "test"},
		Own:    lease(1, "one"), Network: n, Sides: testSides, Ledger: ledger, Resync: time.Hour, OnSync: onSync,
		Migrated: true,
	})
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	synctest.Wait()
	return s, logger.GetSink().(ktesting.Underlier).GetBuffer().String
}

// TestRefusedByABackendWithoutALeaseType checks that the reason names the type in the configuration,
// because the leases of some backends have none.
func TestRefusedByABackendWithoutALeaseType(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		own := lease(1, "one")
		own.BackendType = ""
		s := backend.NewSyncer(backend.SyncerConfig{
			Config: subnet.Config{Networks: []subnet.Network{{Prefix: netip.MustParsePrefix("10.5.0.0/16")}}, BackendType: "untyped"},
			Own:    own, Network: &network{}, Sides: []backend.Side{{Type: "untyped"}}, Ledger: &subnet.Ledger{}, Resync: time.Hour,
		})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = s.Run(ctx) })
		s.Publish(fullUpdate(snapshot(2, lease(2, "two"))))
		synctest.Wait()
		in, err := s.Inspect(ctx, false)
		if want := `its backend type is "test", ours "untyped"`; err != nil || len(in.Peers) != 1 || in.Peers[0].Refused != want {
			t.Errorf("%+v, %v, want one peer that is refused because %s", in.Peers, err, want)
		}
		cancel()
		running.Wait()
	})
}

func expectSyncs(t *testing.T, n *network, want ...string) {
	t.Helper()
	synctest.Wait()
	if diff := cmp.Diff(want, n.syncs()); diff != "" {
		t.Errorf("syncs (-want +got):\n%s", diff)
	}
}

// advance lets the fake time d of the synctest bubble pass, and waits for all effects.
func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func TestSetIsIncompleteBeforeFirstSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, _ := run(t, n, lease(2, "two"))
		expectSyncs(t, n, "host2")
		s.Publish(fullUpdate(snapshot(2, lease(3, "three"))))
		expectSyncs(t, n, "host2", "*host3")
	})
}

func TestRefusals(t *testing.T) {
	alien := lease(4, "four")
	alien.BackendType = "other"
	overlap := lease(5, "five")
	overlap.Endpoints[0].Subnet = netip.MustParsePrefix("10.5.2.0/25")
	mangled := lease(6, "")
	mangled.Endpoints[0].Data = nil
	for _, tc := range []struct {
		name   string
		bad    subnet.Lease
		reason string
	}{
		{"another backend", alien, `its backend type is \"other\", ours \"test\"`},
		{"overlap", overlap, "10.5.2.0/25 overlaps 10.5.2.0/24 of host2, which was there first"},
		{"bad data", mangled, "no identity"},
		{"our identity", lease(7, "one"), "its MAC one is that of this node"},
		{"a peer's identity", lease(8, "two"), "its MAC two is that of host2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &network{}
				s, log := run(t, n)
				s.Publish(fullUpdate(snapshot(2, tc.bad, lease(2, "two"))))
				expectSyncs(t, n, "", "*host2")
				s.Publish(fullUpdate(snapshot(3, tc.bad, lease(2, "two"), lease(3, "three"))))
				expectSyncs(t, n, "", "*host2", "*host2 host3")
				if got := strings.Count(log(), tc.reason); got != 1 {
					t.Errorf("reason logged %d times, want once:\n%s", got, log())
				}
				s.Publish(fullUpdate(snapshot(4, lease(2, "two"))))
				synctest.Wait()
				if !strings.Contains(log(), "lease no longer refused") {
					t.Errorf("the end of the refusal is not in the log:\n%s", log())
				}
			})
		})
	}
}

// TestDisabledFamilyIsNotChecked checks that data of a family which the configuration
// does not enable does not make a lease unusable.
func TestDisabledFamilyIsNotChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, log := run(t, n)
		disabled := subnet.Endpoint{Subnet: netip.MustParsePrefix("fd00:5:0:2::/64"), PublicIP: netip.MustParseAddr("fd00:77::2")}
		both, only := lease(2, "two"), lease(3, "three")
		both.Endpoints = append(both.Endpoints, disabled)
		only.Endpoints = []subnet.Endpoint{disabled}
		s.Publish(fullUpdate(snapshot(2, both, only)))
		expectSyncs(t, n, "", "*host2")
		if strings.Contains(log(), "host2") || !strings.Contains(log(), `lease="host3" reason="has no subnet of an enabled address family"`) {
			t.Errorf("want host3 to be refused, and not host2:\n%s", log())
		}
	})
}

// TestSharedAddressIsLoggedOnce checks that leases with the same public address are all
// served, and that the log names two of them once when that begins, and once when it
// ends.
func TestSharedAddressIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, log := run(t, n)
		at2 := func(host int, identity string) subnet.Lease {
			l := lease(host, identity)
			l.Endpoints[0].PublicIP = lease(2, "").Endpoints[0].PublicIP
			return l
		}
		expect := func(begun, ended int, syncs ...string) {
			t.Helper()
			expectSyncs(t, n, syncs...)
			for text, want := range map[string]int{
				`leases share a public address publicIP="192.168.77.2" leases=["host2","host3"] count=2`: begun,
				`leases no longer share a public address publicIP="192.168.77.2"`:                        ended,
				"refused": 0,
			} {
				if got := strings.Count(log(), text); got != want {
					t.Errorf("%d lines with %q, want %d:\n%s", got, text, want, log())
				}
			}
		}
		syncs := []string{""}
		publish := func(u subnet.Update, served string) {
			s.Publish(u)
			syncs = append(syncs, "*"+served)
		}
		publish(fullUpdate(snapshot(2, lease(2, "two"), at2(3, "three"))), "host2 host3")
		expect(1, 0, syncs...)
		publish(deltaUpdate(3, []subnet.Lease{at2(4, "four")}), "host2 host3 host4")
		expect(1, 0, syncs...)
		if diff := cmp.Diff([]string{"host4"}, n.hint()); diff != "" {
			t.Errorf("hint (-want +got):\n%s", diff)
		}
		publish(deltaUpdate(4, nil, "host4", "host2"), "host3")
		expect(1, 1, syncs...)
		publish(deltaUpdate(5, []subnet.Lease{lease(2, "two")}), "host2 host3")
		expect(2, 1, syncs...)
	})
}

// TestUpdateChecksOnlyChangedLeases checks that the Syncer validates only the changed leases, and all
// leases when a conflict begins or ends. The hint to the network must contain only the changed
// leases, and a refusal must end when the lease in conflict is removed.
func TestUpdateChecksOnlyChangedLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, log := run(t, n)
		expectChecks := func(want ...string) {
			t.Helper()
			if diff := cmp.Diff(want, n.checks()); diff != "" {
				t.Errorf("validated leases (-want +got):\n%s", diff)
			}
		}
		s.Publish(fullUpdate(snapshot(2, lease(2, "two"), lease(3, "three"))))
		expectSyncs(t, n, "", "*host2 host3")
		n.checks()
		s.Publish(deltaUpdate(3, []subnet.Lease{lease(4, "four")}, "host2"))
		expectSyncs(t, n, "", "*host2 host3", "*host3 host4")
		expectChecks("host4")
		if diff := cmp.Diff([]string{"host2", "host4"}, n.hint()); diff != "" {
			t.Errorf("hint (-want +got):\n%s", diff)
		}
		s.Publish(deltaUpdate(4, []subnet.Lease{lease(5, "three")}))
		expectSyncs(t, n, "", "*host2 host3", "*host3 host4", "*host3 host4")
		expectChecks("host3", "host4", "host5", "host5")
		s.Publish(deltaUpdate(5, nil, "host3"))
		expectSyncs(t, n, "", "*host2 host3", "*host3 host4", "*host3 host4", "*host4 host5")
		expectChecks("host4", "host5")
		for text, want := range map[string]int{"its MAC three is that of host3": 1, "lease no longer refused": 1} {
			if got := strings.Count(log(), text); got != want {
				t.Errorf("%q logged %d times, want %d:\n%s", text, got, want, log())
			}
		}
	})
}

// TestRefusalsAreLimited lets a host make its lease wrong and right again many times, and then share the
// public address of another host and stop that.
func TestRefusalsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, log := run(t, n)
		s.Publish(fullUpdate(snapshot(1, lease(3, "three"))))
		for i := range int64(1000) {
			l := lease(2, "two")
			if i%2 == 0 {
				l.Endpoints[0].PublicIP = lease(3, "three").Endpoints[0].PublicIP
			}
			s.Publish(deltaUpdate(2+i, []subnet.Lease{l}))
			synctest.Wait()
		}
		if got := strings.Count(log(), "share a public address"); got != 100 {
			t.Errorf("%d lines about a shared address, want 100", got)
		}
		for i := range int64(1000) {
			l := lease(2, "two")
			if i%2 == 0 {
				l.Endpoints[0].Subnet = netip.MustParsePrefix("10.6.0.0/24")
			}
			s.Publish(deltaUpdate(1002+i, []subnet.Lease{l}))
			synctest.Wait()
		}
		if got := strings.Count(log(), "lease refused") + strings.Count(log(), "lease no longer refused"); got != 100 {
			t.Errorf("%d lines, want 100", got)
		}
		time.Sleep(time.Minute)
		wrong := lease(2, "two")
		wrong.Endpoints[0].Subnet = netip.MustParsePrefix("10.6.0.0/24")
		s.Publish(deltaUpdate(3000, []subnet.Lease{wrong}))
		synctest.Wait()
		if want := "changesNotLogged="; !strings.Contains(log(), want) {
			t.Errorf("the next line does not have the number of the others, %q", want)
		}
	})
}

// TestAcceptedPeerKeepsItsIdentity lets an older host claim the identity of a peer. Then the peer moves:
// its lease is written later than that of the other, and must keep the identity, also after a restart.
func TestAcceptedPeerKeepsItsIdentity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		write := func(revision uint64, l subnet.Lease) subnet.Lease {
			l.Claimed = revision
			return l
		}
		n := &network{}
		s, log := run(t, n)
		s.Publish(fullUpdate(snapshot(5, write(2, lease(2, "two")), write(3, lease(3, "three")))))
		expectSyncs(t, n, "", "*host2 host3")

		s.Publish(deltaUpdate(6, []subnet.Lease{write(6, lease(2, "three"))}))
		expectSyncs(t, n, "", "*host2 host3", "*host3")

		moved := write(7, lease(3, "three"))
		moved.Endpoints[0].PublicIP = netip.MustParseAddr("192.168.78.3")
		s.Publish(deltaUpdate(7, []subnet.Lease{moved}))
		expectSyncs(t, n, "", "*host2 host3", "*host3", "*host3")

		// A second identity, as for a family or a backend that is enabled later, comes with its own time.
		more := write(8, lease(3, "three"))
		more.Endpoints = append(more.Endpoints, lease(4, "four").Endpoints...)
		s.Publish(deltaUpdate(8, []subnet.Lease{more}))
		expectSyncs(t, n, "", "*host2 host3", "*host3", "*host3", "*host3")
		if got, want := s.Ledger.Lease("host3").Kept, map[string]uint64{"MAC three": 3}; !maps.Equal(got, want) {
			t.Errorf("host3 keeps %v, want %v", got, want)
		}

		// After a reconnection the store sends a snapshot in which the peer has moved again.
		again := write(9, lease(3, "three"))
		again.Endpoints[0].PublicIP = netip.MustParseAddr("192.168.79.3")
		s.Publish(fullUpdate(snapshot(9, write(6, lease(2, "three")), again)))
		expectSyncs(t, n, "", "*host2 host3", "*host3", "*host3", "*host3", "*host3")

		state := s.Ledger.State()
		restarted := &network{}
		after, _ := run(t, restarted)
		after.Publish(fullUpdate(snapshot(8, state.Peers[0].Lease, state.Peers[1].Lease)))
		expectSyncs(t, restarted, "", "*host3")
		if want := "its MAC three is that of host3"; !strings.Contains(log(), want) {
			t.Errorf("%q is not in the log:\n%s", want, log())
		}
	})
}

// migrating implements NextChecker. The next backend starts in the second pass. Leases claim their
// NextType for it.
type migrating struct{ *network }

func (n migrating) CheckNext(l subnet.Lease) ([]string, *subnet.Lease) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case len(n.sets) < 2:
		return nil, nil
	case l.Key == "host1":
		return []string{"key one"}, nil
	}
	without := l
	without.NextType = ""
	return []string{"key " + l.NextType}, &without
}

func (n migrating) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	out, err := n.network.Sync(ctx, peers)
	out.Recheck = len(n.syncs()) == 2
	return out, err
}

// TestIdentityForTheNextBackend lets a host write the identities of others for a next backend, which
// starts after the leases have come. Its lease must go on without that backend.
func TestIdentityForTheNextBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		write := func(revision uint64, n int, next string) subnet.Lease {
			l := lease(n, fmt.Sprint(n))
			l.Claimed, l.NextType = revision, next
			return l
		}
		n := &network{}
		s, log := run(t, migrating{n})
		s.Publish(fullUpdate(snapshot(5, write(5, 2, "three"), write(3, 3, "three"), write(5, 4, "one"))))
		advance(time.Second)
		n.mu.Lock()
		defer n.mu.Unlock()
		for key, want := range map[string]string{"host2": "", "host3": "three", "host4": ""} {
			if l := n.last.Leases[key]; l == nil || l.NextType != want {
				t.Errorf("%s is served as %+v, want the next type %q", key, l, want)
			}
		}
		for _, want := range []string{"its key three is that of host3", "its key one is that of this node"} {
			if !strings.Contains(log(), want) {
				t.Errorf("%q is not in the log:\n%s", want, log())
			}
		}
	})
}

// TestIdentityWithoutTheNextBackend lets a lease, which is used without its next backend, be written again
// after another host has claimed its identity. It must keep the identity.
func TestIdentityWithoutTheNextBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		victim := lease(3, "three")
		victim.Claimed, victim.NextType = 3, "one" // the key of this host
		n := &network{}
		s, _ := run(t, migrating{n})
		s.Publish(fullUpdate(snapshot(5, victim)))
		advance(time.Second)

		thief := lease(2, "three")
		thief.Claimed = 6
		victim.Claimed = 9
		s.Publish(fullUpdate(snapshot(9, thief, victim)))
		synctest.Wait()
		n.mu.Lock()
		defer n.mu.Unlock()
		if got := slices.Collect(maps.Keys(n.last.Leases)); !slices.Equal(got, []string{"host3"}) || n.last.Leases["host3"].NextType != "" {
			t.Errorf("served are %v, want host3 without its next backend", n.last.Leases)
		}
	})
}

// TestRefusedLeasesArePassedOn checks that a network can find the leases that it does not serve:
// one without an identity, and one that another lease contradicts. It also checks that the network
// learns when the store has an unreadable lease, and when it no longer has one.
func TestRefusedLeasesArePassedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, _ := run(t, n)
		bad := lease(3, "")
		bad.Endpoints[0].Data = nil
		first := snapshot(2, lease(2, "two"), bad, lease(4, "two"))
		first.Undecodable = []string{"host5"}
		s.Publish(fullUpdate(first))
		expectSyncs(t, n, "", "*host2")
		if !n.last.Unreadable {
			t.Error("the network does not learn of the unreadable lease")
		}
		if want := []string{"host3", "host4"}; !slices.Equal(n.refused, want) {
			t.Errorf("refused leases %v, want %v", n.refused, want)
		}
		s.Publish(deltaUpdate(3, []subnet.Lease{lease(3, "three")}, "host4", "host5"))
		expectSyncs(t, n, "", "*host2", "*host2 host3")
		if n.last.Unreadable {
			t.Error("the unreadable lease is gone, and the network does not learn that")
		}
		if len(n.refused) > 0 {
			t.Errorf("refused leases %v, want none any more", n.refused)
		}
	})
}

// TestRefusalAfterChange checks that a lease that becomes invalid, and valid again, is
// reported although only changed leases are checked.
func TestRefusalAfterChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, log := run(t, n)
		s.Publish(fullUpdate(snapshot(2, lease(2, "two"), lease(3, "three"))))
		expectSyncs(t, n, "", "*host2 host3")
		bad := lease(3, "")
		bad.Endpoints[0].Data = nil
		s.Publish(deltaUpdate(3, []subnet.Lease{bad}))
		expectSyncs(t, n, "", "*host2 host3", "*host2")
		if in, err := s.Inspect(t.Context(), false); err != nil || len(in.Peers) != 2 || in.Peers[1].Refused != "no identity" {
			t.Errorf("%+v, %v, want host3 without an identity", in.Peers, err)
		}
		s.Publish(deltaUpdate(4, []subnet.Lease{lease(3, "three")}))
		expectSyncs(t, n, "", "*host2 host3", "*host2", "*host2 host3")
		if in, err := s.Inspect(t.Context(), false); err != nil || len(in.Peers) != 2 || in.Peers[1].Refused != "" {
			t.Errorf("%+v, %v, want host3 to be served again", in.Peers, err)
		}
		for text, want := range map[string]int{`reason="no identity"`: 1, "lease no longer refused": 1} {
			if got := strings.Count(log(), text); got != want {
				t.Errorf("%q logged %d times, want %d:\n%s", text, got, want, log())
			}
		}
	})
}

// TestPassReportsNews checks which passes report news. News means that the state on disk must be
// written again.
func TestPassReportsNews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var passes, news atomic.Int32
		s, _ := runOnSync(t, &network{}, func(p backend.Pass) {
			passes.Add(1)
			if p.News {
				news.Add(1)
			}
		}, lease(2, "two"))
		for _, step := range []struct {
			what string
			do   func()
			news int32
		}{
			{"a pass without an update", func() { advance(2 * time.Hour) }, 0},
			{"a snapshot", func() { s.Publish(fullUpdate(snapshot(2, lease(2, "two"), lease(3, "three")))) }, 1},
			{"a pass without an update", func() { advance(2 * time.Hour) }, 0},
			{"a change", func() { s.Publish(deltaUpdate(3, nil, "host3")) }, 1},
			{"another revision", func() { s.Publish(deltaUpdate(4, nil)) }, 0},
			{"an empty store", func() {
				s.Publish(fullUpdate(subnet.Snapshot{Store: subnet.StoreID{ID: "another", Revision: 1}}))
			}, 1},
			{"the end of a held peer", func() { advance(subnet.TTL + 2*time.Hour) }, 1},
		} {
			step.do()
			synctest.Wait()
			if n, of := news.Swap(0), passes.Swap(0); (of == 0) != (step.what == "another revision") || n != step.news {
				t.Errorf("%s: news at %d of %d passes, want %d", step.what, n, of, step.news)
			}
		}
	})
}

func TestFailureIsRetriedAndLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{fail: 4, errs: []error{errors.New("interrupted")}}
		_, log := run(t, n)
		advance(30 * time.Second)
		if len(n.syncs()) != 5 {
			t.Errorf("%d syncs, want 4 failures and a success", len(n.syncs()))
		}
		for text, want := range map[string]int{"interrupted": 1, "kernel says no": 1, "in order again": 1} {
			if got := strings.Count(log(), text); got != want {
				t.Errorf("%q logged %d times, want %d:\n%s", text, got, want, log())
			}
		}
	})
}

// TestErrorsThatDifferEachTime checks that about one error a minute is logged while each
// pass fails with a new text.
func TestErrorsThatDifferEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		for i := range 1000 {
			n.errs = append(n.errs, fmt.Errorf("attempt %d", i))
		}
		n.fail = len(n.errs)
		s, log := run(t, n)
		for i := range 600 { // a change every second causes a pass each
			s.Publish(fullUpdate(snapshot(int64(i))))
			advance(time.Second)
		}
		if lines := strings.Count(log(), "trying again"); lines < 10 || lines > 20 {
			t.Errorf("%d errors logged of %d in ten minutes, want about one a minute:\n%s", lines, len(n.syncs()), log())
		}
	})
}

func TestTemporaryRefusalIsRetried(t *testing.T) {
	for _, again := range []time.Duration{0, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			refused := backend.Outcome{Again: again, Retry: true, Refused: []subnet.Refusal{{Key: "host2", Reason: "unreachable"}}}
			n := &network{outcome: refused}
			s, _ := run(t, n)
			advance(time.Minute)
			if len(n.syncs()) < 5 {
				t.Errorf("again %v: %d syncs in a minute", again, len(n.syncs()))
			}

			// After a pass without a refusal, the next refusal is retried as soon as the first one was.
			advance(10 * time.Minute)
			for i, outcome := range []backend.Outcome{{}, refused} {
				n.mu.Lock()
				n.outcome = outcome
				n.mu.Unlock()
				s.Publish(fullUpdate(snapshot(int64(2+i), lease(3+i, "x"))))
				synctest.Wait()
			}
			before := len(n.syncs())
			advance(time.Minute)
			if got := len(n.syncs()) - before; got < 5 {
				t.Errorf("again %v: %d syncs in a minute after a pass without a refusal", again, got)
			}
		})
	}
}

// TestBroadcastAddressIsRefused checks that a peer whose public address is a broadcast address of this host
// is refused, that the owner of the Syncer learns it, and that a change of one lease does not read the
// addresses again until the interval between passes is over.
func TestBroadcastAddressIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		broadcast := netip.MustParseAddr("192.168.77.2")
		reads := 0
		s := backend.NewSyncer(backend.SyncerConfig{
			Config: subnet.Config{Networks: []subnet.Network{{Prefix: netip.MustParsePrefix("10.5.0.0/16")}}, BackendType: "test"},
			Own:    lease(1, "one"), Network: &network{}, Sides: testSides, Ledger: &subnet.Ledger{}, Resync: time.Hour,
			Broadcasts: func() []netip.Addr {
				reads++
				return []netip.Addr{broadcast}
			},
			OnRefused: func(key, reason string) { told = append(told, key+": "+reason) },
		})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = s.Run(ctx) })
		defer running.Wait()
		defer cancel()

		s.Publish(fullUpdate(snapshot(2, lease(2, "two"), lease(3, "three"))))
		advance(time.Minute)
		before := reads
		s.Publish(deltaUpdate(3, []subnet.Lease{lease(4, "four")}))
		advance(time.Minute)
		if reads != before {
			t.Errorf("a change of one lease reads the addresses of this host")
		}

		broadcast = netip.MustParseAddr("192.168.77.5")
		advance(time.Hour)
		s.Publish(deltaUpdate(4, []subnet.Lease{lease(5, "five")}))
		advance(time.Minute)
		want := []string{
			"host2: 10.5.2.0/24 has public IP 192.168.77.2, which is a broadcast address",
			"host5: 10.5.5.0/24 has public IP 192.168.77.5, which is a broadcast address",
		}
		if !slices.Equal(told, want) {
			t.Errorf("refused: %q, want %q", told, want)
		}
	})
}

// TestRefusalDelaysNothingElse checks that a peer that is unreachable for long delays
// neither the retry of another failure, nor a pass that Outcome.Again requests.
func TestRefusalDelaysNothingElse(t *testing.T) {
	refused := backend.Outcome{Retry: true, Refused: []subnet.Refusal{{Key: "host2", Reason: "unreachable"}}}
	again := refused
	again.Again = time.Second
	for _, tc := range []struct {
		name    string
		fail    int
		outcome backend.Outcome
		within  time.Duration
	}{
		{"a failure", 1, refused, 250 * time.Millisecond},
		{"a pass is requested", 0, again, time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &network{outcome: refused}
				s, _ := run(t, n)
				s.Publish(fullUpdate(snapshot(2, lease(2, "two"))))
				advance(10 * time.Minute)
				if got := len(n.syncs()); got > 40 {
					t.Errorf("%d syncs in ten minutes", got)
				}
				n.mu.Lock()
				n.fail, n.outcome = tc.fail, tc.outcome
				n.mu.Unlock()
				s.Publish(deltaUpdate(3, []subnet.Lease{lease(3, "three")}))
				synctest.Wait()
				before := len(n.syncs())
				advance(tc.within)
				if got := len(n.syncs()) - before; got != 1 {
					t.Errorf("%d syncs within %s, want one", got, tc.within)
				}
			})
		})
	}
}

// TestRefusalOfTheKernelEnds checks that a refusal by the network stays during a failed pass, and
// ends when the network no longer refuses the peer.
func TestRefusalOfTheKernelEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{outcome: backend.Outcome{Refused: []subnet.Refusal{{Key: "host2", Reason: "directly connected"}}}}
		s, log := run(t, n)
		refused := func() string {
			t.Helper()
			in, err := s.Inspect(t.Context(), false)
			if err != nil || len(in.Peers) != 1 {
				t.Fatalf("%+v, %v", in, err)
			}
			return in.Peers[0].Refused
		}
		s.Publish(fullUpdate(snapshot(2, lease(2, "two"))))
		synctest.Wait()
		if got := refused(); got != "directly connected" {
			t.Errorf("refused for %q", got)
		}
		n.mu.Lock()
		n.fail = 1
		n.mu.Unlock()
		s.Publish(deltaUpdate(3, []subnet.Lease{lease(2, "two")})) // the pass fails, and the next one refuses the peer again
		synctest.Wait()
		if got := refused(); got != "directly connected" {
			t.Errorf("after a failed pass: refused for %q", got)
		}
		advance(time.Minute)
		for text, want := range map[string]int{"lease refused": 1, "lease no longer refused": 0} {
			if got := strings.Count(log(), text); got != want {
				t.Errorf("%q logged %d times, want %d:\n%s", text, got, want, log())
			}
		}
		n.mu.Lock()
		n.outcome = backend.Outcome{}
		n.mu.Unlock()
		advance(2 * time.Hour) // a pass without a changed lease
		if got := refused(); got != "" {
			t.Errorf("still refused for %q", got)
		}
		if got := strings.Count(log(), "lease no longer refused"); got != 1 {
			t.Errorf("the end is logged %d times, want once:\n%s", got, log())
		}
		n.mu.Lock()
		n.outcome = backend.Outcome{Refused: []subnet.Refusal{{Key: "host2", Reason: "directly connected"}}}
		n.mu.Unlock()
		advance(time.Hour * 6 / 5) // the next pass
		if got := refused(); got != "directly connected" {
			t.Errorf("refused again for %q", got)
		}
	})
}

// TestPeersAreHeldWhenStoreIsWiped checks that peers which another, empty store does not
// contain are held for the time of a lease.
func TestPeersAreHeldWhenStoreIsWiped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, log := run(t, n, lease(2, "two"))
		wiped := snapshot(1)
		wiped.Store.ID = "b"
		s.Publish(fullUpdate(wiped))
		expectSyncs(t, n, "host2", "*host2")
		if !strings.Contains(log(), "forgotten peers") {
			t.Errorf("not in the log:\n%s", log())
		}
		advance(subnet.TTL + 2*time.Hour)
		if last := n.syncs()[len(n.syncs())-1]; last != "*" {
			t.Errorf("after the TTL: %q", last)
		}
	})
}

// TestHeldPeersReturnOneByOne checks three things while peers are held: the hint to the network
// contains only the changed leases, a held peer is removed when another lease has its subnet, and
// the fall of the number of held peers is logged only when it reaches zero.
func TestHeldPeersReturnOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s, log := run(t, n, lease(2, "two"), lease(3, "three"), lease(4, "four"))
		wiped := snapshot(1)
		wiped.Store.ID = "b"
		s.Publish(fullUpdate(wiped))
		expectSyncs(t, n, "host2 host3 host4", "*host2 host3 host4")
		publish := func(revision int64, want string, hint ...string) {
			t.Helper()
			l := lease(int(revision), fmt.Sprint(revision))
			if revision == 5 { // host5 has taken the subnet of a held peer
				l.Endpoints[0].Subnet = lease(3, "").Endpoints[0].Subnet
			}
			u := deltaUpdate(revision, []subnet.Lease{l})
			u.Store.ID = "b"
			s.Publish(u)
			synctest.Wait()
			if last := n.syncs()[len(n.syncs())-1]; last != want || !slices.Equal(n.hint(), hint) {
				t.Errorf("at revision %d synced %q with hint %v, want %q with %v", revision, last, n.hint(), want, hint)
			}
		}
		publish(2, "*host2 host3 host4", "host2")
		publish(4, "*host2 host3 host4", "host4")
		if text := log(); strings.Count(text, "forgotten peers") != 1 || strings.Contains(text, "no peer is kept") {
			t.Errorf("want one line about held peers while one is held:\n%s", text)
		}
		publish(5, "*host2 host4 host5", "host3", "host5")
		if text := log(); strings.Count(text, "forgotten peers") != 1 || strings.Count(text, "no peer is kept") != 1 {
			t.Errorf("want a line when peers were held and one when none is any more:\n%s", text)
		}
	})
}

func TestRegistry(t *testing.T) {
	factory := func(json.RawMessage, backend.Env) (backend.Backend, []string, error) { return nil, nil, nil }
	for name, entries := range map[string][]backend.Entry{
		"empty name": {{Type: "", Factory: factory}},
		"upper case": {{Type: "VXLAN", Factory: factory}},
		"duplicate":  {{Type: "a", Factory: factory}, {Type: "a", Factory: factory}},
		"no factory": {{Type: "a"}},
	} {
		if _, err := backend.NewRegistry(entries...); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	r, err := backend.NewRegistry(backend.Entry{Type: "b", Factory: factory}, backend.Entry{Type: "a", Factory: factory})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		cfg  subnet.Config
		want string
	}{
		{subnet.Config{BackendType: "udp"}, `the network configuration has no Backend, which means "udp": set Backend.Type to one of a, b`},
		{subnet.Config{BackendType: "ipsec", Backend: json.RawMessage(`{}`)}, `unknown backend type "ipsec": Backend.Type must be one of a, b`},
	} {
		_, _, err := r.New(backend.Env{Config: tc.cfg})
		if !errors.Is(err, backend.ErrUnknownType) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v, want %q", err, tc.want)
		}
	}
}

// choosing is a network that chooses between two backends.
type choosing struct {
	*network
	choices map[string]backend.Choice
	wake    chan struct{}
}

func (n choosing) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	out, err := n.network.Sync(ctx, peers)
	out.Choice = func(key string) backend.Choice { return n.choices[key] }
	return out, err
}

func (n choosing) Changed() <-chan struct{} { return n.wake }

// TestChoicesAreLoggedTogether checks when the log tells how many peers each backend serves, and that it
// names a peer once that its preferred backend does not serve for a minute.
func TestChoicesAreLoggedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next, waits := backend.Choice{Backend: "next"}, backend.Choice{Backend: "test", Waiting: "no answer"}
		n := choosing{&network{}, map[string]backend.Choice{"host2": next, "host3": waits, "host4": waits}, make(chan struct{}, 1)}
		s, log := run(t, n)
		seen := 0
		expect := func(when string, want ...string) {
			t.Helper()
			lines := strings.Split(log(), "packets to peers go by these backends")[1:]
			if len(lines) != seen+len(want) {
				t.Errorf("%s: %d lines, want %d", when, len(lines)-seen, len(want))
			}
			for i, line := range lines[min(seen, len(lines)):] {
				line, _, _ = strings.Cut(line, "\n")
				if i < len(want) && !strings.Contains(line, want[i]) {
					t.Errorf("%s: %s, want %s", when, line, want[i])
				}
			}
			seen = len(lines)
		}
		choose := func(key string, c backend.Choice) {
			synctest.Wait()
			n.choices[key] = c
			n.wake <- struct{}{}
			advance(time.Second)
		}

		expect("without peers")
		s.Publish(fullUpdate(snapshot(2, lease(2, "two"), lease(3, "three"), lease(4, "four"))))
		advance(time.Second)
		expect("with peers", `peers={"next":1,"test":2} late=0`)
		choose("host3", next)
		expect("a second later")
		choose("host3", waits)
		choose("host4", next)
		expect("three seconds later")
		advance(5 * time.Second)
		expect("eight seconds later", `peers={"next":2,"test":1} late=0`)
		advance(50 * time.Second)
		expect("before the minute is over")
		advance(10 * time.Second)
		expect("after the minute", `late=1 because=["host3: no answer"]`)
		advance(time.Hour)
		expect("an hour later")
		choose("host3", next)
		choose("host3", waits)
		expect("it has moved for a moment", `peers={"next":3} late=0`)
		advance(time.Minute)
		expect("it waits again", `peers={"next":2,"test":1} late=0`, `late=1 because=["host3: no answer"]`)
		s.Publish(deltaUpdate(3, nil, "host3"))
		advance(time.Minute)
		expect("it has gone", `peers={"next":2} late=0`)
	})
}
