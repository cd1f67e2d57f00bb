// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/oneline"
)

// announcement is what the leader tells the other hosts about their routes. A destination is in order if
// each table has the right route to it.
type announcement struct {
	Routed   []netip.Prefix `json:"routed"`             // destinations that are in order; empty if Rest is set, and nil if they are unknown or too many
	Rest     bool           `json:"rest,omitempty"`     // all destinations that are not in Unrouted are in order, and Routed does not name them
	Unrouted []unrouted     `json:"unrouted,omitempty"` // destinations that are not in order for a known reason, grouped by the reason; may be left out
	Tables   []routerTable  `json:"tables,omitempty"`   // for hosts with a tunnel; nil if they are unknown or left out
	Error    string         `json:"error,omitempty"`    // the error of the leader's last comparison
}

type unrouted struct {
	Reason  string         `json:"reason"`
	Kind    string         `json:"kind,omitempty"` // kind of the reason: see Kind
	Subnets []netip.Prefix `json:"subnets"`
}

// routerTable tells which hosts send packets by a table of the cloud, and to which destinations the table leads.
type routerTable struct {
	Name  string         `json:"name"`            // see Table.Name
	Hosts []netip.Prefix `json:"hosts,omitempty"` // hosts whose packets follow the table; the first subnet of each
	Less  []netip.Prefix `json:"less,omitempty"`  // destinations in Routed to which the table had no right route when it was read
	More  []netip.Prefix `json:"more,omitempty"`  // destinations not in Routed to which the table had a right route when it was read
}

// Limits of an announcement, because all hosts read it and stores limit its size: the annotations of an object
// of Kubernetes have at most 256 KiB together, and a value of etcd has at most 1.5 MiB.
const (
	mostText    = 250_000 // bytes of an announcement
	mostReason  = 300     // bytes of a reason
	mostReasons = 100     // different reasons
	mostTables  = 100     // tables that a host accepts
	mostName    = 100     // bytes of a table's name that a host accepts; the host publishes the name
	otherReason = "the reason is in the status of the leader"
)

// announce returns the announcement about r as JSON. r and err are the report and the error of the leader's last
// comparison. Equal states give equal texts. The text contains the tables only if tables is set. If the complete
// announcement is too large, omitted names the part that was left out. Otherwise it is empty.
func announce(r Report, err error, tables bool) (text json.RawMessage, omitted string, _ error) {
	a := announcement{Routed: slices.Clone(r.Routed)}
	slices.SortFunc(a.Routed, comparePrefixes)
	all := slices.Clone(r.Unrouted)
	slices.SortFunc(all, func(a, b Unrouted) int { return a.Dst.Compare(b.Dst) })
	for _, u := range all {
		a.add(u.Dst, clean(u.Reason), u.Kind)
	}
	if tables && r.Routed != nil {
		a.Tables = routerTables(r)
	}
	if err != nil {
		a.Error = clean(err.Error())
	}
	for _, f := range a.forms() {
		if text, err = json.Marshal(f.announcement); err != nil || len(text) <= mostText {
			return text, f.omitted, err
		}
		omitted = f.omitted
	}
	return text, omitted, nil
}

// parse parses an announcement, which may come from any program that can write to the store.
func parse(text json.RawMessage) (a announcement, err error) {
	if err := json.Unmarshal(text, &a); err != nil {
		return announcement{}, err
	}
	if len(a.Tables) > mostTables {
		return announcement{}, fmt.Errorf("%d tables, more than %d", len(a.Tables), mostTables)
	}
	for _, t := range a.Tables {
		if len(t.Name) > mostName {
			return announcement{}, fmt.Errorf("the name of a table has %d bytes, more than %d", len(t.Name), mostName)
		}
	}
	return a, nil
}

// routerTables returns the tables of a report for an announcement. For each table it lists the differences to
// r.Routed instead of all destinations, because these differences are few.
func routerTables(r Report) []routerTable {
	routed := set(r.Routed)
	tables := []routerTable{}
	for _, t := range r.Tables {
		seen := set(t.Seen)
		one := routerTable{Name: t.Name, Hosts: slices.Clone(t.Hosts)}
		for _, dst := range r.Routed {
			if !seen[dst] {
				one.Less = append(one.Less, dst)
			}
		}
		for _, dst := range t.Seen {
			if !routed[dst] {
				one.More = append(one.More, dst)
			}
		}
		for _, list := range [][]netip.Prefix{one.Hosts, one.Less, one.More} {
			slices.SortFunc(list, comparePrefixes)
		}
		tables = append(tables, one)
	}
	slices.SortFunc(tables, func(a, b routerTable) int { return strings.Compare(a.Name, b.Name) })
	return tables
}

func set(all []netip.Prefix) map[netip.Prefix]bool {
	members := map[netip.Prefix]bool{}
	for _, p := range all {
		members[p] = true
	}
	return members
}

// seen reports whether t had a right route to dst when the leader read it.
func (a announcement) seen(t routerTable, dst netip.Prefix) bool {
	return slices.Contains(t.More, dst) || slices.Contains(a.Routed, dst) && !slices.Contains(t.Less, dst)
}

