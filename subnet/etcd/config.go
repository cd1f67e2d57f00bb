// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
)

// reportConfig reads the configuration, passes it to OnConfig, and records its revision in cache.
// It returns the id of the store and the present revision.
func (m *Manager) reportConfig(ctx context.Context, cache *leaseCache) (subnet.StoreID, error) {
	var id subnet.StoreID
	err := m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Get(ctx, m.configKey())
		if err != nil {
			return err
		}
		id = storeID(resp.Header)
		cache.configRevision = id.Revision
		var text []byte
		for _, kv := range resp.Kvs {
			text = given(kv.Value)
		}
		m.onConfig(text)
		return nil
	})
	return id, err
}

func (m *Manager) onConfig(text []byte) {
	if m.cfg.OnConfig != nil {
		m.cfg.OnConfig(text)
	}
}

// applyConfigEvents removes the events of the configuration from a response, and passes new
// configurations to OnConfig. A watch starts at the revision of the leases, and the configuration
// was read later. So a response can contain configurations that were reported already.
func (m *Manager) applyConfigEvents(cache *leaseCache, resp *pb.WatchResponse) {
	key := m.configKey()
	resp.Events = slices.DeleteFunc(resp.Events, func(ev *mvccpb.Event) bool {
		if string(ev.Kv.Key) != key {
			return false
		}
		switch {
		case ev.Kv.ModRevision <= cache.configRevision:
			return true
		case ev.Type == mvccpb.DELETE:
			m.onConfig(nil)
		default:
			m.onConfig(given(ev.Kv.Value))
		}
		cache.configRevision = ev.Kv.ModRevision
		return true
	})
}

// given returns the value of a key that exists, in a form that is never nil, because nil means that
// there is no such key.
func given(value []byte) []byte {
	if value == nil {
		return []byte{}
	}
	return value
}
