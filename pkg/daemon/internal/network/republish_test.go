// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/subnet"
)

// changing is a backend whose data changes while it runs. It records the data that the store has, as its network
// learns them.
type changing struct {
	starter
	data      atomic.Pointer[string]
	next      string
	published []string
}

func (c *changing) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	prev.Endpoints = []subnet.Endpoint{prev.Endpoints[0]}
	prev.Endpoints[0].Data, prev.NextType = json.RawMessage(*c.data.Load()), c.next
	return prev, nil
}

func (c *changing) learn(set backend.Set) {
	if set.Published != nil {
		c.published = append(c.published, string(set.Published.Endpoints[0].Data))
	}
}

// recorder is a store that records the data of leases. Acquire fails as often as failures says, and then
// returns the lease under the given key.
type recorder struct {
	silent
	failures int
	key      string
	written  []string
}

func (r *recorder) Acquire(_ context.Context, _ subnet.Config, c subnet.Claim) (subnet.Lease, error) {
	if r.failures > 0 {
		r.failures--
		return subnet.Lease{}, errors.New("not now")
	}
	r.written = append(r.written, string(c.Endpoints[0].Data))
	return subnet.Lease{Key: r.key, Endpoints: c.Endpoints}, nil
}

// TestRepublish changes the data of a backend while its session runs. The store must get the new data,
// also after a failure, and the session must go on. If the store returns the key of another lease, work
// must return ErrLeaseLost.
func TestRepublish(t *testing.T) {
	for name, tt := range map[string]struct {
		store   recorder
		written int
		err     error
	}{
		"the store answers":                {recorder{key: "own"}, 1, nil},
		"the store answers later":          {recorder{key: "own", failures: 2}, 1, nil},
		"another host has got the subnets": {recorder{key: "other"}, 1, subnet.ErrLeaseLost},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				defer cancel()
				n, s, be := publishing(t)
				n.store = &tt.store
				s.republish.Send() // with the same data
				time.AfterFunc(time.Second, func() {
					be.data.Store(new("2"))
					s.republish.Send()
				})
				next, err := followUplink(ctx, n, s, nil)
				if next != nil || !errors.Is(err, tt.err) {
					t.Errorf("the network returned %v, %v, want %v", next, err, tt.err)
				}
				if len(tt.store.written) != tt.written || tt.store.written[0] != "2" {
					t.Errorf("the store got %q, want the changed data once", tt.store.written)
				}
				if tt.err != nil {
					return
				}
				if last, _ := n.state.Get(); string(last.Own.Endpoints[0].Data) != "2" {
					t.Errorf("the state has %s, want the changed data", last.Own.Endpoints[0].Data)
				}
				if want := []string{"1", "2"}; !slices.Equal(be.published, want) {
					t.Errorf("the network was told that the store has %q, want %q", be.published, want)
				}
				if n.serving.Load() != s {
					t.Error("the session was replaced")
				}
				n.stopServing()
			})
		})
	}
}

// TestRepublishKeepsTheBackends checks that republish does not publish another next backend. Peers must
// not learn of the next backend before a session runs it.
func TestRepublishKeepsTheBackends(t *testing.T) {
	be := &changing{starter: starter{close: func() {}}, next: "wireguard"}
	be.data.Store(new("2"))
	n, s := networkOn(t, be.starter, link(1500, "192.0.2.1"))
	n.state.Update(func(now *lastknown.State) {
		now.Own = subnet.Lease{Key: "own", Endpoints: []subnet.Endpoint{{Data: json.RawMessage(`1`)}}}
	})
	s.be = be
	store := &recorder{key: "own"}
	n.store = store
	err := n.republish(t.Context(), s)
	if err == nil || len(store.written) > 0 || len(be.published) > 0 {
		t.Errorf("republish returned %v and wrote %q, want an error and nothing written", err, store.written)
	}
	n.stopServing()
}

// TestRepublishWaitsForALease checks that republish writes nothing while the store has a lease that was taken for another
// configuration. Otherwise the host would change to a subnet that the store does not have for it any more.
func TestRepublishWaitsForALease(t *testing.T) {
	n, s, be := publishing(t)
	n.state.Update(func(now *lastknown.State) { now.Stored = &subnet.Lease{Key: "other"} })
	be.data.Store(new("2"))
	store := &recorder{key: "own"}
	n.store = store
	if err := n.republish(t.Context(), s); err == nil || len(store.written) > 0 {
		t.Errorf("republish returned %v and wrote %q, want an error and nothing written", err, store.written)
	}
	n.stopServing()
}

// TestRepublishIsInterrupted ends work while the store does not answer. It may have the changed data, so the next session
// must publish its own.
func TestRepublishIsInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		n, s, be := publishing(t)
		be.data.Store(new("2"))
		s.republish.Send()
		if next, err := followUplink(ctx, n, s, nil); next != nil || err != nil {
			t.Errorf("the network returned %v, %v", next, err)
		}
		if n.last().Stored == nil {
			t.Error("the store counts as having this host's lease as it is")
		}
		n.stopServing()
	})
}

// TestRepublishGoesOn ends work before it has published changed data, as a change of the traffic rules
// does, and calls it again for the same session. The second call must publish the data.
func TestRepublishGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, s, be := publishing(t)
		store := recorder{key: "own", failures: 1}
		n.store = &store
		be.data.Store(new("2"))
		s.republish.Send()
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), refusedPause/4) // less than the pause after a failure
			if next, err := followUplink(ctx, n, s, nil); next != nil || err != nil {
				t.Errorf("the network returned %v, %v", next, err)
			}
			cancel()
		}
		synctest.Wait()
		if want := []string{"2"}; !slices.Equal(store.written, want) || !slices.Equal(be.published, want) {
			t.Errorf("the store got %q, and the network was told %q, want the changed data once", store.written, be.published)
		}
		n.stopServing()
	})
}

// TestRepublishPause changes the data every second while the store fails. There must be a pause between
// the calls of the store, so that not every change causes one.
func TestRepublishPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls = 1000
		n, s, be := publishing(t)
		store := recorder{key: "own", failures: calls}
		n.store = &store
		ctx, cancel := context.WithTimeout(t.Context(), 2*refusedPause)
		defer cancel()
		go func() {
			for i := 2; wait.For(ctx, time.Second) == nil; i++ {
				be.data.Store(new(strconv.Itoa(i)))
				s.republish.Send()
			}
		}()
		if next, err := followUplink(ctx, n, s, nil); next != nil || err != nil {
			t.Errorf("the network returned %v, %v", next, err)
		}
		if made := calls - store.failures; made < 2 || made > 5 {
			t.Errorf("the store got %d calls in %v, want one after each pause", made, 2*refusedPause)
		}
		n.stopServing()
	})
}

// publishing returns a network with a session and its backend. The backend, the session and the state have
// the data 1.
func publishing(t *testing.T) (*Network, *session, *changing) {
	be := &changing{}
	be.starter = starter{close: func() {}, sync: be.learn}
	be.data.Store(new("1"))
	n, s := networkOn(t, be.starter, link(1500, "192.0.2.1"))
	n.state.Change(func(now *lastknown.State) {
		now.Own = subnet.Lease{Key: "own", Endpoints: []subnet.Endpoint{
			{Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr("192.0.2.1"), Data: json.RawMessage(`1`)},
		}}
	})
	s.be = be
	return n, s, be
}