// tables returns the announced tables and their routes to the subnets of one host, in the form that a keeper on
// that host reports. complete is set if each table had the routes to all of these subnets when the leader read it.
func (a announcement) tables(subnets []netip.Prefix) (tables []TableReport, routes []RouteReport, complete bool) {
	complete = true
	for _, t := range a.Tables {
		name := clean(t.Name)
		own := slices.ContainsFunc(subnets, func(dst netip.Prefix) bool { return slices.Contains(t.Hosts, dst) })
		tables = append(tables, TableReport{ID: name, Name: name, Own: own})
		for _, dst := range subnets {
			seen := a.seen(t, dst)
			complete = complete && seen
			r := Route{Table: name, Dst: dst, ByCall: true}
			routes = append(routes, RouteReport{Route: r, Present: seen || slices.Contains(a.Routed, dst), Seen: seen})
		}
	}
	return tables, routes, complete
}

// form is an announcement from which something may be left out.
type form struct {
	announcement
	omitted string // empty if the form is complete
}

// forms returns the forms of a in the order in which announce tries them. The first form is complete, and the last
// one is always small enough. The forms between them leave out what hosts need least, so that as many hosts as
// possible learn whether their routes are in order.
func (a announcement) forms() []form {
	const routed = "the subnets with a route, so a host that is not named counts as in order"
	var plain announcement
	for _, u := range a.Unrouted {
		for _, dst := range u.Subnets {
			plain.add(dst, otherReason, u.Kind)
		}
	}
	short := announcement{Routed: a.Routed, Unrouted: plain.Unrouted, Tables: a.Tables, Error: a.Error}
	forms := []form{{a, ""}, {short, "the reasons"}}
	if a.Tables != nil {
		// Without tables each host continues to use the cloud or the tunnel, as before. The later forms have no
		// tables either.
		short.Tables = nil
		forms = append(forms, form{short, "the reasons, and the route tables, so that no host changes between the cloud and the tunnel"})
	}
	none, rest := a.Routed[:0], a.Routed != nil // if Routed is unknown, the other destinations are unknown too
	return append(forms, []form{
		{announcement{Routed: none, Rest: rest, Unrouted: a.Unrouted, Error: a.Error}, routed},
		{announcement{Routed: none, Rest: rest, Unrouted: plain.Unrouted, Error: a.Error}, "the reasons, and " + routed},
		{announcement{Routed: a.Routed, Error: a.Error}, "the subnets without a route"},
		{announcement{Error: "there are too many subnets to announce them"}, "all subnets"},
	}...)
}

// routed reports whether dst is in order.
func (a announcement) routed(dst netip.Prefix) bool {
	if !a.Rest {
		return slices.Contains(a.Routed, dst)
	}
	return !slices.ContainsFunc(a.Unrouted, func(u unrouted) bool { return slices.Contains(u.Subnets, dst) })
}

// add adds dst, a destination to which at least one table lacks the right route. reason says why it lacks
// the route, and kind is the kind of this reason. If a has mostReasons pairs of reason and kind, and this
// pair is new, add replaces the reason by otherReason.
func (a *announcement) add(dst netip.Prefix, reason, kind string) {
	find := func() int {
		return slices.IndexFunc(a.Unrouted, func(u unrouted) bool { return u.Reason == reason && u.Kind == kind })
	}
	i := find()
	if i < 0 && len(a.Unrouted) >= mostReasons {
		reason = otherReason
		i = find()
	}
	if i < 0 {
		i, a.Unrouted = len(a.Unrouted), append(a.Unrouted, unrouted{Reason: reason, Kind: kind})
	}
	a.Unrouted[i].Subnets = append(a.Unrouted[i].Subnets, dst)
}

func comparePrefixes(a, b netip.Prefix) int { return a.Compare(b) }

// clean returns a text as one line of limited length. A text from the store may come from any program that
// can write there.
func clean(text string) string {
	text = strings.ToValidUTF8(text[:min(len(text), mostReason)], "")
	return oneline.Collapse(text)
}

// check returns nil if the routes to all of these subnets are in order. Otherwise it returns the reason for the
// first subnet whose route is not: an announcedError if the leader has announced a reason for the subnet, else the
// error of the leader's last comparison, or a waitingError if the leader has announced neither. leader is the name
// of the leader, for the error.
func (a announcement) check(subnets []netip.Prefix, leader string) error {
	for _, dst := range subnets {
		if a.routed(dst) {
			continue
		}
		for _, u := range a.Unrouted {
			if slices.Contains(u.Subnets, dst) {
				return &announcedError{fmt.Sprintf("no route to %s, says the leader %s: %s", dst, leader, clean(u.Reason)), knownKind(u.Kind)}
			}
		}
		if a.Error != "" {
			return fmt.Errorf("no route to %s, because the leader %s cannot write: %s", dst, leader, clean(a.Error))
		}
		return &waitingError{fmt.Errorf("waiting for the leader %s, which has not put the route to %s yet", leader, dst)}
	}
	return nil
}
