// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"path"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
)

// Several networks can share one prefix: each network then has the keys <prefix>/<name>/config and
// <prefix>/<name>/subnets/..., as in flannel 0.5 to 0.7.

// Network returns a manager of the network with that name, whose keys are below the prefix of m.
// It uses the connection of m, so cfg needs no endpoints, prefix, TLS files and login. The caller
// must not close m while it uses the returned manager. Network returns an error if the name is
// invalid.
func (m *Manager) Network(name string, cfg Config) (*Manager, error) {
	if err := subnet.CheckNetworkName(name); err != nil {
		return nil, err
	}
	cfg.Endpoints = m.cfg.Endpoints
	cfg.Prefix = path.Join(m.cfg.Prefix, name)
	n := newManager(cfg)
	n.client = m.client
	n.guest = true
	n.timing = m.timing
	return n, nil
}

// NetworkConfigs contains the configurations of several networks at one moment.
type NetworkConfigs struct {
	// Texts contains the configurations by the name of the network. It is read-only, and does not change.
	Texts map[string][]byte
	// Deleted contains the names of the networks whose configuration was deleted from this store
	// since the last call of the sink. If a network that the receiver knows is missing in both
	// Texts and Deleted, the store was emptied or replaced, or the reason is not known.
	Deleted []string
	// Revision is the revision of the store.
	Revision int64
}

// Networks follows the configurations of the networks below the prefix until ctx ends: those with
// the given names or, without names, all. It calls sink from one goroutine, first with all
// configurations, and again with all after each change, and after each failure of the watch. known
// returns the last Observation of each network that this node has recorded; it may be nil. Networks
// continues after compaction and outages. It returns the error of ctx, or an error if m is closed.
func (m *Manager) Networks(ctx context.Context, names []string, known func() map[string]subnet.Observation, sink func(NetworkConfigs)) error {
	keys := []string{m.root()}
	if len(names) > 0 {
		keys = nil
		for _, name := range names {
			keys = append(keys, m.configOf(name))
		}
	}

	seen := map[string]int64{} // by network: the latest revision at which this run has seen its configuration in the store
	return m.retry(ctx, sourceWatch, func() error {
		now, err := m.listConfigs(ctx, names)
		if err != nil {
			return err
		}
		if now.Deleted, err = m.deleted(ctx, observations(known, seen), now); err != nil {
			return err
		}
		for _, name := range now.Deleted {
			delete(seen, name)
		}

		listed := now.Revision
		sink(now)
		err = m.follow(ctx, keys, listed+1, watcher{checks: true, on: func(resp *pb.WatchResponse, _ int64) error {
			m.outage.Report(ctx, sourceWatch, nil)
			if now.apply(m, resp, listed) {
				sink(now)
			}
			return nil
		}})

		for name := range now.Texts {
			seen[name] = now.Revision
		}
		return err
	})
}

// observations returns the Observations of known, which may be nil, with the revisions in seen in place
// of the recorded ones.
func observations(known func() map[string]subnet.Observation, seen map[string]int64) map[string]subnet.Observation {
	all := map[string]subnet.Observation{}
	if known != nil {
		maps.Copy(all, known())
	}
	for name, revision := range seen {
		s := all[name]
		s.Revision = revision
		all[name] = s
	}
	return all
}

// Observe implements subnet.Manager.
func (m *Manager) Observe(ctx context.Context, own subnet.Lease) (s subnet.Observation, err error) {
	var resp *clientv3.TxnResponse
	err = m.retry(ctx, sourceObservation, func() (err error) {
		resp, err = m.txn(ctx, nil, clientv3.OpGet(m.configKey(), clientv3.WithKeysOnly()), clientv3.OpGet(m.dir+own.Key)) // with WithKeysOnly etcd 3.7 omits the etcd lease of a key
		return err
	})
	if err != nil || len(resp.Responses[0].GetResponseRange().Kvs) == 0 {
		return subnet.Observation{}, err
	}

	s.Revision = resp.Header.Revision
	for _, kv := range resp.Responses[1].GetResponseRange().Kvs {
		if kv.Lease != 0 { // a reservation proves nothing: an operator may put it into another store too
			s.Key = own.Key
			s.LeaseID = kv.Lease
		}
	}
	return s, nil
}

// deleted returns the networks in known that are not in a listing because their configuration was
// deleted. It omits those that are missing for another reason.
func (m *Manager) deleted(ctx context.Context, known map[string]subnet.Observation, listed NetworkConfigs) (names []string, err error) {
	for _, name := range slices.Sorted(maps.Keys(known)) {
		if _, exists := listed.Texts[name]; exists {
			continue
		}

		was, err := m.hasLease(ctx, name, known[name])
		// If the listing is older than the recorded revision, it comes from another store: a store
		// does not go back.
		if err == nil && !was && known[name].Revision <= listed.Revision {
			was, err = m.hadConfig(ctx, name, known[name].Revision)
		}
		if err != nil {
			return nil, err
		}
		if was {
			names = append(names, name)
		}
	}
	return names, nil
}

