// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// kind is one kind of fault. begin causes the fault. It returns a function that ends it, or nil if
// the fault is over when begin returns.
type kind struct {
	name  string
	begin func(ctx context.Context, t *torture) (end func(context.Context) error, err error)
}

// kinds returns all kinds of faults. A fault lasts less than the time after which a lease must be
// renewed, because a host that is cut off for longer may lose its subnet.
func kinds() []kind {
	return []kind{
		{"member killed", killMember},
		{"member frozen", freezeMember},
		{"all members killed", killAll},
		{"member cut off from members", isolateMember},
		{"member deaf", deafMember},
		{"member cut off from hosts", isolateFromHosts},
		{"hosts cut off from members", isolateHosts},
		{"leader moved", moveLeader},
		{"store full", fillQuota},
		{"compacted", compact},
		{"defragmented", defragment},
		{"certificates renewed", renewCertificates},
		{"password changed", changePassword},
		{"daemon killed", killDaemon},
		{"daemon restarted", restartDaemon},
		{"clock stepped", stepClock},
	}
}

func killMember(_ context.Context, t *torture) (func(context.Context) error, error) {
	m := pick(t.rnd, t.store.members)
	m.kill()
	return func(context.Context) error { return m.start() }, nil
}

func killAll(_ context.Context, t *torture) (func(context.Context) error, error) {
	for _, m := range t.store.members {
		m.kill()
	}
	return func(context.Context) error {
		var errs []error
		for _, m := range t.store.members {
			errs = append(errs, m.start())
		}
		return errors.Join(errs...)
	}, nil
}

func freezeMember(_ context.Context, t *torture) (func(context.Context) error, error) {
	m := pick(t.rnd, t.store.members)
	return func(context.Context) error { return m.signal(syscall.SIGCONT) }, m.signal(syscall.SIGSTOP)
}

func isolateMember(ctx context.Context, t *torture) (func(context.Context) error, error) {
	m := pick(t.rnd, t.store.members)
	return t.cut(ctx, []*member{m}, bothWays, t.memberAddrs(m))
}

// deafMember drops the packets that a member gets from the other members. The other members still
// get the packets of this member.
func deafMember(ctx context.Context, t *torture) (func(context.Context) error, error) {
	m := pick(t.rnd, t.store.members)
	return t.cut(ctx, []*member{m}, inbound, t.memberAddrs(m))
}

func isolateFromHosts(ctx context.Context, t *torture) (func(context.Context) error, error) {
	return t.cut(ctx, []*member{pick(t.rnd, t.store.members)}, bothWays, addrs(t.hosts))
}

func isolateHosts(ctx context.Context, t *torture) (func(context.Context) error, error) {
	some := t.rnd.Perm(len(t.hosts))[:1+t.rnd.IntN(len(t.hosts))]
	var hosts []*lab.Host
	for _, i := range some {
		hosts = append(hosts, t.hosts[i])
	}
	return t.cut(ctx, t.store.members, bothWays, addrs(hosts))
}

