// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"cmp"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// A route that no host needs stays for a grace period, because the lease of a host that has just started may arrive
// here later than its route. Each host multiplies the period by a random number from 1 to 3, so that usually only one
// host makes the calls. For routes to itself it does not.
const (
	// grace is longer than the time after which a store that sends nothing counts as
	// disconnected, which is 12 minutes.
	grace = 15 * time.Minute
	// mostLostGrace limits the grace period of a lost route, because this carries no packets.
	mostLostGrace = time.Minute
)

// Reasons why a route is left as it is although it is not the wanted one.
var (
	errUnanswered = errors.New("the store has not answered, and may have given the subnet to another host")
	errForeign    = errors.New("flanneld does not replace it: remove it, or choose another Network")
	errChanging   = errors.New("waiting until the cloud has finished")
)

// Reasons why a route is removed, for the log.
const (
	whyMine     = "it leads to this host, which has another subnet"
	whyUnleased = "no host has a lease of it"
	whyGone     = "its instance is gone, and the table has no place for another route"
)

// want is a route that each table should have.
type want struct {
	Dst    netip.Prefix
	Target string
}

func (w want) in(table string) Route {
	return Route{Table: table, Dst: w.Dst, Target: w.Target, ByCall: true}
}

// fulfils reports whether r needs no change.
func (r Route) fulfils(w want) bool { return r == w.in(r.Table) }

// ours reports whether flanneld may replace and remove r, judging by r alone.
func (r Route) ours() bool { return r.ByCall && r.Foreign == "" }

// place is the part of a table that has a quota of its own.
type place struct {
	table  string
	family prefix.Family
}

func placeOf(r Route) place { return place{r.Table, prefix.FamilyOf(r.Dst.Addr())} }

// view is all that the life of routes depends on.
type view struct {
	tables   []Table
	wanted   []want
	networks []netip.Prefix // removals are limited to routes in them
	subnets  []netip.Prefix // of this host
	self     string         // target of routes to this host
	hosts    []Host         // that have a lease, with this one; nil if some may be missing
	known    time.Time      // since when this host has learned of each new lease; zero if hosts is nil
	answered bool           // the store has told its leases and is connected
	full     map[place]int  // routes for which there was no place
	since    map[Route]time.Time
	now      time.Time
	resync   time.Duration
	factor   float64 // of the grace periods, from 1 to 3
}

// verb is what is done about a route.
type verb int

const (
	create verb = iota
	replace
	remove
	refuse // the wanted route is impossible as long as another one is there
)

// step is one thing to do. Route is the route to put or to remove, or the wanted one that is refused.
type step struct {
	verb
	Route
	was    Route  // that is replaced, or because of which the wanted one is refused
	why    string // reason of a removal
	reason error  // of a refusal
}

// decide returns what to do, in the order in which it should be done: removals that make place, wanted routes, and
// other removals. since contains the times from which on routes have been of no use, for the next view. again is the
// time after which one of them may be removed; 0 if there is none.
//
// A route to a host with another lease is removed no sooner than one to an unknown host: managed groups of gce
// create an instance again under the name of the former one, so all routes to the former one have a target again.
func decide(v view) (steps []step, since map[Route]time.Time, again time.Duration) {
	since = map[Route]time.Time{}
	left := map[place]int{} // routes that still lack a place after the removals so far
	maps.Copy(left, v.full)

	var due, gone []step
	for _, t := range v.tables {
		for _, r := range t.Routes {
			why, from, period := v.useless(r)
			if why == "" && (r.State != Gone || !v.removable(r)) {
				continue
			}

			begin := cmp.Or(v.since[r], v.now)
			since[r] = begin

			if from.Before(begin) {
				from = begin
			}
			rest := period - v.now.Sub(from)
			if why != "" && rest <= 0 {
				due = append(due, step{verb: remove, Route: r, why: why})
				left[placeOf(r)]--
				continue
			}
			if why != "" {
				again = least.Of(again, rest)
			}
			if r.State == Gone && v.full[placeOf(r)] > 0 {
				if rest := v.lostGrace() - v.now.Sub(begin); rest > 0 {
					again = least.Of(again, rest)
				} else {
					gone = append(gone, step{verb: remove, Route: r, why: whyGone})
				}
			}
		}
	}

	// Routes that leave anyway make place first. A route whose lease lives leaves only for a route that needs its place,
	// the one that has been gone for longest first.
	slices.SortStableFunc(gone, func(a, b step) int { return since[a.Route].Compare(since[b.Route]) })
	var later []step
	for _, s := range due {
		if v.full[placeOf(s.Route)] > 0 {
			steps = append(steps, s)
		} else {
			later = append(later, s)
		}
	}

	for _, s := range gone {
		if left[placeOf(s.Route)] > 0 {
			left[placeOf(s.Route)]--
			steps = append(steps, s)
		}
	}
	return slices.Concat(steps, v.puts(), later), since, again
}

