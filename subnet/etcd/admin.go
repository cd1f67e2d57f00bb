// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
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

// Config returns the text of the network configuration in the store, and its revision. The revision
// is zero and the text is nil if there is no configuration.
func (a *Admin) Config(ctx context.Context) (text []byte, revision int64, err error) {
	resp, err := a.m.get(ctx, a.m.configKey())
	switch {
	case err != nil:
		return nil, 0, fmt.Errorf("read %s: %w", a.m.configKey(), err)
	case len(resp.Kvs) == 0:
		return nil, 0, nil
	}
	return resp.Kvs[0].Value, resp.Kvs[0].ModRevision, nil
}

// SetConfig writes the network configuration if it is still at revision, zero meaning absent.
// Otherwise it returns ErrChanged, wrapped.
func (a *Admin) SetConfig(ctx context.Context, text []byte, revision int64) error {
	return a.swap(ctx, "write", a.m.configKey(), revision, clientv3.OpPut(a.m.configKey(), string(text)))
}

// MayWrite reports whether the user may write the lease of any subnet. It changes nothing.
func (a *Admin) MayWrite(ctx context.Context) (bool, error) {
	key := a.m.dir + "any"
	// No key has this revision. etcd checks the rights for the operations of a transaction before it compares.
	_, err := a.m.txn(ctx, unchanged(key, -1), clientv3.OpPut(key, ""))
	if errors.Is(err, rpctypes.ErrPermissionDenied) {
		return false, nil
	}
	return err == nil, err
}

// swap does op if key is still at revision, zero meaning absent. Otherwise it returns ErrChanged,
// wrapped. verb names op in errors.
func (a *Admin) swap(ctx context.Context, verb, key string, revision int64, op clientv3.Op) error {
	resp, err := a.m.txn(ctx, unchanged(key, revision), op)
	if err == nil && !resp.Succeeded {
		err = ErrChanged
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", verb, key, err)
	}
	return nil
}

// Entries returns every lease and reservation, in the order of subnet.Lease.Compare. If ttl is true, it also reads the
// time that each lease has left, by one request for each lease.
func (a *Admin) Entries(ctx context.Context, ttl bool) ([]subnet.Entry, error) {
	l, err := a.m.list(ctx)
	if err != nil {
		return nil, err
	}
	found := make([]subnet.Entry, 0, len(l.entries))
	for _, e := range l.entries {
		out := subnet.Entry{Lease: e.lease, Err: e.err}
		if ttl && e.leased() {
			if out.TTL, err = a.left(ctx, e.leaseID); err != nil {
				return nil, fmt.Errorf("ask how long %s is good for: %w", e.key, err)
			}
		}
		found = append(found, out)
	}
	slices.SortFunc(found, func(a, b subnet.Entry) int { return a.Lease.Compare(b.Lease) })
	return found, nil
}

// left returns the time until an etcd lease expires, or zero if it has expired.
func (a *Admin) left(ctx context.Context, id clientv3.LeaseID) (ttl time.Duration, err error) {
	err = a.m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.TimeToLive(ctx, id)
		if err == nil {
			ttl = max(0, time.Duration(resp.TTL)*time.Second)
		}
		return err
	})
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return 0, nil
	}
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
	subnets := c.Subnets()
	key = codec.FormatKey(subnets)
	value, err := codec.Encode(c)
	if err != nil {
		return "", err
	}
	if e := a.m.entry(&mvccpb.KeyValue{Key: []byte(a.m.dir + key), Value: value}); e.err != nil {
		return "", fmt.Errorf("reserve %s: hosts could not read it: %w", key, e.err)
	}
	l, err := a.m.list(ctx)
	if err != nil {
		return "", err
	}

	var have *entry
	for _, e := range l.entries {
		switch {
		case e.key == key:
			have = e
		case overlap(e.subnets, subnets):
			return "", fmt.Errorf("reserve %s: it overlaps %s of %s", key, e.key, ownerOf(e.lease))
		case !e.leased() && hasPublicIP(e.lease, identity(c)):
			return "", fmt.Errorf("reserve %s: %s has the reservation %s, which has to end first", key, identity(c), e.key)
		}
	}

	switch {
	case have == nil:
		return key, a.swap(ctx, "reserve", a.m.dir+key, 0, clientv3.OpPut(a.m.dir+key, string(value)))
	case have.err != nil || !hasPublicIP(have.lease, identity(c)):
		return "", fmt.Errorf("reserve %s: it belongs to %s", key, ownerOf(have.lease))
	case have.leaseID == 0:
		return key, nil
	}
	op := clientv3.OpPut(a.m.dir+key, "", clientv3.WithIgnoreValue())
	return key, a.swap(ctx, "reserve", a.m.dir+key, have.modRevision, op)
}

// Revoke deletes the lease with this key, or the reservation if reservation is true. It returns an
// error if the key is not of that kind, ErrNotFound, wrapped, if there is no such key, and
// ErrChanged, wrapped, if another client has just changed the key. If the owner is running, it
// takes the subnet again.
func (a *Admin) Revoke(ctx context.Context, key string, reservation bool) error {
	e, _, err := a.m.read(ctx, key)
	if err == nil && e == nil {
		err = ErrNotFound
	}
	switch {
	case err != nil:
		return fmt.Errorf("read %s: %w", a.m.dir+key, err)
	case reservation && e.leaseID != 0:
		return fmt.Errorf("%s is a lease, not a reservation", key)
	case !reservation && e.leaseID == 0:
		return fmt.Errorf("%s is a reservation, not a lease", key)
	}
	return a.swap(ctx, "delete", a.m.dir+key, e.modRevision, clientv3.OpDelete(a.m.dir+key))
}
