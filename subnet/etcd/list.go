// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/parallel"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// seed is that of entry.sum.
var seed = maphash.MakeSeed()

// keyOf returns the last component of the key of a lease.
func (m *Manager) keyOf(kv *mvccpb.KeyValue) string {
	return string(bytes.TrimPrefix(kv.Key, []byte(m.dir)))
}

func (m *Manager) entry(kv *mvccpb.KeyValue) *entry {
	key := m.keyOf(kv)
	e := newEntry(subnet.Lease{Key: key, Order: uint64(kv.CreateRevision), Claimed: uint64(kv.ModRevision), Permanent: kv.Lease == 0, LeaseID: kv.Lease})
	e.sum = maphash.Bytes(seed, kv.Value)
	if e.subnets, e.err = codec.ParseKey(key); e.err != nil {
		return e
	}
	var c subnet.Claim
	c, e.err = codec.Decode(e.subnets, kv.Value)
	e.lease.BackendType = c.BackendType
	e.lease.NextType = c.NextType
	e.lease.Endpoints = c.Endpoints
	return e
}

// pageSize is the maximum number of leases in one answer, of some 350 bytes each. etcd keeps an
// answer in memory for each host that lists, and the answer has to arrive within the deadline.
const pageSize = 1000

// list reads all leases at one revision, in pages with a deadline each. On a slow link, or for many
// hosts on one link, a whole list of thousands of leases can take longer than any deadline that
// detects a hung server.
func (m *Manager) list(ctx context.Context) (listing, error) { return m.listAt(ctx, 0) }

// listAt reads all leases as they were at a revision, or as they are now if it is zero. Later pages
// are serializable reads, because the member that has answered the first page has their revision.
//
// When all hosts boot at the same moment, the store is overloaded, and even small requests take
// long. A slow link alone does not make small requests slow. So if the last small request took
// long, the host waits after the first page for a random time: see client.turn. The first page
// contains the number of hosts. Meanwhile the store has time for writes of leases and for its other
// users.
func (m *Manager) listAt(ctx context.Context, revision int64) (listing, error) {
	var l listing
	var decoding sync.WaitGroup
	defer decoding.Wait()
	options := []clientv3.OpOption{clientv3.WithRange(clientv3.GetPrefixRangeEnd(m.dir)), clientv3.WithLimit(pageSize), clientv3.WithRev(revision)}
	for from := m.dir; ; {
		began := time.Now()
		var page *clientv3.GetResponse
		err := m.callWithin(ctx, m.timing.page, func(ctx context.Context, c *clientv3.Client) (err error) {
			page, err = c.Get(ctx, from, options...)
			return err
		})
		if err != nil {
			return listing{}, fmt.Errorf("list leases: %w", err)
		}
		if l.entries == nil {
			l = listing{entries: make([]*entry, 0, page.Count), store: storeID(page.Header)}
			if revision != 0 {
				l.store.Revision = revision
			}
			options = append(options, clientv3.WithRev(l.store.Revision), clientv3.WithSerializable())
			m.client.hosts.Store(page.Count)
			pages := time.Duration(page.Count/pageSize + 1)
			if !m.slow.Load() && time.Since(began) < m.timing.page/10/pages {
				options = append(options, clientv3.WithLimit(0)) // the link and the store are quick enough to read the rest at once
			}
		}

		first := len(l.entries)
		l.entries = append(l.entries, make([]*entry, len(page.Kvs))...)
		entries := l.entries[first:]
		decoding.Go(func() {
			parallel.For(len(entries), func(i int) { entries[i] = m.entry(page.Kvs[i]) })
		})
		if !page.More || len(page.Kvs) == 0 {
			decoding.Wait()
			return l, nil
		}

		from = string(page.Kvs[len(page.Kvs)-1].Key) + "\x00"
		if first == 0 && m.slow.Load() {
			if err := m.client.turn(ctx); err != nil {
				return listing{}, err
			}
		}
	}
}

func storeID(h *pb.ResponseHeader) subnet.StoreID {
	return subnet.StoreID{ID: fmt.Sprintf("%x", h.ClusterId), Revision: h.Revision}
}

// read returns the entry with that key and the store's revision. found is nil if the key does not
// exist.
func (m *Manager) read(ctx context.Context, key string, options ...clientv3.OpOption) (found *entry, revision int64, err error) {
	resp, err := m.get(ctx, m.dir+key, options...)
	if err != nil {
		return nil, 0, err
	}
	for _, kv := range resp.Kvs {
		found = m.entry(kv)
	}
	return found, resp.Header.Revision, nil
}
