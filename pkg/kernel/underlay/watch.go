// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/tune"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Times of Watch.
const (
	// stable is how long a different choice must last before it replaces the current one.
	stable = 500 * time.Millisecond
	// returning is the time in which no other interface or address replaces the chosen one
	// after the chosen interface has gone down or disappeared, and again after it has come
	// back. The IPv6 addresses disappear with the link, and a network manager needs a while
	// to restore them.
	returning = 5 * time.Second
	// After each check Watch rests for restFactor times the CPU time of the check, because
	// a router may have a million routes of which some change all the time.
	leastRest, restFactor = 100 * time.Millisecond, 20
	// checkPeriod is the time after which Watch checks again without a notification.
	// checkAgain is that time after a check that failed.
	checkPeriod, checkAgain = time.Minute, time.Second
	// mostMoves is the number of moves to other addresses within moveWindow after which an interface
	// that works is kept. Each move interrupts the traffic of all pods, and a choice that depends on
	// its own consequences would move forever.
	mostMoves, moveWindow = 3, time.Minute
)

// Watch repeats the choice of Wait whenever links, addresses or routes change in the network
// namespace of the calling thread. now is the current choice. Watch calls changed when the
// name, index, MTU or an address differs, and continues from the new choice. It keeps an
// address in use as long as the address is usable, unless an option names another. While no
// interface can be chosen, or a family has lost its address, it keeps the last choice.
//
// After each check that could read the facts, Watch calls usable with the reason why packets
// cannot leave by the current choice, or with nil if they can. Watch blocks until ctx ends, then
// returns nil. It returns an error only if it cannot subscribe to changes. changed and usable
// must not block.
func Watch(ctx context.Context, o Options, now Interface, changed func(Interface), usable func(error)) error {
	notified, stop, err := o.subscribe()
	if err != nil {
		return err
	}
	defer stop()

	f := follower{now: now}
	for ctx.Err() == nil {
		o.InUse = f.now
		read := o.gather(ctx, leastRest)
		if ctx.Err() != nil {
			return nil
		}

		facts := read.facts
		err := read.err
		judged := tune.Cost()
		var c choice
		if err == nil {
			c, err = choose(facts, o)
		}
		cost := read.cost + judged()

		before := f.now
		moved, again := f.consider(ctx, observation{time.Now(), c.Interface, err, facts.isDown(f.now.Name), facts.cannotSend(f.now) == nil})
		if moved {
			f.now.Reason += facts.whyLeft(before, f.now)
			changed(f.now)
		}
		if len(facts.Links) > 0 { // there are no links if the facts could not be read
			usable(facts.cannotSend(f.now))
		}

		if again == checkPeriod { // all networks check at the same moments, and so share the reads
			again = wait.UntilNext(checkPeriod)
		}
		if wait.For(ctx, max(leastRest, restFactor*cost)) != nil || wait.ForOr(ctx, again, notified) != nil {
			return nil
		}
	}
	return nil
}

// isDown reports whether the named link is absent, down, or has no carrier.
func (f Facts) isDown(name string) bool {
	return !slices.ContainsFunc(f.Links, func(l Link) bool { return l.Name == name && l.alive() })
}

// cannotSend says why packets cannot be sent from the addresses of i.
func (f Facts) cannotSend(i Interface) error {
	for _, a := range i.Addrs {
		if slices.ContainsFunc(f.Links, func(l Link) bool { return l.sends(a.Local) }) {
			continue
		}
		if f.isDown(i.Name) {
			return fmt.Errorf("%s is not there, down, or without a carrier", i.Name)
		}
		return fmt.Errorf("%s cannot send from its address %s", i.Name, a.Local)
	}
	return nil
}

// whyLeft says why the choice from was left for to, as an addition to the reason of to. It returns "" if
// the addresses stay.
func (f Facts) whyLeft(from, to Interface) string {
	for _, a := range from.Addrs {
		if to.uses(a.Local) {
			continue
		}

		on := f.linksWith(a.Local)
		if f.isDown(from.Name) {
			return fmt.Sprintf("; %s is not there, down, or without a carrier", from.Name)
		}
		if len(on) == 0 {
			return fmt.Sprintf("; %s is gone", a.Local)
		}
		if now, _ := on[0].addr(a.Local); !now.usable() {
			return fmt.Sprintf("; %s is deprecated or not usable", a.Local)
		}
		return fmt.Sprintf("; %s with %s fits the options or the routes to other hosts less", on[0].Name, a.Local)
	}
	return ""
}

// observation is the result of one check.
type observation struct {
	at     time.Time
	choice Interface
	err    error // why no interface can be chosen
	down   bool  // the interface in use is absent, down, or has no carrier
	works  bool  // packets can leave by the interface and the addresses in use
}

// follower decides when a new choice replaces the current one.
type follower struct {
	now       Interface
	next      Interface   // the last choice if it differs from now; otherwise zero
	since     time.Time   // when next first appeared
	downSince time.Time   // since when the interface of now is down; zero if it is not
	lastDown  time.Time   // when the interface of now was last down
	missing   bool        // the last check found no interface, or only a worse one
	moves     []time.Time // of the last moves to other addresses; at most mostMoves
	unsteady  bool        // the last check has found another interface, which was not taken because of moves
}

