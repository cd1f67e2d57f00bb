// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// Errors of an Admin.
var (
	// ErrChanged means that another client changed the store in the meantime.
	ErrChanged = errors.New("changed by another client in the meantime")
	// ErrNotFound means that the store has no key of that name below subnets/.
	ErrNotFound = errors.New("no such lease")
)

// Admin does what operators request. Every write is a compare-and-swap. Unlike a Manager, an Admin
// returns an error if the store does not answer, except in Watch, which waits.
type Admin struct{ m *Manager }

// NewAdmin returns an Admin. It does not connect. The caller must Close it.
func NewAdmin(cfg Config) (*Admin, error) {
	m, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return &Admin{m}, nil
}

// Close ends the connection.
func (a *Admin) Close() error { return a.m.Close() }

// Entry is one lease or reservation in the store.
type Entry struct {
	Lease subnet.Lease  // its Key is always set
	Err   error         // why the rest of Lease cannot be read; nil if it can
	TTL   time.Duration // the time that is left; zero for a reservation, for an expired lease, or if it was not requested
}

// Config returns the text of the network configuration in the store, and its revision. The revision
// is zero and the text is nil if there is no configuration.
func (a *Admin) Config(ctx context.Context) (text []byte, revision int64, err error) {
	err = a.m.callWithin(ctx, a.m.timing.request, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Get(ctx, a.m.configKey())
		if err == nil && len(resp.Kvs) > 0 {
			text = resp.Kvs[0].Value
			revision = resp.Kvs[0].ModRevision
		}
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("read %s: %w", a.m.configKey(), err)
	}
	return text, revision, nil
}

// SetConfig writes the network configuration if it is still at revision, zero meaning absent.
// Otherwise it returns ErrChanged, wrapped.
func (a *Admin) SetConfig(ctx context.Context, text []byte, revision int64) error {
	return a.swap(ctx, "write", a.m.configKey(), revision, clientv3.OpPut(a.m.configKey(), string(text)))
}

// MayWrite reports whether the user may write the lease of any subnet. It changes nothing.
func (a *Admin) MayWrite(ctx context.Context) (may bool, err error) {
	key := path.Join(a.m.cfg.Prefix, "subnets", "any")
	err = a.m.callWithin(ctx, a.m.timing.request, func(ctx context.Context, c *clientv3.Client) error {
		// No key has this revision. etcd checks the rights for the operations of a transaction before it compares.
		_, err := c.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", -1)).Then(clientv3.OpPut(key, "")).Commit()
		if may = !errors.Is(err, rpctypes.ErrPermissionDenied); !may {
			return nil
		}
		return err
	})
	return may && err == nil, err
}

// swap does op if key is still at revision, zero meaning absent. Otherwise it returns ErrChanged,
// wrapped. verb names op in errors.
func (a *Admin) swap(ctx context.Context, verb, key string, revision int64, op clientv3.Op) error {
	changed := false
	err := a.m.callWithin(ctx, a.m.timing.request, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", revision)).Then(op).Commit()
		changed = err == nil && !resp.Succeeded
		return err
	})
	if changed {
		err = ErrChanged
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", verb, key, err)
	}
	return nil
}

// Entries returns every lease and reservation, in the order of subnet.Lease.Compare. If ttl is true, it also reads the
// time that each lease has left, by one request for each lease.
func (a *Admin) Entries(ctx context.Context, ttl bool) ([]Entry, error) {
	l, err := a.m.list(ctx)
	if err != nil {
		return nil, err
	}
	found := make([]Entry, 0, len(l.entries))
	for _, e := range l.entries {
		out := Entry{Lease: e.lease, Err: e.err}
		out.Lease.Key = e.key
		out.Lease.Permanent = e.leaseID == 0
		if ttl && e.leaseID != 0 {
			if out.TTL, err = a.left(ctx, e.leaseID); err != nil {
				return nil, fmt.Errorf("ask how long %s is good for: %w", e.key, err)
			}
		}
		found = append(found, out)
	}
	slices.SortFunc(found, func(a, b Entry) int { return a.Lease.Compare(b.Lease) })
	return found, nil
}

