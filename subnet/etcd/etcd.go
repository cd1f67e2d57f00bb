// SPDX-License-Identifier: Apache-2.0

// Package etcd stores leases in etcd v3, in the keys and values that flannel uses:
// <prefix>/config contains the configuration, and each <prefix>/subnets/<key> one lease. Every
// write of a lease is a compare-and-swap. networks.go describes further keys.
//
// The methods of the Manager are in these files:
//
//   - Config: networkconfig.go, which also reports changes of the configuration
//   - Recall: recall.go
//   - Acquire: acquire.go, with the choice of the subnets in plan.go. exhausted.go waits for a free
//     subnet.
//   - Keep: keep.go. Acquire and Keep write this host's lease with write.go, get and renew etcd leases
//     with grants.go, and encode values with package codec.
//   - Watch: watch.go, with the cache in leasecache.go, to which events.go applies events.
//     graceperiod.go tells which leases may come back after an outage, and audit.go compares the
//     last known state with a list later.
//   - Network, Networks, Observe and Release, for several networks in one store: networks.go
//
// These methods use list.go, which reads leases, restore.go, which finds out whether the store still
// has the leases of the cache, and brings them up to date, stream.go, which watches keys and finds out whether
// the server is behind, and request.go, which makes requests and repeats them. All of them share the
// state of the Manager in manager.go, which uses the types in config.go, entry.go and own.go.
// client.go owns the connection, login.go logs in, and errors.go explains errors. The Admin, for
// operators, is in admin.go.
package etcd

import (
	"math"
	"path"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet"
)

// New returns a manager. It reads the TLS files but does not connect, so an error is a mistake in
// cfg. The caller must Close the manager.
func New(cfg Config) (*Manager, error) {
	m := newManager(cfg)
	var err error
	if m.client, err = newClient(cfg, &m.timing); err != nil {
		return nil, err
	}
	return m, nil
}

func newManager(cfg Config) *Manager {
	if cfg.RenewMargin <= 0 {
		cfg.RenewMargin = time.Hour
	}
	if cfg.TTL <= 0 {
		cfg.TTL = subnet.TTL
	}

	cfg.TTL = time.Duration(math.Ceil(cfg.TTL.Seconds())) * time.Second
	m := &Manager{
		cfg: cfg, dir: path.Join(cfg.Prefix, "subnets") + "/", timing: defaultTiming(), wall: wall,
		outage: loglimit.NewOutage("etcd", cfg.OnStatus), undecodable: loglimit.NewChanges(loglimit.Many), writing: semaphore.NewWeighted(1),
	}

	m.self.Store(&self{})
	m.cache.Store(newLeaseCache(cfg))
	m.cfg.Known = subnet.LedgerState{}
	return m
}

func wall() time.Time { return time.Now().Round(0) }