// consider reports whether the field now has changed. again is the longest time until the next check.
func (f *follower) consider(ctx context.Context, s observation) (moved bool, again time.Duration) {
	log := klog.FromContext(ctx)
	if !s.down {
		f.downSince = time.Time{}
	} else {
		f.lastDown = s.at
		if f.downSince.IsZero() {
			f.downSince = s.at
		}
	}

	if worse(s.choice, f.now) {
		s.err = fmt.Errorf("%s has no address in its place but a link-local one", s.choice.Name)
	}
	if s.err != nil {
		if !f.missing {
			log.Error(s.err, "the external interface cannot be used now, waiting for it to return", "name", f.now.Name)
		}
		f.missing = true
		f.next = Interface{}
		return false, checkAgain
	}
	if f.missing {
		f.missing = false
		log.Info("the external interface can be used again", "name", s.choice.Name)
	}

	if same(s.choice, f.now) {
		f.next = Interface{}
		return false, checkPeriod
	}
	if !same(s.choice, f.next) {
		f.next = s.choice
		f.since = s.at
	}

	elsewhere := !slices.Equal(f.next.Addrs, f.now.Addrs)
	due := f.since.Add(stable)
	if elsewhere || f.next.Name != f.now.Name {
		from := f.lastDown // if the interface is back, some of its addresses may still be missing
		if s.down {
			from = f.downSince
		}
		if back := from.Add(returning); back.After(due) {
			due = back
		}
	}
	if s.at.Before(due) {
		return false, due.Sub(s.at)
	}

	if calm := f.calm(s.at); elsewhere && s.works && calm > 0 {
		if !f.unsteady {
			log.Error(nil, "the external interface has changed too often and is kept, although another one would be chosen", "name", f.now.Name, "other", f.next.Name,
				"reason", f.next.Reason, "moves", mostMoves, "within", moveWindow)
		}
		f.unsteady = true
		return false, calm
	}

	f.unsteady = false
	if elsewhere {
		f.moves = append(f.moves[max(0, len(f.moves)+1-mostMoves):], s.at)
	}

	f.now = f.next
	f.next = Interface{}
	f.downSince = time.Time{}
	f.lastDown = time.Time{}
	return true, checkPeriod
}

// calm returns how long no further move is allowed.
func (f *follower) calm(at time.Time) time.Duration {
	if len(f.moves) < mostMoves {
		return 0
	}
	return f.moves[0].Add(moveWindow).Sub(at)
}

// same compares what peers and the kernel use.
func same(a, b Interface) bool {
	return a.Name == b.Name && a.Index == b.Index && a.MTU == b.MTU && slices.Equal(a.Addrs, b.Addrs)
}

// worse reports whether c has a link-local address where now has a better one. After an interruption
// the link-local address returns first.
func worse(c, now Interface) bool {
	return slices.ContainsFunc(c.Addrs, func(a Address) bool {
		if !a.Local.IsLinkLocalUnicast() {
			return false
		}
		return slices.ContainsFunc(now.Addrs, func(b Address) bool {
			return b.Local.Is4() == a.Local.Is4() && !b.Local.IsLinkLocalUnicast()
		})
	})
}

// recheck is how often Wait checks without a notification, in case one was lost.
const recheck = time.Second

// Wait chooses the external interface, in the network namespace of the
// calling thread. If there is none, it waits for changes of links, addresses and routes,
// for at most timeout; zero or less means that it does not wait. If there is still none
// when the time is over, Wait returns an error with the reason. It accepts a last resort only
// when the time is over: a link-local address, because after a boot that address appears
// first, or a default route whose interface has no carrier. If ctx ends while Wait waits, Wait returns an error with the cause.
func Wait(ctx context.Context, o Options, timeout time.Duration) (Interface, error) {
	if timeout <= 0 {
		c, err := chooseNow(ctx, o)
		return c.Interface, err
	}
	return waitFor(ctx, o, timeout, recheck)
}

func waitFor(ctx context.Context, o Options, timeout, recheck time.Duration) (Interface, error) {
	changed, stop, err := o.subscribe()
	if err != nil {
		return Interface{}, err
	}
	defer stop()

	end := time.Now().Add(timeout)
	for first := true; ; first = false {
		c, err := chooseNow(ctx, o)
		if err == nil && c.lastResort == "" {
			return c.Interface, nil
		}
		if first {
			reason := err
			if err == nil {
				reason = errors.New(c.lastResort)
			}
			klog.FromContext(ctx).Info("waiting for an external interface", "timeout", timeout, "reason", reason)
		}

		left := time.Until(end)
		if left <= 0 && err != nil {
			err = fmt.Errorf("waited %s: %w", timeout, err)
		}
		if left <= 0 {
			return c.Interface, err
		}
		if wait.ForOr(ctx, min(left, recheck), changed) != nil {
			return Interface{}, fmt.Errorf("wait for an external interface: %w", context.Cause(ctx))
		}
	}
}

func chooseNow(ctx context.Context, o Options) (choice, error) {
	g := o.gather(ctx, 0)
	if g.err != nil {
		return choice{}, fmt.Errorf("choose external interface: %w", g.err)
	}
	return choose(g.facts, o)
}
