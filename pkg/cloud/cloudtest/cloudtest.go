// SPDX-License-Identifier: Apache-2.0

// Package cloudtest is the suite that every implementation of cloud.Cloud passes, an
// implementation in memory, and helpers for the tests of other implementations.
package cloudtest

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
)

// Fixture is a cloud with one table for the network and two hosts: this one and a peer. At first the table has no
// routes that calls have made. The functions of a Fixture change the cloud from outside.
type Fixture struct {
	Cloud       cloud.Cloud
	Table       string // id of the table
	Peer        string // target of the other host
	PeerAddress netip.Addr
	IPv4Only    bool // the cloud has no routes for IPv6
	// DeleteByHand deletes the route to a destination, as an operator does.
	DeleteByHand func(netip.Prefix)
	SelfAddress  netip.Addr
	// EndPeer terminates the other host. StopPeer only stops it.
	EndPeer, StopPeer func()
	// AddGateway adds a route of an operator to a destination. It leads to a gateway, and not to a host. It is nil if
	// the cloud permits no such route.
	AddGateway func(netip.Prefix)
	// SetQuota limits the number of routes in the table.
	SetQuota func(int)
	// Deny takes away one permission: the one that creating a route needs.
	Deny func()
	// Throttle makes the cloud refuse the next calls.
	Throttle func(calls int)
	// SetAway makes the cloud unavailable, or available again.
	SetAway func(bool)
	// LoseAnswer makes the cloud lose the answer to the next call that changes a route. The call itself
	// succeeds.
	LoseAnswer func()
	// AddOfOther adds a route to a destination, with the other host as its target and the mark of another
	// cluster. Only RunMarked needs it.
	AddOfOther func(netip.Prefix)
	// Gaps returns how often the table was without a route to a destination that it had a route to
	// before. The suite calls Gaps only before Remove and DeleteByHand, so it does not matter whether
	// these count.
	Gaps func() int
}

// Run runs the suite. open returns a new Fixture for each case.
func Run(t *testing.T, open func(t *testing.T) Fixture) { RunExcept(t, nil, open) }

