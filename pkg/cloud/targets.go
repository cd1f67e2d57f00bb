// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/wait"
)

// targets remembers where routes to other hosts lead. The zero targets is usable.
type targets struct {
	known   map[string]Found    // results without an error, by Host.name
	asked   time.Time           // when find last forgot known, to look for all hosts again
	outside map[string]*outside // hosts that the cloud does not have, by Host.name
}

// outside is a host that the cloud does not have, or does not have yet. find looks for such a host after growing
// pauses, because this may take calls that list all instances.
type outside struct {
	Found
	again time.Time // when to look for the host again
	pause wait.Backoff
}

// name identifies a host by its addresses.
func (h Host) name() string { return fmt.Sprint(h.Addresses) }

// find returns one result for each of hosts, in the same order. It asks the cloud only for hosts whose targets it
// does not remember. Once in a resync period it asks for all hosts again, except those outside of the cloud: it asks
// for these after growing pauses. It also asks again for a host whose target is in lost.
func (t *targets) find(ctx context.Context, c Cloud, hosts []Host, resync time.Duration, lost map[string]bool) ([]Found, error) {
	if time.Since(t.asked) >= resync {
		t.known, t.asked = map[string]Found{}, time.Now()
	}
	found, missing := make([]Found, len(hosts)), []int(nil)
	ask, before := []Host(nil), t.outside
	t.outside = map[string]*outside{}
	for i, h := range hosts {
		known, ok := t.known[h.name()]
		if o := before[h.name()]; o != nil {
			t.outside[h.name()] = o
			known, ok = o.Found, time.Now().Before(o.again)
		}
		if found[i] = known; !ok || lost[known.Target] {
			missing, ask = append(missing, i), append(ask, h)
		}
	}
	if len(ask) == 0 {
		return found, nil
	}
	answers, err := c.Find(ctx, ask)
	if err != nil {
		return nil, fmt.Errorf("find the hosts of leases in the cloud: %w", err)
	}
	for n, i := range missing {
		found[i] = answers[n]
		t.note(hosts[i].name(), answers[n], resync)
	}
	return found, nil
}

// note remembers the result f for the host with this name. It does not remember an error, unless the host is outside
// of the cloud.
func (t *targets) note(name string, f Found, resync time.Duration) {
	delete(t.known, name)
	if f.Err == nil {
		t.known[name] = f
	}
	if !errors.Is(f.Err, errOutside) {
		delete(t.outside, name)
		return
	}
	if t.outside[name] == nil {
		t.outside[name] = &outside{Found: f, pause: wait.Backoff{Least: min(leastConfirm, resync), Most: resync}}
	}
	t.outside[name].again = time.Now().Add(t.outside[name].pause.Next())
}

// plan contains what one comparison wants: the routes, and the reasons why others are impossible.
type plan struct {
	wanted   []want
	problems problems // why there are no right routes to some destinations
	// all is set if wanted has the routes to all hosts to which routes can lead: the store has told the hosts, and
	// the cloud their targets.
	all bool
	// followers contains the first subnet of each host whose packets follow a table, by the id of the table. It
	// is complete if all is set.
	followers map[string][]netip.Prefix
}

// plan returns the wanted routes, in an order that is the same on all hosts: if a table has no place for all
// routes, each leader puts the same ones. own is the target of this host. The plan has only the routes to this
// host if All is not set, if the store has not answered, or if err is not nil.
func (k *Keeper) plan(ctx context.Context, tables []Table, own string) (p *plan, err error) {
	p = &plan{followers: map[string][]netip.Prefix{}}
	for _, dst := range k.Own.Subnets {
		p.wanted = append(p.wanted, want{Dst: dst, Target: own})
	}
	if !k.All {
		return p, nil
	}
	hosts := k.others()
	if !k.answered() {
		return p, nil
	}
	found, err := k.targets.find(ctx, k.Cloud, hosts, k.Resync, lostTargets(tables))
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
			} else {
				p.wanted = append(p.wanted, want{Dst: dst, Target: found[i].Target, Other: true})
			}
		}
	}
	slices.SortFunc(p.wanted, func(a, b want) int { return a.Dst.Compare(b.Dst) })
	return p, nil
}

// others returns the other hosts, without those whose leases are refused. It sets k.read, so that the next change
// of the hosts causes a comparison.
func (k *Keeper) others() []Host {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.read = true
	return slices.DeleteFunc(slices.Clone(k.peers.Hosts), func(h Host) bool { return h.Refused })
}

// lostTargets returns the targets of lost routes.
func lostTargets(tables []Table) map[string]bool {
	lost := map[string]bool{}
	for _, t := range tables {
		for _, r := range t.Routes {
			if r.Lost {
				lost[r.Target] = true
			}
		}
	}
	return lost
}

// problems are the reasons why routes are not in order.
type problems []problem

type problem struct {
	dst    netip.Prefix
	action string // the action that has failed, with its route; empty if no action has failed
	err    error  // has the same text for all routes with the same problem, so that an announcement is short
}

func (p *problems) add(dst netip.Prefix, action string, err error) {
	*p = append(*p, problem{dst, action, err})
}

// full returns the error with the action before its text.
func (p problem) full() error {
	if p.action == "" {
		return p.err
	}
	return fmt.Errorf("%s: %w", p.action, p.err)
}

// of returns the problems of the destinations dsts as one error, or nil if they have none. If dsts is empty, it
// returns the problems of all destinations.
func (p problems) of(dsts []netip.Prefix) error {
	var errs []error
	for _, one := range p {
		if len(dsts) == 0 || slices.Contains(dsts, one.dst) {
			errs = append(errs, one.full())
		}
	}
	return oneline.Join(errs...)
}
