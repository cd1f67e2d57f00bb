// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
)

// member is the cloud as one host of a fleet sees it.
type member struct {
	*cloudtest.Memory
	self string
}

func (m member) Join(context.Context) (string, error) { return m.self, nil }

// fleet is a number of hosts of which each lives a day, as preemptible instances do. The lease of a host lives for
// a further day.
type fleet struct {
	*testing.T
	*cloudtest.Memory
	renamed bool // a new instance has a new name, so the routes of its predecessor lead to nowhere
	hosts   []*inhabitant
	leases  map[netip.Prefix]lived
	last    int // number of the last subnet
}

type lived struct {
	cloud.Host
	ends time.Time // zero while the host lives
}

type inhabitant struct {
	keeper *cloud.Keeper
	subnet netip.Prefix
	target string
	begun  time.Time
	stop   func()
}

const fleetSize = 30

// replace ends the host with the number n, and starts a new one in its place.
func (f *fleet) replace(n int) {
	if h := f.hosts[n]; h != nil {
		h.stop()
		old := f.leases[h.subnet]
		old.ends = time.Now().Add(24 * time.Hour)
		f.leases[h.subnet] = old
		f.Do(func() { delete(f.Hosts, h.target) })
	}
	h := &inhabitant{target: fmt.Sprintf("host-%d", n), begun: time.Now()}
	if f.renamed {
		h.target += time.Now().Format("-02-15-04")
	}
	for used := true; used; _, used = f.leases[h.subnet] {
		f.last = f.last%255 + 1
		h.subnet = subnet(f.last)
	}
	address := netip.AddrFrom4([4]byte{192, 168, 78, byte(n)})
	own := cloud.Host{Subnets: []netip.Prefix{h.subnet}, Addresses: []netip.Addr{address}}
	f.Do(func() { f.Hosts[h.target] = []netip.Addr{address} })
	f.leases[h.subnet] = lived{Host: own}
	f.hosts[n] = h

	begun := h.begun
	h.keeper = cloud.NewKeeper(cloud.KeeperConfig{
		Cloud: member{f.Memory, h.target}, Own: own, Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")},
		Resync: 4 * resync, Compared: func() {}, Connected: func() time.Time { return begun },
	})
	ctx, cancel := context.WithCancel(f.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.keeper.Run(ctx)
	}()
	h.stop = func() {
		cancel()
		<-done
	}
	f.tell()
}

// tell ends leases that are over, and tells all hosts the others.
func (f *fleet) tell() {
	for dst, l := range f.leases {
		if !l.ends.IsZero() && time.Now().After(l.ends) {
			delete(f.leases, dst)
		}
	}
	for _, h := range f.hosts {
		if h == nil {
			continue
		}
		p := cloud.Peers{Complete: true}
		for dst, l := range f.leases {
			if dst != h.subnet {
				p.Hosts = append(p.Hosts, l.Host)
			}
		}
		h.keeper.SetPeers(p)
	}
}

// TestMonth lets a fleet of 30 hosts live for a month. A host ends every 48 minutes, and a new one takes its place. If
// an instance is created under the name of its predecessor, the table must never have more routes than there are hosts,
// and those of hosts that ended within the grace period. If it gets a new name, the table is almost full, and each new
// host must be in order after a few minutes all the same.
//
//stages:rest it takes a minute
func TestMonth(t *testing.T) {
	for name, test := range map[string]struct {
		renamed     bool
		quota, most int
	}{
		"the same names":          {false, 0, fleetSize + 1},
		"new names, a full table": {true, fleetSize + 2, fleetSize + 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &cloudtest.Memory{Quota: test.quota, Hosts: map[string][]netip.Addr{}, Tabs: []cloud.Table{{ID: "table-1", Own: true}}}
				f := &fleet{T: t, Memory: m, renamed: test.renamed, hosts: make([]*inhabitant, fleetSize), leases: map[netip.Prefix]lived{}}
				for n := range fleetSize {
					f.replace(n)
				}
				const step = 24 * time.Hour / fleetSize
				most := 0
				for turn := range 30 * fleetSize {
					for range 4 {
						<-time.After(step / 4)
						synctest.Wait()
						f.Do(func() { most = max(most, len(m.Tabs[0].Routes)) })
						for n, h := range f.hosts {
							if _, err := h.keeper.Result(t.Context()); err != nil {
								t.Fatalf("turn %d: host %d is not in order after %v: %v", turn, n, time.Since(h.begun), err)
							}
						}
					}
					f.replace(turn % fleetSize)
				}
				for _, h := range f.hosts {
					h.stop()
				}
				if most > test.most {
					t.Errorf("the table had up to %d routes, want at most %d", most, test.most)
				}
				t.Logf("up to %d routes, %d writes in a month", most, len(m.Writes))
			})
		})
	}
}