// RunExcept runs the suite without the cases in lacks, for test servers of other projects that cannot run these.
// lacks contains the reason for each case, by its name. Functions of the Fixture that only these cases call may be
// nil.
func RunExcept(t *testing.T, lacks map[string]string, open func(t *testing.T) Fixture) {
	t.Helper()
	for name := range lacks {
		if !slices.ContainsFunc(cases(), func(c testCase) bool { return c.name == name }) {
			t.Fatalf("the suite has no case %q to leave out", name)
		}
	}

	for _, c := range cases() {
		if reason, ok := lacks[c.name]; ok {
			t.Logf("left out: %s: %s", c.name, reason)
			continue
		}
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
}

type testCase struct {
	name string
	run  func(*testing.T, Fixture)
}

func cases() []testCase {
	return []testCase{
		{"the own table is known", testOwnTable},
		{"a route is put, found and removed", testPut},
		{"a route is replaced without a gap", testReplace},
		{"put works although it is out of date", testStale},
		{"only the route that was meant is removed", testRemoveOther},
		{"a route to a host that has ended is lost", testLost},
		{"a stopped host keeps its place", testStopped},
		{"a route to a gateway stays", testGateway},
		{"the tables of other hosts are found by their addresses", testFollowed},
		{"the quota is named", testQuota},
		{"a missing right is named before it is needed", testDenied},
		{"a throttled call is repeated", testThrottled},
		{"an outage may end by itself", testAway},
		{"a call whose answer was lost does no harm", testLostAnswer},
	}
}

// RunMarked runs the part of the suite for clouds whose routes can have the mark of a cluster.
func RunMarked(t *testing.T, open func(t *testing.T) Fixture) {
	t.Run("a route of another cluster stays", func(t *testing.T) { testOfOther(t, open(t)) })
}

func subnets() (v4, v6 netip.Prefix) {
	return netip.MustParsePrefix("10.5.1.0/24"), netip.MustParsePrefix("fd00:10:5:1::/64")
}

// find returns the route to dst in the table of f that a call has made. It returns false unless there is exactly
// one.
func find(t *testing.T, f Fixture, dst netip.Prefix) (cloud.Route, bool) {
	t.Helper()
	tables, err := f.Cloud.Tables(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var found []cloud.Route
	for _, table := range tables {
		for _, r := range table.Routes {
			if r.Dst == dst && r.ByCall && r.Table == f.Table {
				found = append(found, r)
			}
		}
	}
	if len(found) != 1 {
		return cloud.Route{}, false
	}
	return found[0], true
}

// join calls Join, and returns the target of this host.
func join(t *testing.T, f Fixture) string {
	t.Helper()
	self, err := f.Cloud.Join(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if self == f.Peer {
		t.Fatalf("this host and the other one are both %s", self)
	}
	return self
}

func put(t *testing.T, f Fixture, dst netip.Prefix, target string, replace bool) {
	t.Helper()
	if err := f.Cloud.Put(t.Context(), route(f, dst, target), replace); err != nil {
		t.Fatal(err)
	}
	if r, ok := find(t, f, dst); !ok || r != route(f, dst, target) {
		t.Fatalf("found %v (%v), want the route that was put", r, ok)
	}
}

func route(f Fixture, dst netip.Prefix, target string) cloud.Route {
	return cloud.Route{Table: f.Table, Dst: dst, Target: target, ByCall: true}
}

func testOwnTable(t *testing.T, f Fixture) {
	join(t, f)
	tables, err := f.Cloud.Tables(t.Context())
	if err != nil || len(tables) != 1 || !tables[0].Own || tables[0].Name() == "" {
		t.Errorf("tables %+v, %v, want that of this host", tables, err)
	}
}

func testPut(t *testing.T, f Fixture) {
	self := join(t, f)
	v4, v6 := subnets()
	all := []netip.Prefix{v4, v6}
	if f.IPv4Only {
		all = all[:1]
	}

	for _, dst := range all {
		if r, ok := find(t, f, dst); ok {
			t.Fatalf("%s exists before it was put", r)
		}
		put(t, f, dst, self, false)
	}

	for _, dst := range all {
		for range 2 { // the second time there is no route to remove
			if err := f.Cloud.Remove(t.Context(), route(f, dst, self)); err != nil {
				t.Fatal(err)
			}
		}
		if r, ok := find(t, f, dst); ok {
			t.Errorf("%s exists after it was removed", r)
		}
	}
}

func testReplace(t *testing.T, f Fixture) {
	self := join(t, f)
	dst, _ := subnets()
	put(t, f, dst, f.Peer, false)
	put(t, f, dst, self, true)
	if gaps := f.Gaps(); gaps > 0 {
		t.Errorf("the table was %d times without the route", gaps)
	}
}

func testStale(t *testing.T, f Fixture) {
	self := join(t, f)
	dst, _ := subnets()
	put(t, f, dst, self, true) // there is no route to replace
	if err := f.Cloud.Put(t.Context(), route(f, dst, f.Peer), false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
	if r, _ := find(t, f, dst); r.Target != self {
		t.Errorf("found %v, want the route that was there", r)
	}
	if gaps := f.Gaps(); gaps > 0 {
		t.Errorf("the table was %d times without the route", gaps)
	}
	f.DeleteByHand(dst)
	put(t, f, dst, self, true)
}

func testRemoveOther(t *testing.T, f Fixture) {
	self := join(t, f)
	dst, _ := subnets()
	put(t, f, dst, self, false)
	if err := f.Cloud.Remove(t.Context(), route(f, dst, f.Peer)); err != nil {
		t.Fatal(err)
	}
	if r, ok := find(t, f, dst); !ok || r.Target != self {
		t.Errorf("found %v (%v), want the route that another host has put meanwhile", r, ok)
	}
}

func testOfOther(t *testing.T, f Fixture) {
	join(t, f)
	dst, _ := subnets()
	f.AddOfOther(dst)
	expectStays(t, f, dst, f.Peer)
}

func testGateway(t *testing.T, f Fixture) {
	if f.AddGateway == nil {
		return
	}
	join(t, f)
	dst, _ := subnets()
	f.AddGateway(dst)
	r, _ := find(t, f, dst)
	if r.Target == "" || r.Target == "an unknown target" {
		t.Errorf("found %v, want the name of the gateway", r)
	}
	expectStays(t, f, dst, r.Target)
}

// expectStays expects that the cloud has a foreign route to dst that leads to target, and that no call changes it.
func expectStays(t *testing.T, f Fixture, dst netip.Prefix, target string) {
	t.Helper()
	self := join(t, f)
	for _, replace := range []bool{false, true} {
		if err := f.Cloud.Put(t.Context(), route(f, dst, self), replace); !errors.Is(err, cloud.ErrExists) {
			t.Errorf("replace %v: error %v, want ErrExists", replace, err)
		}
	}
	if err := f.Cloud.Remove(t.Context(), route(f, dst, target)); err != nil {
		t.Error(err)
	}
	if r, ok := find(t, f, dst); !ok || r.Foreign == "" || r.Target != target {
		t.Errorf("found %v (%v), want a foreign route to %s", r, ok, target)
	}
}

func testLost(t *testing.T, f Fixture) { expectState(t, f, f.EndPeer, cloud.Gone) }

func testStopped(t *testing.T, f Fixture) { expectState(t, f, f.StopPeer, cloud.Idle) }

// expectState expects that a route to the peer is in this state after change.
func expectState(t *testing.T, f Fixture, change func(), want cloud.State) {
	t.Helper()
	join(t, f)
	dst, _ := subnets()
	put(t, f, dst, f.Peer, false)
	change()
	if r, ok := find(t, f, dst); !ok || r.State != want {
		t.Errorf("found %v (%v), want the state %d", r, ok, want)
	}
}

// testFollowed asks for the tables of an unknown host, the peer and this host.
func testFollowed(t *testing.T, f Fixture) {
	join(t, f)
	if _, err := f.Cloud.Tables(t.Context()); err != nil {
		t.Fatal(err)
	}

	found, err := f.Cloud.Followed(t.Context(), []cloud.Host{
		{Addresses: []netip.Addr{netip.MustParseAddr("192.168.77.250"), netip.MustParseAddr("fd00:77::fa")}}, {Addresses: []netip.Addr{f.PeerAddress}}, {Addresses: []netip.Addr{f.SelfAddress}},
	})
	if err != nil || len(found) != 3 || found[1] != f.Table || found[2] != f.Table {
		t.Errorf("found %q, error %v, want the table that packets of the two hosts follow", found, err)
	}

	none, err := f.Cloud.Followed(t.Context(), nil)
	if err != nil || len(none) > 0 {
		t.Errorf("found %q, error %v without hosts", none, err)
	}
}

func testQuota(t *testing.T, f Fixture) {
	self := join(t, f)
	f.SetQuota(1)
	dst, _ := subnets()
	put(t, f, dst, self, false)
	err := f.Cloud.Put(t.Context(), route(f, netip.MustParsePrefix("10.5.2.0/24"), self), false)
	if quota, ok := errors.AsType[*cloud.QuotaError](err); !ok || quota.Table != f.Table || cloud.Transient(err) {
		t.Errorf("error %v, want a lasting QuotaError about %s", err, f.Table)
	}
	put(t, f, dst, f.Peer, true) // needs no further route
}

func testDenied(t *testing.T, f Fixture) {
	if err := f.Cloud.Check(t.Context()); err != nil {
		t.Fatalf("with all rights: %v", err)
	}
	dst, _ := subnets()
	if r, ok := find(t, f, dst); ok {
		t.Errorf("the check has put %s", r)
	}

	f.Deny()
	err := f.Cloud.Check(t.Context())
	missing, ok := errors.AsType[*cloud.MissingError](err)
	if !ok || len(missing.Permissions) != 1 || cloud.Transient(err) || !strings.Contains(err.Error(), missing.Page) {
		t.Fatalf("error %v, want a lasting MissingError about one right, with the page", err)
	}
	self := join(t, f)
	err = f.Cloud.Put(t.Context(), route(f, dst, self), false)
	if later, ok := errors.AsType[*cloud.MissingError](err); !ok || !slices.Equal(later.Permissions, missing.Permissions) {
		t.Errorf("error %v, want the one of the check", err)
	}
}

func testThrottled(t *testing.T, f Fixture) {
	self := join(t, f)
	dst, _ := subnets()
	f.Throttle(1)
	if err := f.Cloud.Put(t.Context(), route(f, dst, self), false); err != nil && !errors.Is(err, cloud.ErrThrottled) {
		t.Errorf("error %v, want none or ErrThrottled", err)
	}
	f.Throttle(1000)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second) // otherwise the call may be repeated for a minute
	defer cancel()
	if err := f.Cloud.Put(ctx, route(f, dst, self), false); !cloud.Transient(err) {
		t.Errorf("error %v while the cloud refuses all calls, want one that may end by itself", err)
	}
	f.Throttle(0)
	put(t, f, dst, self, true)
}

func testAway(t *testing.T, f Fixture) {
	join(t, f)
	f.SetAway(true)
	if _, err := f.Cloud.Tables(t.Context()); !cloud.Transient(err) {
		t.Errorf("error %v, want one that may end by itself", err)
	}
	if err := f.Cloud.Check(t.Context()); !cloud.Transient(err) {
		t.Errorf("error %v of the check, want one that may end by itself", err)
	}
	f.SetAway(false)
	if err := f.Cloud.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func testLostAnswer(t *testing.T, f Fixture) {
	self := join(t, f)
	dst, other := subnets()
	if f.IPv4Only {
		other = netip.MustParsePrefix("10.5.2.0/24")
	}

	// call makes a call whose answer is lost, and repeats it as the keeper does.
	call := func(once func() error) {
		t.Helper()
		f.LoseAnswer()
		for deadline := time.Now().Add(10 * time.Second); ; <-time.After(100 * time.Millisecond) {
			err := once()
			if err == nil {
				return
			}
			if !cloud.Transient(err) || time.Now().After(deadline) {
				t.Fatalf("error %v, want one that ends by itself", err)
			}
		}
	}

	for _, step := range []struct {
		dst    netip.Prefix
		target string
	}{{other, self}, {dst, f.Peer}, {dst, self}, {dst, f.Peer}} {
		call(func() error { return f.Cloud.Put(t.Context(), route(f, step.dst, step.target), true) })
		if r, ok := find(t, f, step.dst); !ok || r.Target != step.target {
			t.Errorf("found %v (%v), want one route to %s", r, ok, step.target)
		}
	}
	if gaps := f.Gaps(); gaps > 0 {
		t.Errorf("the table was %d times without the route", gaps)
	}

	call(func() error { return f.Cloud.Remove(t.Context(), route(f, dst, f.Peer)) })
	if r, ok := find(t, f, dst); ok {
		t.Errorf("%s exists after it was removed", r)
	}
}
