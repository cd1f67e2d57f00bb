// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/wait"
)

// slow is a cloud in memory in which each call of Put takes a second. Tests must use its fields only in Do.
type slow struct {
	*cloudtest.Memory
	fails         error // result of the 41st call of Put
	puts          []int // number of calls of Put in each comparison
	routes        []int // number of routes in the table at the beginning of each comparison
	running, most int   // number of calls of Put in progress, now and at most
}

func (s *slow) Tables(ctx context.Context) ([]cloud.Table, error) {
	s.Do(func() { s.puts, s.routes = append(s.puts, 0), append(s.routes, len(s.Tabs[0].Routes)) })
	return s.Memory.Tables(ctx)
}

func (s *slow) Put(ctx context.Context, r cloud.Route, replace bool) (err error) {
	s.Do(func() {
		s.puts[len(s.puts)-1]++
		all := 0
		for _, n := range s.puts {
			all += n
		}
		if all == 41 {
			err = s.fails
		}
		s.running++
		s.most = max(s.most, s.running)
	})
	defer s.Do(func() { s.running-- })
	if wait.For(ctx, time.Second) != nil {
		return cloud.ErrUnavailable
	}
	if err != nil {
		return err
	}
	return s.Memory.Put(ctx, r, replace)
}

// TestSeveralRoutesAtOnce lets a leader put the routes to 99 other hosts, up to atOnce at the same time. The 40th
// of these calls fails with the error fails, if that is not nil. After an error that stops the calls, the leader
// must not repeat the calls that have succeeded, and must make the others later.
func TestSeveralRoutesAtOnce(t *testing.T) {
	missing := &cloud.MissingError{Permissions: []string{"memory:put"}, Page: "page.md"}
	for name, test := range map[string]struct {
		atOnce        int
		fails         error
		quota         int
		least, most   int // expected calls in the second comparison, the first one with the other hosts
		routes, later int // expected routes: at least so many after that comparison, and exactly so many an hour later
	}{
		"one at a time":                  {0, nil, 0, 99, 99, 100, 100},
		"one at a time, no answer":       {0, cloud.ErrUnavailable, 0, 40, 40, 40, 100},
		"one at a time, a quota":         {0, nil, 40, 40, 40, 40, 40},
		"eight":                          {8, nil, 0, 99, 99, 100, 100},
		"eight, a route is refused":      {8, errors.New("the route is not valid"), 0, 99, 99, 99, 100},
		"eight, no answer":               {8, cloud.ErrUnavailable, 0, 40, 47, 40, 100},
		"eight, too many calls":          {8, cloud.ErrThrottled, 0, 40, 47, 40, 100},
		"eight, a permission is missing": {8, missing, 0, 40, 47, 40, 100},
		"eight, a quota":                 {8, nil, 40, 40, 47, 40, 40},
	} {
		t.Run(name, func(t *testing.T) {
			var s *slow
			configure := func(c *cloud.KeeperConfig) {
				s = &slow{Memory: c.Cloud.(*cloudtest.Memory), fails: test.fails}
				c.Cloud, c.All, c.AtOnce = s, true, test.atOnce
			}
			runWith(t, configure, func(b *bed) {
				p := cloud.Peers{Complete: true}
				b.Do(func() {
					b.Quota = test.quota
					for n := 2; n <= 100; n++ {
						b.Hosts[target(n)] = []netip.Addr{address(n)}
						p.Hosts = append(p.Hosts, lease(n))
					}
				})
				b.keeper.SetPeers(p) // during the first comparison, which is about the own route
				b.hour()
				b.Do(func() {
					if n := s.puts[1]; n < test.least || n > test.most {
						t.Errorf("%d calls, want %d to %d", n, test.least, test.most)
					}
					if n := s.routes[2]; n < test.routes {
						t.Errorf("%d routes after the first comparison with the other hosts, want at least %d", n, test.routes)
					}
					if n := len(b.Tabs[0].Routes); n != test.later || len(b.Writes) != test.later {
						t.Errorf("%d routes by %d writes an hour later, want %d", n, len(b.Writes), test.later)
					}
					if want := max(test.atOnce, 1); s.most != want {
						t.Errorf("up to %d calls at the same time, want %d", s.most, want)
					}
				})
			})
		})
	}
}
