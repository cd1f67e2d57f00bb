// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// advance applies one response to the cache, and publishes the result if anything has changed. For
// confirmed see watcher. The revision of the cache also advances without events, because an old
// revision is soon compacted. advance returns errRelist if the response comes from another store.
func (m *Manager) advance(ctx context.Context, cache *leaseCache, resp *pb.WatchResponse, confirmed int64, sink func(subnet.Update)) error {
	// A grpc-proxy that merges watches omits the cluster id when it confirms that a watch has begun.
	if resp.Header.ClusterId != 0 && storeID(resp.Header).ID != cache.store.ID {
		return errRelist
	}

	cache.streamWasUp(time.Now(), m.timing.dead)
	cache.contact(time.Now(), m.cfg.margin(m.cfg.TTL), m.timing.gracePeriod)
	known := cache.store.Revision
	ended := cache.end()
	if confirmed <= known && !ended {
		return nil
	}

	changed := []string{}
	for _, ev := range resp.Events {
		if ev.Kv.ModRevision <= known {
			continue
		}
		e := m.entry(ev.Kv)
		changed = append(changed, e.key)
		if ev.Type == mvccpb.DELETE {
			delete(cache.entries, e.key)
			delete(cache.problems, e.key)
			continue
		}
		m.logUndecodable(ctx, cache.problems, e)
		cache.entries[e.key] = e
	}

	cache.store.Revision = max(known, confirmed)
	m.client.hosts.Store(cache.count())
	if ended {
		changed = nil // the receiver lets all leases go that it has held
	}
	sink(cache.update(m.self.Load(), changed))
	return nil
}

// logUndecodable logs when a lease becomes unreadable, when the reason changes, and when the lease
// can be read again. problems has the reasons that were logged before, by key, and gets the present one.
func (m *Manager) logUndecodable(ctx context.Context, problems map[string]string, now *entry) {
	is := ""
	if now.err != nil {
		is = now.err.Error()
	}
	if is == problems[now.key] {
		return
	}
	problems[now.key] = is

	log, ok := m.undecodable.Next(klog.FromContext(ctx))
	switch {
	case !ok:
	case is == "":
		log.Info("lease can be read again", "key", subnet.Shorten(now.key))
	default:
		log.Error(now.err, "lease cannot be read and keeps its last good state", "key", subnet.Shorten(now.key))
	}
}
