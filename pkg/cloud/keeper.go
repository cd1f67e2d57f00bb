// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/loop"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/wait"
)

// leastRest is the shortest pause between two comparisons of the routes to all hosts.
const leastRest = 2 * time.Second

// leastLasting is the first pause after an error that needs an operator. The pause doubles up to
// the resync period, because all hosts may have the same error and make calls.
const leastLasting = time.Second

// joinError is an error of Cloud.Join. A host cannot write any route before Join succeeds.
type joinError struct{ error }

func (e *joinError) Unwrap() error { return e.error }

// Keeper puts the routes to the own subnets, or to the subnets of all hosts, into the tables of a cloud.
// It removes the routes of hosts that are gone.
type Keeper struct {
	KeeperConfig
	loop     *loop.Loop
	first    chan struct{} // closed after the first comparison
	confirm  wait.Backoff  // pauses after writes, before the tables are read again
	lasting  wait.Backoff  // pauses after errors that need an operator
	leases   *leases
	targets  targets // of other hosts
	actor    actor
	reporter *reporter
	factor   float64              // of the grace periods of routes
	since    map[Route]time.Time  // see decide
	apart    map[string]time.Time // since when no route leads to a host, by Host.name
	overlaps string               // routes in the network that were logged last
}

// NewKeeper returns a Keeper. The caller runs it.
func NewKeeper(c KeeperConfig) *Keeper {
	l := &leases{own: c.Own, connected: c.Connected}
	r := newReporter(c.All)
	k := &Keeper{
		KeeperConfig: c, first: make(chan struct{}), leases: l, reporter: r,
		actor: actor{KeeperConfig: c, leases: l, reporter: r}, factor: 1 + 2*rand.Float64(),
	}
	k.confirm = wait.Backoff{Least: min(leastConfirm, c.Resync), Most: c.Resync}
	k.lasting = wait.Backoff{Least: min(leastLasting, c.Resync), Most: c.Resync}
	done := sync.OnceFunc(func() { close(k.first) })
	k.loop = loop.New(c.Resync, func(ctx context.Context) error {
		again, own, all := k.compare(ctx)
		if ctx.Err() != nil {
			return nil
		}
		k.reporter.end(own)
		done()
		k.Compared()
		k.rest(ctx)
		return k.next(all, again)
	})
	return k
}

// rest pauses after a comparison of the routes to all hosts, so that hosts that start together cause
// only a few comparisons. It does not pause if the keeper writes only the own routes.
func (k *Keeper) rest(ctx context.Context) {
	if k.All {
		_ = wait.For(ctx, leastRest) // the end of ctx ends the loop
	}
}

// next returns the result of one step of the loop, which makes the loop compare again after the right pause. err
// is the error of the comparison. again is the time after which the comparison asks for the next one; 0 means that
// it asks for none.
func (k *Keeper) next(err error, again time.Duration) error {
	if err != nil && (Transient(err) || errors.Is(err, errUnanswered)) {
		return err
	}
	if err != nil {
		again = earlier(k.lasting.Next(), again)
	} else {
		k.lasting.Reset()
	}
	if again > 0 {
		return loop.After(again)
	}
	return nil
}

// Run compares until ctx ends: at once, after each resync period, and with growing pauses after writes and
// failures. It also compares after SetPeers has set different hosts, and when the grace period of a route ends.
func (k *Keeper) Run(ctx context.Context) { _ = k.loop.Run(ctx) }

// SetPeers sets the other hosts that have a lease. If the keeper writes the routes to all hosts, a difference from
// the earlier Peers causes a comparison. Most changes of leases cause none, because a Host has only a part of the
// data of a lease.
func (k *Keeper) SetPeers(p Peers) {
	if k.leases.set(p) {
		k.loop.Wake()
	}
}

// Result returns why the routes to this host were not in order after the last comparison, or nil.
// repaired is the number of routes that were repaired since the last call of Result or Last. Result waits
// for the first comparison, and returns an error if ctx ends before.
func (k *Keeper) Result(ctx context.Context) (repaired int, err error) {
	select {
	case <-k.first:
	case <-ctx.Done():
		return 0, errors.New("the routes of the cloud are not compared yet")
	}
	repaired, _, err = k.Last()
	return repaired, err
}

// Last is like Result, but does not wait. compared is false before the first comparison. After it, Last also sets
// the number of repaired routes back to zero.
func (k *Keeper) Last() (repaired int, compared bool, err error) {
	select {
	case <-k.first:
	default:
		return 0, false, nil
	}
	repaired, err = k.reporter.last()
	return repaired, true, err
}

// Report returns the state at the last comparison that could read the tables, or at the present one if it has
// written many routes already. Dropped may be newer. Routed, Unrouted and some fields of Tables may be older.
func (k *Keeper) Report() Report { return k.reporter.get() }

// compare makes one comparison and the calls that it needs. again is the time after which the next
// comparison should begin; 0 if the resync period is soon enough. own is the error of the routes to this
// host, and all is the error of the routes to all hosts. Each is nil if these routes are in order.
func (k *Keeper) compare(ctx context.Context) (again time.Duration, own, all error) {
	target, err := k.Cloud.Join(ctx)
	if err != nil {
		err = &joinError{fmt.Errorf("find this host in the cloud: %w", err)}
		return 0, err, err
	}
	tables, err := k.Cloud.Tables(ctx)
	if err != nil {
		err = fmt.Errorf("read the route tables: %w", err)
		return 0, err, err
	}
	k.warn(ctx, tables)

	p, unknown := k.plan(ctx, tables, target)
	hosts, known := k.leases.hosts()
	done := k.actor.run(ctx, view{
		tables: tables, wanted: p.wanted, networks: k.Networks, subnets: k.Own.Subnets, self: target,
		hosts: hosts, known: known, answered: k.leases.answered(),
		since: k.since, now: time.Now(), resync: k.Resync, factor: k.factor,
	}, p)
	k.since = done.since

	later, separate := k.separate(ctx, tables, hosts)
	general := oneline.Join(unknown, done.err)
	own = oneline.Join(p.problems.of(k.Own.Subnets), general, separate)
	k.reporter.note(tables, p, own)
	all = oneline.Join(p.problems.of(nil), general, separate)
	again = earlier(done.again, later)
	if done.wrote == 0 {
		k.confirm.Reset()
		return again, own, all
	}
	return earlier(k.confirm.Next(), again), own, all
}

