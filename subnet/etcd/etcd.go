// SPDX-License-Identifier: Apache-2.0

// Package etcd stores leases in etcd v3, in the keys and values that flannel uses:
// <prefix>/config contains the configuration, and each <prefix>/subnets/<key> one lease. Every
// write of a lease is a compare-and-swap.
//
// The methods of the Manager are in these files:
//
//   - Config: etcd.go; package codec decodes keys and values, and list.go lists all leases
//   - Recall: list.go
//   - Acquire: acquire.go chooses and creates the own lease, write.go has the transactions, and
//     exhausted.go waits for a free subnet
//   - Keep: keep.go
//   - Watch: watch.go, with the cache in leasecache.go. graceperiod.go retains leases that the store
//     has deleted after an outage. restore.go continues from the last known state, and audit.go
//     compares that state with a list later. config.go reports changes of the configuration.
//   - Lead and Leader: leader.go
//
// Below them, stream.go watches keys and finds out whether the server is behind, client.go owns the
// connection and login.go its login, and errors.go explains errors. The Admin, for operators, is in
// admin.go.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"path"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/outage"
	"github.com/flanneld/flanneld/subnet"
)

// Config says where the store is and how to use it.
type Config struct {
	// Endpoints are URLs or host:port. The scheme of the first one decides for all of them whether
	// TLS is used. Without a scheme TLS is used if one of the files is given.
	Endpoints []string
	// Prefix is the prefix of all keys. Superfluous slashes are removed.
	Prefix string
	// CAFile, CertFile and KeyFile are paths of PEM files. CAFile alone is sufficient for TLS.
	// CertFile and KeyFile must be given together.
	CAFile, CertFile, KeyFile string
	// Username and Password are used if both are given.
	Username, Password string
	// RenewMargin is the time before the end of the lease at which the lease is renewed at the
	// latest. With a TTL that is not much longer it is shortened: see Manager.margin. Zero means
	// one hour.
	RenewMargin time.Duration
	// Previous contains the subnets that this node had and wants again, of one or both families,
	// best first.
	Previous []netip.Prefix
	// Own and Known are the last known state of an earlier run, with the own lease as the store
	// had it. If the store is the same, the manager does not list its leases at the start, but
	// reads only the changes since then. Both may be zero.
	Own   subnet.Lease
	Known subnet.LedgerState
	// OnRepaired is called with the number of leases of Known that differed from the store's
	// although nothing has changed them since. It must not block, and must not call the manager.
	// It may be nil, like OnStatus, OnLease and OnConfig.
	OnRepaired func(leases int)
	// TTL is the time to live of the lease, rounded up to seconds. Zero means subnet.TTL.
	TTL time.Duration
	// OnStatus is called with the reason when the store becomes unusable, and with nil when it
	// becomes usable again. It must not block, and must not call the manager.
	OnStatus func(error)
	// OnLease is called with the own lease whenever it was acquired, written again or renewed. It
	// must not block, and must not call the manager.
	OnLease func(subnet.Lease)
	// OnConfig is called with the text of the configuration, or nil if there is none, when Watch
	// begins, when it resumes after a failure, and when the configuration has changed. So the text
	// may be the same as before. OnConfig must not block, and must not call the manager.
	OnConfig func(text []byte)
	// Interner saves memory in a program with many managers. It may be nil.
	Interner *Interner
}

// Manager is a subnet.Manager on etcd. It is safe for concurrent use.
type Manager struct {
	cfg    Config
	dir    string // prefix of the keys of leases, with a slash at its end
	timing timing
	wall   func() time.Time // returns the present time without the reading of the monotonic clock
	client *client
	guest  bool // the connection belongs to another manager
	outage *outage.Tracker

	// writing guards own, unanswered and writes: it contains an element while a goroutine uses them.
	writing    chan struct{}
	own        ownLease
	unanswered []ownLease // writes after own that the store has not answered: it may have executed one, or may do so later
	writes     int        // number of writes of the own key, with or without an answer
	ownKey     atomic.Pointer[string]
	// forAcquire contains the listing that the next Acquire uses, and forWatch the one that the
	// next Watch uses.
	forAcquire, forWatch stash
	cache                atomic.Pointer[leaseCache]    // the cache of a Watch that has ended, for the next Watch
	known                atomic.Pointer[lastKnown]     // see restore
	replaced             atomic.Bool                   // the store is not the one of the earlier run, and Watch has not published that yet
	exhausted            atomic.Pointer[exhaustedPool] // see awaitFreeSubnet
	resumed              atomic.Pointer[subnet.Lease]  // see Resumed
	slow                 atomic.Bool                   // the last request took longer than timing.slow
	late                 atomic.Int32                  // how many times the deadline of requests is doubled, at most maxLate
	// configSeen is the revision of the configuration whose warnings were logged.
	configSeen atomic.Int64
}

