// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/subnetfile"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

// recorder records a history while a run lasts.
type recorder struct {
	mu      sync.Mutex
	history history
	tasks   sync.WaitGroup
}

func newRecorder(hosts []*lab.Host) *recorder {
	r := &recorder{history: history{start: time.Now(), hosts: map[string]netip.Addr{}}}
	for _, h := range hosts {
		r.history.hosts[h.Name()] = h.Addr(prefix.IPv4)
	}
	return r
}

// change calls f with the history, which no other goroutine uses meanwhile.
func (r *recorder) change(f func(*history)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.history)
}

// follow records the subnet file of a host and the removal of its routes, in the
// background until ctx ends. It returns an error if it cannot watch the routes.
func (r *recorder) follow(ctx context.Context, h *lab.Host) error {
	ns, err := netns.GetFromPath(h.NetNS())
	if err != nil {
		return fmt.Errorf("open namespace of %s: %w", h.Name(), err)
	}
	updates, done := make(chan netlink.RouteUpdate, 100), make(chan struct{})
	err = netlink.RouteSubscribeWithOptions(updates, done, netlink.RouteSubscribeOptions{Namespace: &ns, ReceiveBufferSize: 1 << 20})
	ns.Close()
	if err != nil {
		return fmt.Errorf("follow routes of %s: %w", h.Name(), err)
	}
	context.AfterFunc(ctx, func() { close(done) })
	r.tasks.Go(func() {
		for u := range updates {
			if u.Type == unix.RTM_DELROUTE && u.Dst != nil {
				r.routeLost(h, u.Route)
			}
		}
	})
	r.tasks.Go(func() { r.followFile(ctx, h) })
	return nil
}

func (r *recorder) routeLost(h *lab.Host, route netlink.Route) {
	addr, ok := netip.AddrFromSlice(route.Dst.IP)
	bits, _ := route.Dst.Mask.Size()
	if !ok {
		return
	}
	loss := routeLoss{host: h.Name(), dst: netip.PrefixFrom(addr.Unmap(), bits), at: time.Now()}
	r.change(func(history *history) { history.routes = append(history.routes, loss) })
}

// followFile records the subnet file of a host until ctx ends. It polls, because each
// change replaces the file by another one, so that a watch of the file would end.
func (r *recorder) followFile(ctx context.Context, h *lab.Host) {
	const period = 50 * time.Millisecond
	tick := time.NewTicker(period)
	defer tick.Stop()
	last := -1 // index in serves of the host's last entry; -1 if the last attempt to read the file failed
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			subnet, err := servedSubnet(h)
			if err != nil {
				last = -1
				continue
			}
			r.change(func(history *history) {
				if last >= 0 && history.serves[last].subnet == subnet {
					history.serves[last].to = now
					return
				}
				last = len(history.serves)
				history.serves = append(history.serves, serving{h.Name(), subnet, now, now})
			})
		}
	}
}

// servedSubnet returns the IPv4 subnet in a host's subnet file. It returns an error if
// there is no valid file.
func servedSubnet(h *lab.Host) (netip.Prefix, error) {
	file, err := subnetfile.Load(h.Path(lab.SubnetFile))
	if err != nil {
		return netip.Prefix{}, err
	}
	return file.Entries[0].Subnet, nil
}

// watch records the leases that the member of client c shows, in the background until
// ctx ends. If the watch breaks, it lists the leases and watches again.
func (r *recorder) watch(ctx context.Context, c *clientv3.Client) {
	const dir = lab.Prefix + "/subnets/"
	r.tasks.Go(func() {
		for ctx.Err() == nil {
			list, err := c.Get(ctx, dir, clientv3.WithPrefix(), clientv3.WithSerializable())
			if err != nil {
				_ = wait.For(ctx, 200*time.Millisecond)
				continue
			}
			for _, kv := range list.Kvs {
				r.stored(kv.ModRevision, string(kv.Key), kv.Value)
			}
			session, cancel := context.WithCancel(ctx)
			for answer := range c.Watch(session, dir, clientv3.WithPrefix(), clientv3.WithRev(list.Header.Revision+1)) {
				for _, e := range answer.Events {
					r.stored(e.Kv.ModRevision, string(e.Kv.Key), e.Kv.Value)
				}
			}
			cancel()
		}
	})
}

// stored records a lease or, if value is empty, its removal. It ignores a change that
// another member has already shown, and a key or value that is not that of a lease.
func (r *recorder) stored(revision int64, key string, value []byte) {
	name := key[strings.LastIndexByte(key, '/')+1:]
	subnet, err := netip.ParsePrefix(strings.Replace(name, "-", "/", 1))
	if err != nil {
		return // not the key of a lease
	}
	var lease struct{ PublicIP netip.Addr }
	if len(value) > 0 && json.Unmarshal(value, &lease) != nil {
		return
	}
	c := change{revision, time.Now(), subnet, lease.PublicIP}
	r.change(func(history *history) {
		for _, known := range history.store {
			if known.revision == revision && known.subnet == subnet {
				return
			}
		}
		history.store = append(history.store, c)
	})
}

// finish waits for all recorders, adds the log lines of the daemons, and returns the
// history. The context of the recorders must have ended.
func (r *recorder) finish(hosts []*lab.Host) *history {
	r.tasks.Wait()
	for _, h := range hosts {
		for _, d := range h.Daemons() {
			r.history.countLines(h.Name(), d.Log())
		}
	}
	return &r.history
}

// logs writes the log of each daemon to a file in dir, so that a person can find out
// why a promise was broken.
func logs(dir string, hosts []*lab.Host) error {
	for _, h := range hosts {
		for i, d := range h.Daemons() {
			file := fmt.Sprintf("%s/%s-%d.log", dir, h.Name(), i+1)
			if err := os.WriteFile(file, []byte(d.Log()), 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}
