// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flanneld/flanneld/pkg/wait"
)

// targets remembers where routes to other hosts lead. The zero targets is usable.
type targets struct {
	known   map[string]Found    // results without an error, by Host.name
	asked   time.Time           // when find last forgot known, to look for all hosts again
	outside map[string]*outside // hosts that the cloud does not have, by Host.name
}

// outside is a host that the cloud does not have, or does not have yet. find looks for such a host after growing
// pauses, because looking for it may take calls that list all instances.
type outside struct {
	Found
	again time.Time // when to look for the host again
	pause wait.Backoff
}

// name identifies a host by its addresses. It takes most of the time of a comparison without changes.
func (h Host) name() string {
	var name []byte
	for _, a := range h.Addresses {
		name = append(a.AppendTo(name), ' ')
	}
	return string(name)
}

// find returns one result for each of hosts, in the same order. It asks the cloud only for hosts whose targets it
// does not remember. Once in a resync period it asks for all hosts again, except for those outside of the cloud. For
// these it asks after growing pauses. It also asks again for a host whose target is in lost. prepare is
// that of Cloud.Find. The error is that of the cloud.
func (t *targets) find(ctx context.Context, c Cloud, hosts []Host, resync time.Duration, lost map[string]bool, prepare bool) ([]Found, error) {
	if time.Since(t.asked) >= resync {
		t.known, t.asked = map[string]Found{}, time.Now()
	}
	found, missing := make([]Found, len(hosts)), []int(nil)
	ask, before := []Host(nil), t.outside
	t.outside = map[string]*outside{}
	for i, h := range hosts {
		name := h.name()
		known, ok := t.known[name]
		if o := before[name]; o != nil {
			t.outside[name] = o
			known, ok = o.Found, time.Now().Before(o.again)
		}
		if found[i] = known; !ok || lost[known.Target] {
			missing, ask = append(missing, i), append(ask, h)
		}
	}
	if len(ask) == 0 {
		return found, nil
	}
	answers, err := c.Find(ctx, ask, prepare)
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

// lostTargets returns the targets of lost routes.
func lostTargets(tables []Table) map[string]bool {
	lost := map[string]bool{}
	for _, t := range tables {
		for _, r := range t.Routes {
			if r.Lost() {
				lost[r.Target] = true
			}
		}
	}
	return lost
}