// left returns the time until an etcd lease expires, or zero if it has expired.
func (a *Admin) left(ctx context.Context, id clientv3.LeaseID) (ttl time.Duration, err error) {
	err = a.m.callWithin(ctx, a.m.timing.request, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.TimeToLive(ctx, id)
		if errors.Is(err, rpctypes.ErrLeaseNotFound) || err == nil && resp.TTL <= 0 {
			return nil
		}
		if err == nil {
			ttl = time.Duration(resp.TTL) * time.Second
		}
		return err
	})
	return ttl, err
}

// Watch calls sink with all leases, and again after every change, until ctx
// ends. It waits for a store that is unavailable.
func (a *Admin) Watch(ctx context.Context, sink func(subnet.Update)) error {
	return a.m.Watch(ctx, sink)
}

// Reserve reserves the subnets in c, at most one of each family, for the node with the public
// addresses in c: the key never expires. It returns the last component of the key. A lease of the
// node with this key becomes a reservation with the same value, and a reservation stays as it is.
// Reserve returns an error if another node has the key, if another key overlaps the subnets, or if
// the node has another reservation, because the node could take that one. It returns ErrChanged,
// wrapped, if another client has changed the key.
func (a *Admin) Reserve(ctx context.Context, c subnet.Claim) (key string, err error) {
	var subnets []netip.Prefix
	for _, e := range c.Endpoints {
		subnets = append(subnets, e.Subnet)
	}

	key = codec.FormatKey(subnets)
	value, err := codec.Encode(c)
	if err != nil {
		return "", err
	}
	if e := a.m.entry(&mvccpb.KeyValue{Key: []byte(a.m.dir + key), Value: value}); e.err != nil {
		return "", fmt.Errorf("reserve %s: hosts could not read it: %w", key, e.err)
	}
	entries, err := a.Entries(ctx, false)
	if err != nil {
		return "", err
	}

	for _, e := range entries {
		switch {
		case e.Lease.Key == key:
		case overlap(e.Lease.Subnets(), subnets):
			return "", fmt.Errorf("reserve %s: it overlaps %s of %s", key, e.Lease.Key, ownerOf(e.Lease))
		case e.Lease.Permanent && hasPublicIP(e.Lease, identity(c)):
			return "", fmt.Errorf("reserve %s: %s has the reservation %s, which has to end first", key, identity(c), e.Lease.Key)
		}
	}

	have, err := a.get(ctx, key)
	switch {
	case errors.Is(err, ErrNotFound):
		return key, a.swap(ctx, "reserve", a.m.dir+key, 0, clientv3.OpPut(a.m.dir+key, string(value)))
	case err != nil:
		return "", err
	case have.err != nil || !hasPublicIP(have.lease, identity(c)):
		return "", fmt.Errorf("reserve %s: it belongs to %s", key, ownerOf(have.lease))
	case have.leaseID == 0:
		return key, nil
	}
	return key, a.swap(ctx, "reserve", a.m.dir+key, have.modRevision, clientv3.OpPut(a.m.dir+key, string(have.value)))
}

// get returns one key below subnets/, or ErrNotFound, wrapped.
func (a *Admin) get(ctx context.Context, key string) (entry, error) {
	found, _, err := a.m.read(ctx, key)
	if err == nil && found == nil {
		err = ErrNotFound
	}
	if err != nil {
		return entry{}, fmt.Errorf("read %s: %w", a.m.dir+key, err)
	}
	return *found, nil
}

// Revoke deletes the lease with this key, or the reservation if reservation is true. It returns an
// error if the key is not of that kind, ErrNotFound, wrapped, if there is no such key, and
// ErrChanged, wrapped, if another client has just changed the key. If the owner is running, it
// takes the subnet again.
func (a *Admin) Revoke(ctx context.Context, key string, reservation bool) error {
	e, err := a.get(ctx, key)
	switch {
	case err != nil:
		return err
	case reservation && e.leaseID != 0:
		return fmt.Errorf("%s is a lease, not a reservation", key)
	case !reservation && e.leaseID == 0:
		return fmt.Errorf("%s is a reservation, not a lease", key)
	}
	return a.swap(ctx, "delete", a.m.dir+key, e.modRevision, clientv3.OpDelete(a.m.dir+key))
}
