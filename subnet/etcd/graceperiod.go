// SPDX-License-Identifier: Apache-2.0

package etcd

import "time"

// gracePeriod is a short time after a long outage. If a store was unavailable for so long that nodes could
// not renew their leases, it deletes the leases as soon as it is available again. The nodes have run all the
// time and take their leases again within seconds. A host that applied those deletions would disconnect all
// nodes for these seconds: see subnet.Update.
type gracePeriod struct {
	lastContact time.Time // when the store last sent something
	grace       time.Time // end of the grace period; zero if there is none
}

// streamWasUp records that a stream was up until now, even if the store has sent nothing on it.
// unnoticed is how long a connection can be dead before that is noticed, so the last contact counts
// as that long ago at most.
func (g *gracePeriod) streamWasUp(now time.Time, unnoticed time.Duration) {
	if latest := now.Add(-unnoticed); g.lastContact.Before(latest) {
		g.lastContact = latest
	}
}

// contact records that the store has sent something. If the contact before was longer ago than
// margin, a grace period of that length begins.
func (g *gracePeriod) contact(now time.Time, margin, length time.Duration) {
	if !g.lastContact.IsZero() && now.Sub(g.lastContact) > margin {
		g.grace = now.Add(length)
	}
	g.lastContact = now
}

// end ends a grace period that is over, and reports whether there was one.
func (g *gracePeriod) end() bool {
	over := !g.grace.IsZero() && !g.lastContact.Before(g.grace)
	if over {
		g.grace = time.Time{}
	}
	return over
}