// puts returns the steps after which each table has the wanted routes. A wrong route beside the right one,
// as an interrupted call may leave it, needs a step as well.
func (v view) puts() (steps []step) {
	for _, t := range v.tables {
		present := map[netip.Prefix][]Route{}
		for _, r := range t.Routes {
			present[r.Dst] = append(present[r.Dst], r)
		}

		for _, w := range v.wanted {
			s := step{Route: w.in(t.ID)}
			have := present[w.Dst]
			at := func(is func(Route) bool) bool {
				i := slices.IndexFunc(have, is)
				if i >= 0 {
					s.was = have[i]
				}
				return i >= 0
			}

			wrong := func(r Route) bool { return r.ours() && !r.fulfils(w) }
			switch {
			case at(func(r Route) bool { return r.ByCall && r.Foreign != "" && (!t.Several || !r.Lost()) }):
				s.verb = refuse
				s.reason = errForeign

			case at(func(r Route) bool { return r.ours() && r.State == Changing }):
				s.verb = refuse
				s.reason = errChanging
			// If several routes are replaced, the one that counts is the one that serves another host.
			case at(func(r Route) bool { return wrong(r) && s.serves(r) }):
				s.verb = replace
				if !v.answered {
					s.verb = refuse
					s.reason = errUnanswered
				}

			case at(wrong):
				s.verb = replace
			case slices.ContainsFunc(have, func(r Route) bool { return r.fulfils(w) }):
				continue
			}
			steps = append(steps, s)
		}
	}
	return steps
}

// serves reports whether the present route r carries packets to another host than the wanted one.
func (s step) serves(r Route) bool { return r.Target != s.Target && !r.Lost() }

// removable reports whether r may be removed if no host needs it.
func (v view) removable(r Route) bool {
	inside := slices.ContainsFunc(v.networks, func(n netip.Prefix) bool { return prefix.Contains(n, r.Dst) })

	// A route of another size than this host's subnet is probably one of an operator.
	sized := slices.ContainsFunc(v.subnets, func(own netip.Prefix) bool {
		return own.Addr().BitLen() == r.Dst.Addr().BitLen() && own.Bits() == r.Dst.Bits()
	})
	wanted := slices.ContainsFunc(v.wanted, func(w want) bool { return w.Dst == r.Dst && w.Target == r.Target })
	return inside && sized && !wanted && r.ours() && r.State != Changing
}

// useless says why no host needs r, or nothing if a host may. That must have been so for a period after
// from before r is removed.
func (v view) useless(r Route) (why string, from time.Time, period time.Duration) {
	if !v.removable(r) {
		return "", from, 0
	}

	// This host knows its own lease without the store.
	if r.Target == v.self && !slices.ContainsFunc(v.subnets, r.Dst.Overlaps) {
		return whyMine, from, grace
	}
	if v.known.IsZero() || leased(v.hosts, r.Dst) {
		return "", from, 0
	}

	period = grace
	if r.Lost() {
		period = v.lostGrace()
	}
	return whyUnleased, v.known, time.Duration(float64(period) * v.factor)
}

func (v view) lostGrace() time.Duration { return min(v.resync, mostLostGrace) }

func leased(hosts []Host, dst netip.Prefix) bool {
	return slices.ContainsFunc(hosts, func(h Host) bool { return slices.ContainsFunc(h.Subnets, dst.Overlaps) })
}

func overlapping(tables []Table, networks []netip.Prefix, is func(Route) bool) (routes []Route) {
	for _, t := range tables {
		for _, r := range t.Routes {
			if is(r) && slices.ContainsFunc(networks, r.Dst.Overlaps) {
				routes = append(routes, r)
			}
		}
	}
	return routes
}

// unreached returns the hosts to which no table that packets of this host follow has a route.
func unreached(tables []Table, hosts []Host) []Host {
	reached := map[netip.Prefix]bool{}
	for _, t := range tables {
		for _, r := range t.Routes {
			// The host of a route of flanneld that carries no packets has written this table, and does not run.
			if t.Own && (r.ours() || r.State == Carrying) {
				reached[r.Dst] = true
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(hosts), func(h Host) bool {
		return !slices.ContainsFunc(h.Subnets, func(dst netip.Prefix) bool { return !reached[dst] })
	})
}
