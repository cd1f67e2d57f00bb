// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet"
)

// While passes fail, a new error is logged at once. If the text of the error differs each time, for
// example because many changes fail in random order, errorBurst errors are logged at once, and then
// one in errorEvery.
const (
	errorEvery = time.Minute
	errorBurst = 5
)

// syncLog logs the start and the end of refusals, failures and shared addresses, and not each pass.
// It is not safe for concurrent use.
type syncLog struct {
	onRefused func(key, reason string) // may be nil
	refused   map[string]string        // reasons of the present refusals, by lease key
	refusal   *loglimit.Changes
	shares    map[netip.Addr]struct{} // the present shared addresses
	sharing   *loglimit.Changes
	failing   bool          // the last pass has failed
	logged    string        // last logged error
	limit     *rate.Limiter // limit of logged errors without a success between them
	numHeld   int           // at the last pass
	choices   choiceLog
}

func newSyncLog(onRefused func(key, reason string)) syncLog {
	return syncLog{
		onRefused: onRefused, refused: map[string]string{}, refusal: loglimit.NewChanges(loglimit.Many),
		shares: map[netip.Addr]struct{}{}, sharing: loglimit.NewChanges(loglimit.Many),
		limit: rate.NewLimiter(rate.Every(errorEvery), errorBurst), choices: choiceLog{waiting: map[string]time.Time{}},
	}
}

func (l *syncLog) held(ctx context.Context, keys []string) {
	log := klog.FromContext(ctx)
	n := len(keys)
	if n > l.numHeld {
		log.Error(nil, "the store has forgotten peers that it did not remove: they are kept until it contradicts them or their lease has run out",
			"kept", n, "first", keys[0])
	}

	// After a store was emptied, all peers come back one by one. Only the last one is worth a line.
	if n == 0 && l.numHeld > 0 {
		log.Info("no peer is kept any more that the store does not have")
	}
	l.numHeld = n
}

// refusals logs what has changed for the leases with these keys. reason returns "" for a lease that is
// not refused.
func (l *syncLog) refusals(ctx context.Context, keys map[string]struct{}, reason func(key string) string) {
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		why := reason(key)
		if why == l.refused[key] {
			continue
		}
		if why == "" {
			delete(l.refused, key)
		} else {
			l.refused[key] = why
		}

		log, ok := l.refusal.Next(klog.FromContext(ctx))
		if !ok {
			continue
		}
		if why == "" {
			log.Info("lease no longer refused", "lease", key)
			continue
		}
		log.Error(nil, "lease refused", "lease", key, "reason", why)
		if l.onRefused != nil {
			l.onRefused(key, why)
		}
	}
}

// shared logs which of the present shared addresses are new, and which are gone. The leases that share
// one are all served, but one of them may be that of a host that is gone.
func (l *syncLog) shared(ctx context.Context, present []subnet.SharedPublicIP) {
	before := maps.Clone(l.shares)
	clear(l.shares)
	for _, s := range present {
		l.shares[s.PublicIP] = struct{}{}
		if _, known := before[s.PublicIP]; known {
			delete(before, s.PublicIP)
		} else if log, ok := l.sharing.Next(klog.FromContext(ctx)); ok {
			log.Error(nil, "leases share a public address", "publicIP", s.PublicIP, "leases", s.Keys[:2], "count", len(s.Keys))
		}
	}

	for _, a := range slices.SortedFunc(maps.Keys(before), netip.Addr.Compare) {
		if log, ok := l.sharing.Next(klog.FromContext(ctx)); ok {
			log.Info("leases no longer share a public address", "publicIP", a)
		}
	}
}

func (l *syncLog) result(ctx context.Context, err error) {
	log := klog.FromContext(ctx)
	if err != nil && (!l.failing || err.Error() != l.logged && l.limit.Allow()) {
		log.Error(err, "data path not in order, trying again")
		l.logged = err.Error()
	}
	if err == nil && l.failing {
		log.Info("data path in order again")
	}
	l.failing = err != nil
}

const (
	// choicesPause is the least time between two log lines about choices.
	choicesPause = 5 * time.Second
	// patience is the time after which the log names a peer that its preferred backend does not serve.
	patience = time.Minute
)

// choiceLog logs how many peers each backend of Outcome.Choice serves, and names the peers that wait for the
// preferred backend.
type choiceLog struct {
	counts  map[string]int       // numbers of peers by backend that were logged last
	waiting map[string]time.Time // since when a peer waits, by lease key; zero if the log has named it
	next    time.Time            // when the next line may be logged
}

// log compares the choices for all peers with what it has logged. It returns the time until it must be called
// again, or zero if nothing waits to be logged.
func (l *choiceLog) log(
	ctx context.Context, now time.Time, peers map[string]*subnet.Lease, choice func(key string) Choice,
) (again time.Duration) {
	counts := map[string]int{}
	var late []string
	for key := range peers { // without a copy for each of thousands of peers
		c := choice(key)
		if c.Backend == "" {
			continue
		}
		counts[c.Backend]++
		since, known := l.waiting[key]
		switch {
		case c.Waiting == "":
		case !known:
			l.waiting[key] = now
			again = least.Of(again, patience)
		case since.IsZero():
		case now.Sub(since) < patience:
			again = least.Of(again, patience-now.Sub(since))
		default:
			late = append(late, key)
		}
	}

	maps.DeleteFunc(l.waiting, func(key string, _ time.Time) bool { return choice(key).Waiting == "" })
	if maps.Equal(counts, l.counts) && len(late) == 0 {
		return again
	}
	if left := l.next.Sub(now); left > 0 {
		return least.Of(again, left)
	}

	const shown = 10
	slices.Sort(late)
	some := []string{}
	for i, key := range late {
		l.waiting[key] = time.Time{}
		if i < shown {
			some = append(some, key+": "+choice(key).Waiting)
		}
	}
	l.counts = counts
	l.next = now.Add(choicesPause)
	klog.FromContext(ctx).Info("packets to peers go by these backends",
		"peers", counts, "late", len(late), "because", some)
	return again
}