var (
	_ subnet.Manager  = (*Manager)(nil)
	_ subnet.Resumer  = (*Manager)(nil)
	_ subnet.Releaser = (*Manager)(nil)
	_ subnet.Observer = (*Manager)(nil)
	_ subnet.Elector  = (*Manager)(nil)
)

// timing contains the intervals that tests shorten.
type timing struct {
	request, page            time.Duration // deadlines: of a request, and of a request for a page of a list
	login                    time.Duration // deadline of a login: the server may have to process the logins of all hosts
	spread                   time.Duration // multiplied by the number of hosts, the longest wait of client.turn
	slow                     time.Duration // a request that takes longer shows that the store cannot keep up
	quiet, idle, probeAnswer time.Duration // see follow
	check                    time.Duration // see verify
	back                     time.Duration // time after which a host tries its preferred endpoint again; see comeBack
	dead                     time.Duration // the time in which pings detect a dead connection
	backoffMin, backoff      time.Duration
	restoreMin, restored     time.Duration // shortest and longest pause after the own key had to be written again
	gracePeriod              time.Duration // see the type gracePeriod
	catchUp, catchUpLate     time.Duration // limits of replay; the second if the store is slow or does not say when all events have come
	audit, auditPage         time.Duration // latest time of the audit of a restored cache, and the pause between the pages of its list
	trustListing             time.Duration // how long a host without a subnet uses the listing that it follows; see awaitFreeSubnet
	leader                   time.Duration // time after which the store deletes the key of a leader that does not renew it
}

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
	m := &Manager{cfg: cfg, dir: path.Join(cfg.Prefix, "subnets") + "/", wall: wall, outage: outage.New("etcd", cfg.OnStatus), writing: make(chan struct{}, 1)}
	m.known.Store(newLastKnown(cfg))
	m.cfg.Known = subnet.LedgerState{}
	m.timing = timing{
		request: 5 * time.Second, page: 20 * time.Second, login: 4 * time.Minute, spread: 10 * time.Millisecond,
		slow:  time.Second,
		quiet: 12 * time.Minute, idle: 10 * time.Second, probeAnswer: 5 * time.Second,
		// Even with its variation of a fifth, check is shorter than the five minutes after which
		// etcd forgets an unused token.
		check:      4 * time.Minute,
		back:       time.Hour,
		dead:       pingAfter + pingTimeout,
		backoffMin: 100 * time.Millisecond, backoff: 5 * time.Second,
		restoreMin: time.Second, restored: time.Minute,
		gracePeriod:  time.Minute,
		trustListing: 10 * time.Minute,
		// catchUpLate is long, because a store that all hosts ask at once sends events late, and
		// lists of all leases would make it slower.
		catchUp: 2 * time.Second, catchUpLate: time.Minute,
		audit: time.Hour, auditPage: time.Second,
		leader: 30 * time.Second,
	}
	return m
}

func wall() time.Time { return time.Now().Round(0) }

// Close ends the connection. Methods that are still running return an error. Close does nothing for
// a manager that Network returned.
func (m *Manager) Close() error {
	if m.guest {
		return nil
	}
	return m.client.close()
}

// Reconnect closes the connection. The next request makes a new one. The caller uses it when this
// host has lost an address, because a connection from that address would be silent for a long time.
func (m *Manager) Reconnect() { m.client.renew() }

// Resumed implements subnet.Resumer.
func (m *Manager) Resumed(own subnet.Lease) { m.resumed.Store(&own) }

