// SPDX-License-Identifier: Apache-2.0

package vpctest

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"time"
)

// Errors of calls. A server translates each of them to an error code of its cloud.
var (
	ErrAway      = errors.New("the service is unavailable")
	ErrSignature = errors.New("the signature does not match")
	ErrThrottled = errors.New("the request was denied due to request throttling")
	ErrDenied    = errors.New("the user is not authorized to operate on the specified resource")
	ErrDryRun    = errors.New("the request would have succeeded")
	ErrUnknown   = errors.New("the call does not exist")
	ErrInvalid   = errors.New("a parameter is not valid")
	ErrNoTable   = errors.New("the specified route table does not exist")
	ErrNoTarget  = errors.New("the specified next hop does not exist")
	ErrNoRoute   = errors.New("the specified route does not exist")
	ErrExists    = errors.New("the specified destination already exists")
	ErrUnchanged = errors.New("the next hop is not changed")
	ErrQuota     = errors.New("the quota of routes in this table is exceeded")
)

// maxSkew is the largest difference of clocks that the cloud accepts.
const maxSkew = 5 * time.Minute

// Signed contains the result of a server's check of the signature of a call.
type Signed struct {
	Valid bool
	Time  time.Time
	Nonce string // empty if the protocol has none
}

// Answer records a call, and returns the result of f. If the call is refused, for example because of an outage
// or a missing permission, it returns an error without calling f. A dry run that would succeed returns ErrDryRun.
func (s *State) Answer(c Call, signed Signed, f func(*View) (any, error)) (answer any, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := &View{s: s, dry: c.DryRun}
	skew := time.Since(signed.Time).Abs()
	switch {
	case s.away:
		err = ErrAway
	case !signed.Valid || skew > maxSkew || signed.Nonce != "" && s.nonces[signed.Nonce]:
		err = ErrSignature
	case s.throttled > 0:
		s.throttled--
		err = ErrThrottled
	case s.denied[c.Name]:
		err = ErrDenied
	default:
		answer, err = f(v)
	}

	s.nonces[signed.Nonce] = true
	if err == nil && c.DryRun {
		err = ErrDryRun
	}
	c.Failed = err != nil
	s.calls = append(s.calls, c)
	if err != nil {
		return nil, err
	}
	return answer, nil
}

// View is the state during a call, while no other call is in progress.
type View struct {
	s   *State
	dry bool // the call must change nothing
}

// Instances returns all instances, sorted by id.
func (v *View) Instances() []Instance { return v.s.sortedInstances() }

// Restrict sets the field Restricted of the instance to which routes with this target lead. It returns ErrNoTarget
// if there is none. In a dry run it changes nothing.
func (v *View) Restrict(target string, restricted bool) error {
	for _, i := range v.Instances() {
		if v.s.TargetOf(i) == target {
			if !v.dry {
				v.s.update(i.ID, func(i *Instance) { i.Restricted = restricted })
			}
			return nil
		}
	}
	return ErrNoTarget
}

// TableOf returns the id of the table that a subnet uses: MainTable if no table was added for the subnet.
func (v *View) TableOf(subnet string) string {
	for _, id := range v.s.sortedTables() {
		if subnet != "" && v.s.tables[id].subnet == subnet {
			return id
		}
	}
	return MainTable
}

// Tables returns the ids of all tables.
func (v *View) Tables() []string { return v.s.sortedTables() }

// SubnetOf returns the subnet that uses a table, or an empty text if none does.
func (v *View) SubnetOf(id string) string { return v.s.tables[id].subnet }

// Visible returns the routes of a table that a call can read now, or ErrNoTable. If SetLag was used, they are
// those of an earlier time.
func (v *View) Visible(id string) ([]Route, error) {
	if v.s.tables[id] == nil {
		return nil, ErrNoTable
	}
	seen := v.s.past[0]
	for _, p := range v.s.past {
		if time.Since(p.since) >= v.s.lag {
			seen = p
		}
	}
	return seen.tables[id], nil
}

// Pending reports whether r carries no packets yet, because the last call about it was a short time ago.
func (v *View) Pending(r Route) bool { return v.s.isPending(r) }

// maxPage is the largest number of items that a call may ask for.
const maxPage = 100