// hasLease reports whether the store still has the lease in s, which this node had when the store
// had the configuration of the network. If the configuration is missing now, it was deleted since
// then, even if the history of the store does not go back so far. An emptied store cannot have the
// lease, because ids of etcd leases are random. A backup with the lease also has the configuration,
// unless the configuration was deleted before the backup. hasLease reports false if s names no
// lease.
func (m *Manager) hasLease(ctx context.Context, name string, s subnet.Observation) (bool, error) {
	if s.LeaseID == 0 {
		return false, nil
	}
	resp, err := m.get(ctx, path.Join(m.cfg.Prefix, name, "subnets", s.Key))
	return err == nil && len(resp.Kvs) > 0 && resp.Kvs[0].Lease == s.LeaseID, err
}

// hadConfig reports whether the store had the configuration of the network at a revision. It
// reports false if the history of the store does not go back so far, or has not come so far.
func (m *Manager) hadConfig(ctx context.Context, name string, revision int64) (bool, error) {
	resp, err := m.get(ctx, m.configOf(name), clientv3.WithRev(revision), clientv3.WithKeysOnly())
	if errors.Is(err, rpctypes.ErrCompacted) || errors.Is(err, rpctypes.ErrFutureRev) {
		return false, nil
	}
	return err == nil && len(resp.Kvs) > 0, err
}

// apply applies the events after a revision to n, and reports whether there were any. It sets
// n.Deleted to the networks whose configuration these events have deleted.
func (n *NetworkConfigs) apply(m *Manager, resp *pb.WatchResponse, after int64) (changed bool) {
	n.Deleted = nil
	n.Texts = maps.Clone(n.Texts) // the receiver may still have the former one
	n.Revision = max(n.Revision, resp.Header.Revision)
	for _, ev := range resp.Events {
		name, ok := m.networkOf(string(ev.Kv.Key))
		if !ok || ev.Kv.ModRevision <= after {
			continue
		}
		changed = true
		n.Deleted = slices.DeleteFunc(n.Deleted, func(d string) bool { return d == name })
		if delete(n.Texts, name); ev.Type == clientv3.EventTypeDelete {
			n.Deleted = append(n.Deleted, name)
		} else {
			n.Texts[name] = given(ev.Kv.Value)
		}
	}
	return changed
}

// root returns the prefix of the keys of all networks. It ends in a slash.
func (m *Manager) root() string {
	return strings.TrimSuffix(path.Join(m.cfg.Prefix, "config"), "config")
}

func (m *Manager) configOf(name string) string { return path.Join(m.cfg.Prefix, name, "config") }

// networkOf returns the name of the network whose configuration has the key. ok is false if key is
// another kind of key.
func (m *Manager) networkOf(key string) (name string, ok bool) {
	name, below := strings.CutPrefix(key, m.root())
	name, config := strings.CutSuffix(name, "/config")
	return name, below && config && subnet.CheckNetworkName(name) == nil
}

// listConfigs reads the configurations of the networks with these names, or without names of all, at one
// revision.
func (m *Manager) listConfigs(ctx context.Context, names []string) (NetworkConfigs, error) {
	now := NetworkConfigs{Texts: map[string][]byte{}}
	get := func(key string, options ...clientv3.OpOption) ([]*mvccpb.KeyValue, error) {
		resp, err := m.get(ctx, key, append(options, clientv3.WithRev(now.Revision))...)
		if err != nil {
			return nil, err
		}
		now.Revision = cmp.Or(now.Revision, resp.Header.Revision)
		return resp.Kvs, nil
	}

	// A network may have thousands of leases, so the loop does not read all keys. It reads the first key of a
	// network, and continues behind the keys of that network. So a network takes two small requests.
	all := len(names) == 0
	for from, end := m.root(), clientv3.GetPrefixRangeEnd(m.root()); all; {
		kvs, err := get(from, clientv3.WithRange(end), clientv3.WithLimit(1), clientv3.WithKeysOnly())
		if err != nil {
			return now, err
		}
		if len(kvs) == 0 {
			break
		}

		key := string(kvs[0].Key)
		from = key + "\x00"
		if name, _, below := strings.Cut(strings.TrimPrefix(key, m.root()), "/"); below {
			from = clientv3.GetPrefixRangeEnd(m.root() + name + "/")
			names = append(names, name)
		}
	}

	for _, name := range names {
		kvs, err := get(m.configOf(name))
		if err != nil {
			return now, err
		}
		if _, ok := m.networkOf(m.configOf(name)); ok && len(kvs) == 1 {
			now.Texts[name] = given(kvs[0].Value)
		}
	}
	return now, nil
}

// Release implements subnet.Manager.
func (m *Manager) Release(ctx context.Context, own subnet.Lease) error {
	if err := m.writing.Acquire(ctx, 1); err != nil {
		return err
	}
	defer m.writing.Release(1)
	m.own = ownLease{}
	m.unanswered = nil

	id := clientv3.LeaseID(own.LeaseID)
	if id == 0 { // a reservation, or the last known state of an earlier version
		found, _, err := m.read(ctx, own.Key)
		if err != nil || found == nil || !found.leased() || uint64(found.createRevision) != own.Order {
			return err
		}
		id = found.leaseID
	}

	err := m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		_, err := c.Revoke(ctx, id) // the store deletes all keys with it, also one of a superseded configuration
		return err
	})
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return err
}
