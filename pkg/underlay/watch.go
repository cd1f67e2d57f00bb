package underlay

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// How a change is followed.
const (
	// settle is how long what differs must have stayed the same.
	settle = 500 * time.Millisecond
	// returning is how long another interface or address is not taken after
	// the chosen interface was down or gone: IPv6 addresses go with the link,
	// and a network manager takes a while to put them back.
	returning = 5 * time.Second
	// A look is followed by a rest, in proportion to the CPU that it costs: a
	// router may hold a million routes, and change some all the time.
	leastRest, restFactor = 100 * time.Millisecond, 20
	// relook is how often Watch looks without having been told of a change,
	// and relookFailed how often after a look that failed.
	relook, relookFailed = time.Minute, time.Second
)

// Watch chooses the external interface anew, as Wait does, whenever links,
// addresses or routes change in the network namespace of the calling thread.
// It calls changed when the choice has another name, index, MTU or address
// than now, and goes on from there. An address in use stays, as long as it can
// be used, where options do not name another. While there is nothing to choose, or a
// family has lost its address, the last choice stands. With every look it tells
// usable what keeps packets from leaving by the choice as it stands: nil if nothing
// does. It blocks until ctx ends, and returns nil then; changed and usable must not
// block.
func Watch(ctx context.Context, o Options, now Interface, changed func(Interface), usable func(error)) error {
	told, stop, err := subscribe(o)
	if err != nil {
		return err
	}
	defer stop()
	f := follower{now: now}
	for ctx.Err() == nil {
		o.InUse = f.now
		start := spent()
		facts, err := Gather(ctx, o)
		if ctx.Err() != nil {
			return nil
		}
		var c choice
		if err == nil {
			c, err = choose(facts, o)
		}
		cost := spent() - start
		moved, again := f.consider(ctx, sight{time.Now(), c.Interface, err, facts.away(f.now.Name)})
		if moved {
			changed(f.now)
		}
		if len(facts.Links) > 0 { // or the look has failed
			usable(facts.lacks(f.now))
		}
		sleep(ctx, max(leastRest, restFactor*cost), nil)
		sleep(ctx, again, told)
	}
	return nil
}

// spent returns the CPU time that the process has used: that of a look, and
// of what else goes on meanwhile. How long a look takes would say more about
// others on a busy host.
func spent() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// sleep returns after d, when told delivers or when ctx ends.
func sleep(ctx context.Context, d time.Duration, told <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-told:
	case <-timer.C:
	}
}

// away reports whether the named link carries nothing: it is not there, down,
// or without a carrier.
func (f Facts) away(name string) bool {
	return !slices.ContainsFunc(f.Links, func(l Link) bool { return l.Name == name && l.Up && l.Running })
}

// lacks says what keeps packets from leaving from the addresses of i; nil if nothing
// does.
func (f Facts) lacks(i Interface) error {
	for _, a := range i.Addrs {
		switch {
		case slices.ContainsFunc(f.Links, func(l Link) bool { return l.sends(a.Local) }):
		case f.away(i.Name):
			return fmt.Errorf("%s is not there, down, or without a carrier", i.Name)
		default:
			return fmt.Errorf("%s cannot send from its address %s", i.Name, a.Local)
		}
	}
	return nil
}

// sight is one look.
type sight struct {
	at     time.Time
	choice Interface
	err    error // why there is no choice
	away   bool  // the interface that was chosen before carries nothing
}

// follower decides when a choice takes the place of the one before.
type follower struct {
	now     Interface
	next    Interface // what differs from now; zero if nothing does
	since   time.Time // when next was first seen
	gone    time.Time // since when the interface of now carries nothing; zero if it does
	away    time.Time // when it was last seen to
	missing bool
}

// consider takes a look in. It reports whether now has changed, and when to
// look again at the latest.
func (f *follower) consider(ctx context.Context, s sight) (moved bool, again time.Duration) {
	log := klog.FromContext(ctx)
	switch {
	case !s.away:
		f.gone = time.Time{}
	case f.gone.IsZero():
		f.gone = s.at
	}
	if s.away {
		f.away = s.at
	}
	if s.err == nil && worse(s.choice, f.now) {
		s.err = fmt.Errorf("%s has only a link-local address", s.choice.Name)
	}
	if s.err != nil {
		if !f.missing {
			log.Error(s.err, "the external interface cannot be used now, waiting for it to return", "name", f.now.Name)
		}
		f.missing, f.next = true, Interface{}
		return false, relookFailed
	}
	if f.missing {
		f.missing = false
		log.Info("the external interface can be used again", "name", s.choice.Name)
	}
	if same(s.choice, f.now) {
		f.next = Interface{}
		return false, relook
	}
	if !same(s.choice, f.next) {
		f.next, f.since = s.choice, s.at
	}
	due := f.since.Add(settle)
	if f.next.Name != f.now.Name || !slices.Equal(f.next.Addrs, f.now.Addrs) {
		from := f.away // it is back, but not all of it, perhaps
		if s.away {
			from = f.gone
		}
		due = later(due, from.Add(returning))
	}
	if s.at.Before(due) {
		return false, due.Sub(s.at)
	}
	f.now, f.next, f.gone, f.away = f.next, Interface{}, time.Time{}, time.Time{}
	return true, relook
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// same reports whether a and b are alike in all that matters to peers and to
// the kernel.
func same(a, b Interface) bool {
	return a.Name == b.Name && a.Index == b.Index && a.MTU == b.MTU && slices.Equal(a.Addrs, b.Addrs)
}

// worse reports whether c has only a link-local address in a family where now
// has a better one: it is the first to be back.
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