// Page returns a page of items, and the token of the next one, which is empty after the last page. token and size
// are parameters of the call: the index of the first item, and the number of items. They may be empty. Page returns
// ErrInvalid if one of them is not valid.
func Page[T any](v *View, token, size string, items []T) (page []T, next string, err error) {
	begin := 0
	most := v.s.pageSize
	if token != "" {
		if begin, err = strconv.Atoi(token); err != nil || begin < 0 || begin > len(items) {
			return nil, "", ErrInvalid
		}
	}
	if size != "" {
		n, err := strconv.Atoi(size)
		if err != nil || n < 1 || n > maxPage {
			return nil, "", ErrInvalid
		}
		most = min(most, n)
	}

	end := min(begin+most, len(items))
	if end < len(items) {
		next = strconv.Itoa(end)
	}
	return items[begin:end], next, nil
}

// Create adds a Custom route to the table with this id, and returns the route. The description may be empty.
// Create returns an error if the cloud would refuse the call, such as ErrQuota. In a dry run it adds nothing, and
// returns the zero Route.
func (v *View) Create(id string, dst netip.Prefix, target, description string) (Route, error) {
	t := v.s.tables[id]
	if t == nil {
		return Route{}, ErrNoTable
	}
	if err := v.target(target); err != nil {
		return Route{}, err
	}
	n := 0
	for _, r := range t.routes {
		if r.Dst == dst && r.Kind == Custom {
			return Route{}, ErrExists
		}
		if r.Kind == Custom && r.Dst.Addr().BitLen() == dst.Addr().BitLen() {
			n++
		}
	}
	if !dst.IsValid() || dst != dst.Masked() || VPCRange().Overlaps(dst) {
		return Route{}, ErrInvalid
	}
	if n >= v.s.quota {
		return Route{}, ErrQuota
	}
	if v.dry {
		return Route{}, nil
	}

	v.s.add(t, Route{Dst: dst, Target: target, Kind: Custom, Description: description, Changed: time.Now()})
	v.s.remember()
	return t.routes[len(t.routes)-1], nil
}

func (v *View) target(target string) error {
	if !slices.ContainsFunc(v.Instances(), func(i Instance) bool { return v.s.TargetOf(i) == target }) {
		return ErrNoTarget
	}
	return nil
}

// find returns the first route r of the table with this id that a call has made and for which is(r) is true. It
// returns ErrNoTable or ErrNoRoute if there is none.
func (v *View) find(id string, is func(Route) bool) (*Route, error) {
	t := v.s.tables[id]
	if t == nil {
		return nil, ErrNoTable
	}
	i := slices.IndexFunc(t.routes, func(r Route) bool { return r.Kind == Custom && is(r) })
	if i < 0 {
		return nil, ErrNoRoute
	}
	return &t.routes[i], nil
}

// Replace changes the target of the first Custom route r for which is(r) is true. It also changes the description,
// unless description is empty. A disabled route stays disabled. Replace returns ErrUnchanged if r already leads
// only to target, ErrExists if another Custom route to the same destination leads to target, and other errors if
// the table, r or target does not exist. In a dry run it changes nothing.
func (v *View) Replace(id, target, description string, is func(Route) bool) error {
	r, err := v.find(id, is)
	if err != nil {
		return err
	}
	if err := v.target(target); err != nil {
		return err
	}
	if r.Target == target && len(r.More) == 0 {
		return ErrUnchanged
	}

	for _, other := range v.s.tables[id].routes {
		if other.Number != r.Number && other.Dst == r.Dst && other.Target == target && other.Kind == Custom {
			return ErrExists
		}
	}
	if !v.dry {
		r.Target, r.More, r.Description = target, nil, cmp.Or(description, r.Description)
		r.Changed = time.Now()
		v.s.remember()
	}
	return nil
}

// Delete deletes the first Custom route r for which is(r) is true. In a dry run it deletes nothing.
func (v *View) Delete(id string, is func(Route) bool) error {
	r, err := v.find(id, is)
	if err != nil || v.dry {
		return err
	}
	number := r.Number
	t := v.s.tables[id]
	t.routes = slices.DeleteFunc(t.routes, func(r Route) bool { return r.Number == number })
	v.s.remember()
	return nil
}
