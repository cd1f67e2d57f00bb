// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"net/netip"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/flanneld/flanneld/subnet"
)

// exhaustedPool says where Acquire has found no free subnet.
type exhaustedPool struct {
	pools []subnet.Pool
	who   netip.Addr // see identity
	store subnet.StoreID
}

// awaitFreeSubnet waits until a change may have made a subnet free or the configuration has
// changed, if the last attempt to acquire a lease for the same pools and address has found no free
// subnet. Otherwise, if the watch cannot continue, and after timing.exhausted it returns nil, so that
// the caller reads the leases. It returns an error if the watch fails. Without this method every host
// that waits would read all leases every second.
func (m *Manager) awaitFreeSubnet(ctx context.Context, pools []subnet.Pool, c subnet.Claim) error {
	full := m.exhausted.Swap(nil)
	if full == nil || !slices.Equal(full.pools, pools) || full.who != identity(c) {
		return nil
	}

	keys := []string{m.dir, m.configKey()}
	err := m.awaitChange(ctx, m.timing.exhausted, keys, full.store.Revision, func(resp *pb.WatchResponse) bool {
		helps := func(ev *mvccpb.Event) bool { return ev.Kv.ModRevision > full.store.Revision && m.mayHelp(ev, full.who) }
		return storeID(resp.Header).ID != full.store.ID || slices.ContainsFunc(resp.Events, helps)
	})
	if err == nil {
		m.distrust() // the cache may be from before the change
	}
	return err
}

// mayHelp reports whether a host with the address who that waits for a subnet has to try again after ev:
// the configuration has changed, a lease is gone, or a lease or reservation has this address.
func (m *Manager) mayHelp(ev *mvccpb.Event, who netip.Addr) bool {
	if ev.Type == mvccpb.DELETE || string(ev.Kv.Key) == m.configKey() {
		return true
	}
	e := m.entry(ev.Kv)
	return e.err == nil && hasPublicIP(e.lease, who)
}
