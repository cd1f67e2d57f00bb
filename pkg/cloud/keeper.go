// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/loop"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

// leastLasting is the first pause after an error that needs an operator. The pause doubles up to
// the resync period, because all hosts may have the same error and make calls.
const leastLasting = time.Second

// Keeper puts the routes to this host's subnets into the tables of a cloud. It also removes the routes of hosts that
// are gone.
type Keeper struct {
	KeeperConfig
	loop     *loop.Loop
	first    chan struct{} // closed after the first comparison
	confirm  wait.Backoff  // pauses after writes, before the tables are read again
	lasting  wait.Backoff  // pauses after errors that need an operator
	leases   *leases
	reporter *reporter
	factor   float64              // of the grace periods of routes
	since    map[Route]time.Time  // see decide
	right    map[Route]bool       // wanted routes that the tables had at the last comparison
	apart    map[string]time.Time // since when no route leads to a host, by Host.name
	overlaps string               // routes in the network that were logged last
}

// NewKeeper returns a Keeper. The caller runs it.
func NewKeeper(c KeeperConfig) *Keeper {
	k := &Keeper{
		KeeperConfig: c, first: make(chan struct{}), leases: &leases{own: c.Own, connected: c.Connected}, reporter: &reporter{},
		factor: 1 + 2*rand.Float64(),
	}

	k.confirm = wait.Backoff{Least: min(leastConfirm, c.Resync), Most: c.Resync}
	k.lasting = wait.Backoff{Least: min(leastLasting, c.Resync), Most: c.Resync}
	done := sync.OnceFunc(func() { close(k.first) })
	k.loop = loop.New(c.Resync, func(ctx context.Context) error {
		again, err := k.compare(ctx)
		if ctx.Err() != nil {
			return nil
		}
		k.reporter.end(err)
		done()
		k.Compared()
		return k.next(err, again)
	})
	return k
}

// next makes the loop compare again after the right pause. err is the error of the comparison, and again
// the time after which it asks for the next one, or 0.
func (k *Keeper) next(err error, again time.Duration) error {
	if err != nil && (Transient(err) || errors.Is(err, errUnanswered)) {
		return err
	}
	if err != nil {
		again = least.Of(k.lasting.Next(), again)
	} else {
		k.lasting.Reset()
	}
	if again > 0 {
		return loop.After(again)
	}
	return nil
}

// Run compares until ctx ends: at once, after each resync period, and with growing pauses after writes and
// failures. It also compares when the grace period of a route ends.
func (k *Keeper) Run(ctx context.Context) { _ = k.loop.Run(ctx) }

// SetPeers sets the other hosts that have a lease.
func (k *Keeper) SetPeers(p Peers) { k.leases.set(p) }

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

// Report returns the state at the last comparison that could read the tables. Dropped may be newer.
func (k *Keeper) Report() Report { return k.reporter.get() }

// compare makes one comparison and the calls that it needs. again is the time after which the next one
// should begin; 0 if the resync period is soon enough.
func (k *Keeper) compare(ctx context.Context) (again time.Duration, err error) {
	target, err := k.Cloud.Join(ctx)
	if err != nil {
		return 0, fmt.Errorf("find this host in the cloud: %w", err)
	}
	tables, err := k.Cloud.Tables(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the route tables: %w", err)
	}
	k.warn(ctx, tables)

	var wanted []want
	for _, dst := range k.Own.Subnets {
		wanted = append(wanted, want{Dst: dst, Target: target})
	}

	hosts, known, answered := k.leases.hosts()
	c := &comparison{Keeper: k, before: k.right, right: present(tables, wanted), view: view{
		tables: tables, wanted: wanted, networks: k.Networks, subnets: k.Own.Subnets, self: target,
		hosts: hosts, known: known, answered: answered,
		since: k.since, now: time.Now(), resync: k.Resync, factor: k.factor,
	}}
	k.right = c.right
	k.since, again = c.run(ctx)

	later, separate := k.separate(ctx, tables, hosts)
	var errs []error
	for _, p := range c.problems {
		errs = append(errs, p.err)
	}
	err = oneline.Join(append(errs, c.removed, separate)...)
	k.reporter.note(c, err)

	again = least.Of(again, later)
	if c.wrote == 0 {
		k.confirm.Reset()
		return again, err
	}
	return least.Of(k.confirm.Next(), again), err
}

// warn logs the routes in the network that flanneld does not replace, at the start and after a change.
func (k *Keeper) warn(ctx context.Context, tables []Table) {
	// A default route overlaps each network, and does no harm.
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

// name identifies a host by its addresses.
func (h Host) name() string { return fmt.Sprint(h.Addresses) }

// apartTime is the time after which a host to which no route leads is looked for. A host that has just started has no
// route yet.
const apartTime = time.Minute

// separate returns an error that names the hosts which follow other tables than this one, so that neither
// reaches the other. again is the time after which the next host has to be looked for; 0 if there is none.
func (k *Keeper) separate(ctx context.Context, tables []Table, all []Host) (again time.Duration, err error) {
	if k.Tunnel { // over it the hosts reach each other
		return 0, nil
	}

	all = slices.DeleteFunc(all, func(h Host) bool { return h.Refused || slices.Equal(h.Subnets, k.Own.Subnets) })
	before := k.apart
	k.apart = map[string]time.Time{}
	var due []Host
	for _, h := range unreached(tables, all) {
		since := cmp.Or(before[h.name()], time.Now())
		k.apart[h.name()] = since
		if rest := apartTime - time.Since(since); rest > 0 {
			again = least.Of(again, rest)
		} else {
			due = append(due, h)
		}
	}
	if len(due) == 0 {
		return again, nil
	}

	found, err := k.Cloud.Followed(ctx, due)
	if err != nil {
		return again, fmt.Errorf("find the hosts of leases in the cloud: %w", err)
	}

	var subnets []string
	others := map[string]bool{}
	followed := func(id string) bool {
		return slices.ContainsFunc(tables, func(t Table) bool { return t.Own && t.ID == id })
	}
	for i, table := range found {
		if table != "" && !followed(table) {
			subnets = append(subnets, due[i].Subnets[0].String())
			others[table] = true
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
