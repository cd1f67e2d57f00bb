// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"
)

// announcement is what the leader tells the other hosts about their routes.
type announcement struct {
	Routed   []netip.Prefix `json:"routed"`             // destinations that are in order; nil if the leader does not know them yet
	Rest     bool           `json:"rest,omitempty"`     // all that are not in Unrouted are in order; there are too many to name them
	Unrouted []unrouted     `json:"unrouted,omitempty"` // others, by the reason
	Error    string         `json:"error,omitempty"`    // the error of the leader's last comparison
}

type unrouted struct {
	Reason  string         `json:"reason"`
	Subnets []netip.Prefix `json:"subnets"`
}

// All hosts read the announcement. The annotations of an object of Kubernetes have at most 256 KiB together,
// and a value of etcd has at most 1.5 MiB.
const (
	mostText    = 250_000 // bytes of an announcement
	mostReason  = 300     // bytes of a reason
	mostReasons = 100     // different reasons
	otherReason = "the reason is in the status of the leader"
)

// announce returns the announcement after a comparison of the leader that ended with err, as JSON. Equal
// states give equal texts. If the announcement would be too large, omitted says what was left out.
func announce(r Report, err error) (text json.RawMessage, omitted string, _ error) {
	a := announcement{Routed: slices.Clone(r.Routed)}
	slices.SortFunc(a.Routed, comparePrefixes)
	all := slices.Clone(r.Unrouted)
	slices.SortFunc(all, func(a, b Unrouted) int { return a.Dst.Compare(b.Dst) })
	for _, u := range all {
		a.add(u.Dst, clean(u.Reason))
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

// form is a form of an announcement.
type form struct {
	announcement
	omitted string // empty if the form is complete
}

// forms returns the forms of a, from the complete one to one that is always small enough. Each host learns from
// it whether its routes are in order, as far as the place permits that.
func (a announcement) forms() []form {
	const routed = "the subnets with a route, so a host that is not named counts as in order"
	var plain []unrouted
	if len(a.Unrouted) > 0 {
		plain = []unrouted{{Reason: otherReason}}
		for _, u := range a.Unrouted {
			plain[0].Subnets = append(plain[0].Subnets, u.Subnets...)
		}
	}
	none, rest := a.Routed[:0], a.Routed != nil // without routes that are known, there is no rest of them
	return []form{
		{a, ""},
		{announcement{Routed: a.Routed, Unrouted: plain, Error: a.Error}, "the reasons"},
		{announcement{Routed: none, Rest: rest, Unrouted: a.Unrouted, Error: a.Error}, routed},
		{announcement{Routed: none, Rest: rest, Unrouted: plain, Error: a.Error}, "the reasons, and " + routed},
		{announcement{Routed: a.Routed, Error: a.Error}, "the subnets without a route"},
		{announcement{Error: "there are too many subnets to announce them"}, "all subnets"},
	}
}

// routed reports whether the routes to dst are in order.
func (a announcement) routed(dst netip.Prefix) bool {
	if !a.Rest {
		return slices.Contains(a.Routed, dst)
	}
	return !slices.ContainsFunc(a.Unrouted, func(u unrouted) bool { return slices.Contains(u.Subnets, dst) })
}

// add adds a destination that is not in order.
func (a *announcement) add(dst netip.Prefix, reason string) {
	find := func() int { return slices.IndexFunc(a.Unrouted, func(u unrouted) bool { return u.Reason == reason }) }
	i := find()
	if i < 0 && len(a.Unrouted) >= mostReasons {
		reason = otherReason
		i = find()
	}
	if i < 0 {
		i, a.Unrouted = len(a.Unrouted), append(a.Unrouted, unrouted{Reason: reason})
	}
	a.Unrouted[i].Subnets = append(a.Unrouted[i].Subnets, dst)
}

func comparePrefixes(a, b netip.Prefix) int { return a.Compare(b) }

// clean returns a text as one line of limited length. A text from the store may come from any program that
// can write there.
func clean(text string) string {
	text = strings.ToValidUTF8(text[:min(len(text), mostReason)], "")
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }), " ")
}

// check returns an error unless the routes to all of these subnets are in order. leader is the name of
// the leader, for the error.
func (a announcement) check(subnets []netip.Prefix, leader string) error {
	for _, dst := range subnets {
		if a.routed(dst) {
			continue
		}
		for _, u := range a.Unrouted {
			if slices.Contains(u.Subnets, dst) {
				return fmt.Errorf("no route to %s, says the leader %s: %s", dst, leader, clean(u.Reason))
			}
		}
		if a.Error != "" {
			return fmt.Errorf("no route to %s, because the leader %s cannot write: %s", dst, leader, clean(a.Error))
		}
		return fmt.Errorf("waiting for the leader %s, which has not put the route to %s yet", leader, dst)
	}
	return nil
}
