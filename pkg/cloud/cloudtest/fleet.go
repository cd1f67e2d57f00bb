// SPDX-License-Identifier: Apache-2.0

package cloudtest

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
)

// Fleet is a cloud with a table that is as yet empty, in which Live starts and ends instances.
type Fleet struct {
	// Start starts the instance with a number, and returns the cloud as its host sees it. place is the place of the
	// host in the fleet, below FleetSize.
	Start    func(t *testing.T, place, number int, address netip.Addr) cloud.Cloud
	End      func(number int)
	SetQuota func(int)
	Resync   time.Duration // of the keepers; a long one makes the test short
	// Routes returns the number of routes that calls have made.
	Routes func() int
}

// FleetSize is the number of hosts in a Fleet.
const FleetSize = 30

// Live lets a fleet of preemptible instances live for some days. Each instance lives for a day, and its lease for a
// further one: an instance ends every 48 minutes, and another takes its place. If that has the number and the address
// of its predecessor, as in a managed group, the table must never have more routes than there are hosts, and those of
// hosts that ended within the grace period. If it has others, the routes of all that ended lead to nowhere and the
// table is almost full, and each new host must be in order after a few minutes all the same. With -short it lives for
// three days at most: on the second one instances end as often as later, and on the third one so do leases.
//
// The servers of f, if it has any, must not run in a bubble of testing/synctest, so that they do not stop its time.
func Live(t *testing.T, f Fleet, days int, renamed bool) {
	t.Helper()
	if testing.Short() {
		days = min(days, 3)
	}

	most := FleetSize + 1
	if renamed {
		most = FleetSize + 2
		f.SetQuota(most)
	}
	synctest.Test(t, func(t *testing.T) {
		(&life{T: t, Fleet: f, renamed: renamed, leases: map[netip.Prefix]lived{}}).live(days, most)
	})
}

type life struct {
	*testing.T
	Fleet
	renamed bool
	hosts   [FleetSize]*inhabitant
	leases  map[netip.Prefix]lived
	subnets int // number of the last subnet
	started int // instances so far
}

type lived struct {
	cloud.Host
	ends time.Time // zero while the host lives
}

type inhabitant struct {
	keeper *cloud.Keeper
	subnet netip.Prefix
	number int
	begun  time.Time
	stop   func()
}

func (l *life) live(days, most int) {
	for place := range FleetSize {
		l.replace(place)
	}

	const step = 24 * time.Hour / FleetSize
	for turn := range days * FleetSize {
		for range 4 {
			<-time.After(step / 4)
			synctest.Wait()
			if n := l.Routes(); n > most {
				l.Fatalf("turn %d: the table has %d routes, want at most %d", turn, n, most)
			}
			for place, h := range l.hosts {
				if _, err := h.keeper.Result(l.Context()); err != nil {
					l.Fatalf("turn %d: host %d is not in order after %v: %v", turn, place, time.Since(h.begun), err)
				}
			}
		}
		l.replace(turn % FleetSize)
	}

	for _, h := range l.hosts {
		h.stop()
	}
}

// replace ends the host at a place, and starts a new one there.
func (l *life) replace(place int) {
	if h := l.hosts[place]; h != nil {
		h.stop()
		old := l.leases[h.subnet]
		old.ends = time.Now().Add(24 * time.Hour)
		l.leases[h.subnet] = old
		l.End(h.number)
	}

	h := &inhabitant{number: 10 + place, begun: time.Now()}
	if l.renamed {
		h.number = 10 + l.started
	}

	l.started++
	for used := true; used; _, used = l.leases[h.subnet] {
		l.subnets = l.subnets%255 + 1
		h.subnet = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(l.subnets), 0}), 24)
	}

	address := netip.AddrFrom4([4]byte{192, 168, 78 + byte(h.number>>8), byte(h.number)})
	own := cloud.Host{Subnets: []netip.Prefix{h.subnet}, Addresses: []netip.Addr{address}}
	l.leases[h.subnet] = lived{Host: own}
	l.hosts[place] = h

	begun := h.begun
	h.keeper = cloud.NewKeeper(cloud.KeeperConfig{
		Cloud: l.Start(l.T, place, h.number, address), Own: own, Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")},
		Resync: l.Resync, Compared: func() {}, Connected: func() time.Time { return begun },
	})

	ctx, cancel := context.WithCancel(l.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.keeper.Run(ctx)
	}()

	h.stop = func() {
		cancel()
		<-done
	}
	l.tell()
}

// tell ends leases that are over, and tells all hosts the others.
func (l *life) tell() {
	for dst, one := range l.leases {
		if !one.ends.IsZero() && time.Now().After(one.ends) {
			delete(l.leases, dst)
		}
	}

	for _, h := range l.hosts {
		if h == nil {
			continue
		}
		p := cloud.Peers{Complete: true}
		for dst, one := range l.leases {
			if dst != h.subnet {
				p.Hosts = append(p.Hosts, one.Host)
			}
		}
		h.keeper.SetPeers(p)
	}
}

// InProcess is a transport that gives each request to a handler, without a connection. So a test with the time of
// testing/synctest does not wait for one.
type InProcess struct{ http.Handler }

// RoundTrip implements http.RoundTripper.
func (p InProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Host = r.URL.Host
	if r.Body == nil {
		r.Body = http.NoBody
	}
	answer := httptest.NewRecorder()
	p.ServeHTTP(answer, r)
	return answer.Result(), nil
}

// Connectionless makes clients without a transport of their own give each request to h until the end of the test.
func Connectionless(t *testing.T, h http.Handler) {
	t.Helper()
	before := http.DefaultTransport
	http.DefaultTransport = InProcess{h}
	t.Cleanup(func() { http.DefaultTransport = before })
}