// isResumed reports whether e is the lease that was passed to Resumed: it has the same key,
// creation revision and public address. Its other data may have changed.
func (m *Manager) isResumed(e entry) bool {
	l := m.resumed.Load()
	return l != nil && e.err == nil && e.key == l.Key && uint64(e.createRevision) == l.Order &&
		hasPublicIP(e.lease, identity(subnet.Claim{Endpoints: l.Endpoints}))
}

func (m *Manager) configKey() string { return path.Join(m.cfg.Prefix, "config") }

// Config reads the configuration. See subnet.Manager.
func (m *Manager) Config(ctx context.Context) (subnet.Config, error) {
	defer m.outage.Forget(sourceConfig)
	var cfg subnet.Config
	err := m.retry(ctx, sourceConfig, func() (err error) {
		cfg, _, err = m.config(ctx)
		return err
	})
	return cfg, err
}

// config reads the configuration once. It returns subnet.ErrNoConfig, wrapped, if there is none. It
// also returns the pools, so that a configuration without usable pools is refused as early as one
// that cannot be read.
func (m *Manager) config(ctx context.Context) (subnet.Config, []subnet.Pool, error) {
	var resp *clientv3.GetResponse
	err := m.call(ctx, func(ctx context.Context, c *clientv3.Client) (err error) {
		resp, err = c.Get(ctx, m.configKey())
		return err
	})
	if err != nil {
		return subnet.Config{}, nil, err
	}
	if len(resp.Kvs) == 0 {
		return subnet.Config{}, nil, fmt.Errorf("%w: etcd key %s does not exist (it must be put with the etcd v3 API)",
			subnet.ErrNoConfig, m.configKey())
	}
	cfg, warnings, err := subnet.ParseConfig(resp.Kvs[0].Value)
	if err != nil {
		return subnet.Config{}, nil, fmt.Errorf("etcd key %s: %w", m.configKey(), err)
	}
	pools, err := cfg.Pools()
	if err != nil {
		return subnet.Config{}, nil, fmt.Errorf("etcd key %s: %w", m.configKey(), err)
	}
	if m.configSeen.Swap(resp.Kvs[0].ModRevision) != resp.Kvs[0].ModRevision {
		for _, w := range warnings {
			klog.FromContext(ctx).Error(nil, "network configuration", "key", m.configKey(), "warning", w)
		}
	}
	return cfg, pools, nil
}

// maxLate is the maximum of Manager.late: the deadline of requests is at most four times the usual one.
const maxLate = 2

// call makes one request with the usual deadline and explains its error. It returns the error of
// ctx if ctx has ended. After a request that came to its deadline the next one has twice as much
// time, until the store is fast again: if thousands of hosts use the store at once and each of them
// gave up early and repeated its request, the store would never finish.
func (m *Manager) call(ctx context.Context, f func(context.Context, *clientv3.Client) error) error {
	late := m.late.Load()
	deadline := m.timing.request << late
	start := time.Now()
	err := m.callWithin(ctx, deadline, f)
	took := time.Since(start)
	m.slow.Store(took > m.timing.slow)
	switch {
	case err == nil && took < m.timing.request/2:
		m.late.Store(0)
	case took >= deadline:
		m.late.Store(min(late+1, maxLate))
	}
	return err
}

func (m *Manager) callWithin(ctx context.Context, deadline time.Duration, f func(context.Context, *clientv3.Client) error) error {
	err := m.client.do(ctx, deadline, f)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return explain(m.cfg.Endpoints, deadline, err)
}

// retry runs f until it succeeds, or fails for a reason that does not pass, or ctx ends. It returns
// the last error of f, or the error of ctx. It reports each result as the outcome of activity s.
func (m *Manager) retry(ctx context.Context, s string, f func() error) error {
	b := m.backoff()
	for {
		err := f()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		m.report(ctx, s, err)
		if !passes(err) {
			return err
		}
		if err := b.Wait(ctx, 0); err != nil {
			return err
		}
	}
}

func passes(err error) bool {
	var failure *storeError
	return errors.As(err, &failure) || errors.Is(err, errConflict) || errors.Is(err, errRenewed)
}