// warn logs the routes in the network that flanneld does not replace, at the start and when others have appeared. A
// default route overlaps each network, and does no harm.
func (k *Keeper) warn(ctx context.Context, tables []Table) {
	var names []string
	for _, r := range overlapping(tables, k.Networks, func(r Route) bool { return !r.ours() && r.Dst.Bits() > 0 }) {
		names = append(names, r.String())
	}
	text := strings.Join(names, "; ")
	if text != k.overlaps && text != "" {
		klog.FromContext(ctx).Info("warning: routes of the cloud overlap the network, and may take packets of its pods", "network", fmt.Sprint(k.Networks), "routes", text)
	}
	k.overlaps = text
}

// apartTime is the time after which a host to which no route leads is looked for. A host that has just started has no
// route yet.
const apartTime = time.Minute

// separate returns an error that names the hosts which follow other tables than those that packets of this host follow,
// so that neither reaches the other. It looks only for hosts to which no route has led for apartTime. again is the time
// after which the next host has to be looked for; 0 if there is none. With a tunnel the hosts reach each other, a
// leader looks for all hosts, and a common table leaves no others.
func (k *Keeper) separate(ctx context.Context, tables []Table, all []Host) (again time.Duration, err error) {
	if k.All || k.Tunnel || slices.ContainsFunc(tables, func(t Table) bool { return t.Common }) {
		return 0, nil
	}
	all = slices.DeleteFunc(all, func(h Host) bool { return h.Refused || slices.Equal(h.Subnets, k.Own.Subnets) })
	before := k.apart
	k.apart = map[string]time.Time{}
	var due []Host
	for _, h := range unreached(tables, all) {
		since, known := before[h.name()]
		if !known {
			since = time.Now()
		}
		k.apart[h.name()] = since
		if rest := apartTime - time.Since(since); rest > 0 {
			again = earlier(again, rest)
		} else {
			due = append(due, h)
		}
	}
	if len(due) == 0 {
		return again, nil
	}
	found, err := k.targets.find(ctx, k.Cloud, due, k.Resync, nil, false)
	if err != nil {
		return again, err
	}
	var subnets []string
	others := map[string]bool{}
	followed := func(id string) bool {
		return slices.ContainsFunc(tables, func(t Table) bool { return t.Own && t.ID == id })
	}
	for i, f := range found {
		if f.Table != "" && !followed(f.Table) {
			subnets = append(subnets, due[i].Subnets[0].String())
			others[f.Table] = true
		}
	}
	if len(subnets) == 0 {
		return again, nil
	}
	const most = 3
	if rest := len(subnets) - most; rest > 0 {
		subnets = append(subnets[:most], fmt.Sprintf("%d more", rest))
	}
	return again, fmt.Errorf("no packets reach %s: their hosts follow the route tables %s, and this host another one: let all hosts write all tables, or give their subnets one table, or set Backend.Overflow",
		strings.Join(subnets, ", "), strings.Join(slices.Sorted(maps.Keys(others)), ", "))
}

// plan returns the wanted routes. The order of the routes to all hosts is the same on each leader, so that each
// leader puts the same routes into a table that has no place for all. own is the target of this host. The plan has
// only the routes to this host if All is not set, if the store has not answered, or if err is not nil.
func (k *Keeper) plan(ctx context.Context, tables []Table, own string) (p *plan, err error) {
	p = &plan{followers: map[string][]netip.Prefix{}}
	for _, dst := range k.Own.Subnets {
		p.wanted = append(p.wanted, want{Dst: dst, Target: own})
	}
	if !k.All {
		return p, nil
	}
	hosts := k.leases.others()
	if !k.leases.answered() {
		return p, nil
	}
	found, err := k.targets.find(ctx, k.Cloud, hosts, k.Resync, lostTargets(tables), true)
	if err != nil {
		return p, err
	}
	p.all = true
	for _, t := range tables {
		if t.Own {
			p.followers[t.ID] = append(p.followers[t.ID], k.Own.Subnets[0])
		}
	}
	for i, h := range hosts {
		if found[i].Err == nil && found[i].Table != "" {
			p.followers[found[i].Table] = append(p.followers[found[i].Table], h.Subnets[0])
		}
		for _, dst := range h.Subnets {
			if found[i].Err != nil {
				p.problems.add(dst, "", found[i].Err)
				continue
			}
			p.wanted = append(p.wanted, want{Dst: dst, Target: found[i].Target, Other: true})
			if f := found[i].Table; f != "" && !k.Tunnel && !slices.ContainsFunc(tables, func(t Table) bool { return t.ID == f }) {
				p.problems.add(dst, "", fmt.Errorf("packets of the host follow the route table %s, which the leader does not write", f))
			}
		}
	}
	slices.SortFunc(p.wanted, func(a, b want) int { return a.Dst.Compare(b.Dst) })
	return p, nil
}