func moveLeader(ctx context.Context, t *torture) (func(context.Context) error, error) {
	var ids []uint64
	var leader *member
	for _, m := range t.store.members {
		err := t.with(ctx, []*member{m}, func(ctx context.Context, c *clientv3.Client) error {
			s, err := c.Status(ctx, m.url(clientPort))
			if err != nil {
				return err
			}
			if s.Leader == s.Header.MemberId {
				leader = m
			} else {
				ids = append(ids, s.Header.MemberId)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if leader == nil || len(ids) == 0 {
		return nil, errors.New("the store has no leader")
	}
	return nil, t.with(ctx, []*member{leader}, func(ctx context.Context, c *clientv3.Client) error {
		_, err := c.MoveLeader(ctx, pick(t.rnd, ids))
		return err
	})
}

const filler = "/filler/"

// fillQuota writes until the store raises the alarm NOSPACE. The function that it returns ends the
// fault as an operator would: it deletes the data, compacts, defragments and disarms the alarm.
func fillQuota(ctx context.Context, t *torture) (func(context.Context) error, error) {
	value := strings.Repeat("x", 512<<10)
	err := t.with(ctx, t.store.members, func(ctx context.Context, c *clientv3.Client) error {
		for i := range 4 * quota / len(value) {
			if _, err := c.Put(ctx, filler+fmt.Sprint(i), value); err != nil {
				if strings.Contains(err.Error(), "database space exceeded") {
					return nil
				}
				return err
			}
		}
		return errors.New("the store did not fill up")
	})
	return func(ctx context.Context) error {
		return t.with(ctx, t.store.members, func(ctx context.Context, c *clientv3.Client) error {
			if _, err := c.Delete(ctx, filler, clientv3.WithPrefix()); err != nil {
				return err
			}
			if err := compactAll(ctx, c); err != nil {
				return err
			}
			for _, m := range t.store.members {
				if _, err := c.Defragment(ctx, m.url(clientPort)); err != nil {
					return err
				}
			}
			_, err := c.AlarmDisarm(ctx, &clientv3.AlarmMember{})
			return err
		})
	}, err
}

func compactAll(ctx context.Context, c *clientv3.Client) error {
	now, err := c.Get(ctx, filler)
	if err != nil {
		return err
	}
	_, err = c.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical())
	if err != nil && strings.Contains(err.Error(), "has been compacted") {
		return nil
	}
	return err
}

func compact(ctx context.Context, t *torture) (func(context.Context) error, error) {
	return nil, t.with(ctx, t.store.members, compactAll)
}

func defragment(ctx context.Context, t *torture) (func(context.Context) error, error) {
	m := pick(t.rnd, t.store.members)
	return nil, t.with(ctx, []*member{m}, func(ctx context.Context, c *clientv3.Client) error {
		_, err := c.Defragment(ctx, m.url(clientPort))
		return err
	})
}

func renewCertificates(_ context.Context, t *torture) (func(context.Context) error, error) {
	return nil, t.store.issue()
}

// changePassword changes the password of flanneld in the store. The function that it returns ends
// the fault: it restarts all daemons with the new password.
func changePassword(ctx context.Context, t *torture) (func(context.Context) error, error) {
	password := fmt.Sprintf("torture-%x", t.rnd.Uint64())
	err := t.with(ctx, t.store.members, func(ctx context.Context, c *clientv3.Client) error {
		_, err := c.UserChangePassword(ctx, t.store.user, password)
		return err
	})
	if err != nil {
		return nil, err
	}
	t.store.password = password
	return func(ctx context.Context) error {
		var g errgroup.Group
		for _, h := range t.hosts {
			g.Go(func() error { return t.restart(ctx, h, nil) })
		}
		return g.Wait()
	}, nil
}

func killDaemon(_ context.Context, t *torture) (func(context.Context) error, error) {
	h := pick(t.rnd, t.hosts)
	h.Daemon().Kill()
	return func(ctx context.Context) error { return t.startDaemon(ctx, h) }, nil
}

func restartDaemon(ctx context.Context, t *torture) (func(context.Context) error, error) {
	return nil, t.restart(ctx, pick(t.rnd, t.hosts), nil)
}

// stepClock stops the daemon of a host, steps the host's clock, and starts the daemon again, as
// after a boot without a real-time clock.
func stepClock(ctx context.Context, t *torture) (func(context.Context) error, error) {
	h := pick(t.rnd, t.hosts)
	step := time.Duration(t.rnd.Int64N(int64(48*time.Hour))) - 24*time.Hour
	return nil, t.restart(ctx, h, func() error { return h.StepClock(step) })
}

// way is the direction of the packets that are dropped on a member.
type way int

const (
	inbound way = iota
	bothWays
)

// cut drops packets between members and addrs: those from addrs to the members and, with bothWays,
// also those from the members. The result end makes all packets pass again. It is not nil, even if
// cut returns an error, because some members may be cut off by then.
func (t *torture) cut(ctx context.Context, members []*member, w way, addrs []netip.Addr) (end func(context.Context) error, err error) {
	var list []string
	for _, a := range addrs {
		list = append(list, a.String())
	}
	rules := "table inet torture {\n chain in { type filter hook input priority -300; ip saddr { %[1]s } drop; }\n"
	if w == bothWays {
		rules += " chain out { type filter hook output priority -300; ip daddr { %[1]s } drop; }\n"
	}
	rules = fmt.Sprintf(rules+"}\n", strings.Join(list, ", "))
	heal := func(ctx context.Context) error {
		var errs []error
		for _, m := range members {
			if out, err := m.host.Exec(ctx, "nft", "add table inet torture; delete table inet torture"); err != nil {
				errs = append(errs, fmt.Errorf("connect %s again: %w: %s", m.name, err, out))
			}
		}
		return errors.Join(errs...)
	}
	for _, m := range members {
		if out, err := m.host.Exec(ctx, "nft", rules); err != nil {
			return heal, fmt.Errorf("cut off %s: %w: %s", m.name, err, out)
		}
	}
	return heal, nil
}

// with runs f with a client of the given members that is logged in as administrator. It repeats
// this until f succeeds or ctx ends.
func (t *torture) with(ctx context.Context, members []*member, f func(context.Context, *clientv3.Client) error) error {
	return until(ctx, "the store to answer", func(ctx context.Context) error {
		c, err := t.store.client(ctx, members...)
		if err != nil {
			return err
		}
		defer c.Close()
		return f(ctx, c)
	})
}

// memberAddrs returns the addresses of all members except m.
func (t *torture) memberAddrs(m *member) (others []netip.Addr) {
	for _, o := range t.store.members {
		if o != m {
			others = append(others, o.addr())
		}
	}
	return others
}

func addrs(hosts []*lab.Host) (all []netip.Addr) {
	for _, h := range hosts {
		all = append(all, h.Addr(prefix.IPv4))
	}
	return all
}

func pick[T any](rnd *rand.Rand, from []T) T { return from[rnd.IntN(len(from))] }
