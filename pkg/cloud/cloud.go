// SPDX-License-Identifier: Apache-2.0

// Package cloud makes the route tables of a cloud lead to the subnets of hosts. The routers
// of the cloud then carry the packets of pods, without a tunnel.
//
//   - cloud.go is the contract: the Cloud interface, which each cloud implements. The suite in
//     cloudtest checks the implementations. errors.go has the errors and their kinds.
//   - life.go decides which routes are created, replaced, removed and left. It is pure, and the same for all clouds.
//   - keeper.go has the Keeper, a loop that reads the tables, decides, and makes the calls. config.go has its
//     settings, and peers.go is what it knows of the leases. act.go makes one comparison and its calls, and report.go is
//     what the Keeper reports.
//   - look.go has what several clouds need to describe and to check tables.
//   - calls.go counts calls, and repeats those that the cloud has refused because there were too many.
//   - mark.go is the mark of a cluster in the descriptions of its routes.
//   - rights.go collects the rights that are missing according to the calls of an implementation.
package cloud

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Route is a route in a table of the cloud.
type Route struct {
	Table string // id of the table
	Dst   netip.Prefix
	// Target is where the route leads, in the words of the cloud, such as the id of a
	// network interface.
	Target string
	State  State
	// ByCall is set if a call of the cloud's API has made the route. Other routes are
	// those of the network itself, and those that a VPN gateway has learned.
	ByCall bool
	// Foreign tells how data of the cloud shows that the route belongs to another program or cluster, such as "which
	// leads to no host". It is empty if nothing shows that. flanneld never replaces or removes a foreign route.
	Foreign string
}

// State tells whether a route carries packets.
type State int

// States of routes, from the best one to the worst one.
const (
	Carrying State = iota
	Changing       // the cloud has not finished a call about the route, so it may carry no packets yet
	Idle           // it carries no packets now: its target does not run, it is disabled, or another route is preferred
	Gone           // it carries no packets, because its target does not exist any more
)

// Lost reports whether the route carries no packets, and no call in progress changes that.
func (r Route) Lost() bool { return r.State == Idle || r.State == Gone }

// String returns the route in one line.
func (r Route) String() string {
	s := fmt.Sprintf("%s to %s in table %s", r.Dst, r.Target, r.Table)
	switch r.State {
	case Carrying:
	case Changing:
		s += ", which the cloud is changing"
	case Idle:
		s += ", which carries no packets"
	case Gone:
		s += ", which leads to nowhere"
	}
	if r.Foreign != "" {
		s += ", " + r.Foreign
	}
	return s
}

// Table is a route table with all its routes.
type Table struct {
	ID     string
	Global string // name that no other table of the cloud has; empty if ID is unique
	Own    bool   // packets of this host follow the table
	// Several is set if the table can have several routes to the same destination.
	Several bool
	Routes  []Route
}

// Name returns the name by which hosts of all regions and accounts know the table.
func (t Table) Name() string { return cmp.Or(t.Global, t.ID) }

// Count returns the number of routes of family f that count towards the quota.
func (t Table) Count(f prefix.Family) (n int) {
	for _, r := range t.Routes {
		if r.ByCall && prefix.FamilyOf(r.Dst.Addr()) == f {
			n++
		}
	}
	return n
}

// Cloud is the API of a cloud, seen by one host and for the tables of one network. The keeper calls
// one method at a time. The errors of methods wrap the errors of this package where these
// apply, and never contain secrets.
type Cloud interface {
	// Join finds this host in the cloud. It also makes the cloud pass packets with addresses of
	// pods to this host, unless the cloud does that already. It returns the target of routes to this
	// host, or a DroppedError if the cloud does not pass such packets.
	Join(ctx context.Context) (target string, err error)
	// Followed returns the id of the table that packets of each of hosts follow, in the same order. The id is empty
	// if the cloud does not know the host or its table. It must be called after Join and Tables.
	Followed(ctx context.Context, hosts []Host) ([]string, error)
	// Tables returns the tables that the network uses, with all their routes.
	Tables(ctx context.Context) ([]Table, error)
	// Put makes r the only route to its destination, except for foreign routes, and returns when r carries packets.
	// If replace is set, Put replaces the existing route without a gap, so that packets always have a route. It
	// also succeeds if there is no route to replace. Put returns ErrExists if there is a foreign route in the way
	// or, if replace is not set, another route that it would have to replace.
	Put(ctx context.Context, r Route, replace bool) error
	// Remove removes r, but no other route to the same destination. It succeeds if r does not
	// exist.
	Remove(ctx context.Context, r Route) error
	// Check returns an error if this host cannot use the cloud. This is a MissingError if rights
	// are missing. Check changes nothing.
	Check(ctx context.Context) error
}

// Host is a host of the network, as its lease describes it.
type Host struct {
	Subnets   []netip.Prefix
	Addresses []netip.Addr
	// Refused is set if the lease of the host is refused, for example because it contradicts an
	// older lease. The routes to its subnets stay.
	Refused bool
}
