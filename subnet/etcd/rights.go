// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// rights are the keys that etcd lets this host write. A nil rights permits all keys.
type rights struct {
	dir   string // see Manager.dir
	user  string
	roles []string
	keys  []keyRange
}

// keyRange contains the keys from begin up to, but not including, end. If end is empty, it contains
// only begin. If end is a zero byte, it contains begin and all later keys.
type keyRange struct{ begin, end string }

func (r keyRange) has(key string) bool {
	switch r.end {
	case "":
		return key == r.begin
	case "\x00":
		return key >= r.begin
	}
	return r.begin <= key && key < r.end
}

// permits reports whether this host may write a key, given its last component.
func (r *rights) permits(key string) bool {
	return r == nil || slices.ContainsFunc(r.keys, func(k keyRange) bool { return k.has(r.dir + key) })
}

// errForbidden means that subnets are free, but etcd lets this host write none of their keys.
var errForbidden = errors.New("no permission to write the key of a free subnet")

// allocate returns free subnets whose key this host may write. It returns errForbidden if there are
// none, or subnet.ErrNoSubnets, wrapped, if no subnet is free.
func (r *rights) allocate(pools []subnet.Pool, wanted, taken []netip.Prefix) ([]netip.Prefix, error) {
	subnets, err := subnet.Allocate(pools, wanted, taken)
	if err != nil || r.permits(codec.FormatKey(subnets)) {
		return subnets, err
	}

	for _, k := range r.keys {
		s, err := codec.ParseKey(strings.TrimPrefix(k.begin, r.dir))
		if err == nil && fits(pools, s) && !overlap(s, taken) && r.permits(codec.FormatKey(s)) {
			return s, nil
		}
	}
	return nil, errForbidden
}

// asPermitted calls write with nil. If etcd denies that, asPermitted calls write again with the
// rights of this host. A role may permit a host to write a single key, and any host can put the address
// of this one into its own lease.
func (m *Manager) asPermitted(ctx context.Context, write func(*rights) error) error {
	denied := write(nil)
	if !errors.Is(denied, rpctypes.ErrPermissionDenied) {
		return denied
	}

	r, err := m.rights(ctx)
	if err != nil {
		return denied
	}
	if err = write(r); !errors.Is(err, errForbidden) && !errors.Is(err, rpctypes.ErrPermissionDenied) {
		return err
	}
	return fmt.Errorf("%w: the user %q has the roles %q, and none of them gives readwrite on this key or that of another free subnet",
		denied, r.user, r.roles)
}

// rights asks etcd for the rights of this host. Every user may read its own roles.
func (m *Manager) rights(ctx context.Context) (*rights, error) {
	r := &rights{dir: m.dir, user: m.cfg.Username}
	if r.user == "" {
		var err error
		if r.user, err = m.cfg.commonName(); err != nil {
			return nil, err
		}
	}

	err := m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		user, err := c.UserGet(ctx, r.user)
		if err != nil {
			return err
		}
		r.roles = user.Roles
		r.keys = nil

		for _, name := range user.Roles {
			role, err := c.RoleGet(ctx, name)
			if err != nil {
				return err
			}
			for _, p := range role.Perm {
				if p.PermType != clientv3.PermRead {
					r.keys = append(r.keys, keyRange{string(p.Key), string(p.RangeEnd)})
				}
			}
		}
		return nil
	})
	return r, err
}
