// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

// eventPause is the pause before each event, in which daemon and etcd become idle.
const eventPause = 10 * time.Millisecond

// patience limits how long an event may take to arrive.
const patience = 10 * time.Second

// latencies are in milliseconds. Each begins just before the write to etcd.
type latencies struct{ add, remove, watch []float64 }

// events adds and removes one lease count times. It measures the time until the kernel has
// announced that all objects of the lease exist, or are gone. Between these writes it
// makes writes of equal size that the daemon does not see, and measures the time until a
// bare etcd watch has the event.
func (b *bed) events(ctx context.Context, count int) (l latencies, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the bare watch, because each open watch makes later measures slower
	p := makePeer(len(b.peers))
	value, err := p.value(b.backend)
	if err != nil {
		return l, err
	}
	announced, stop, err := b.listen(ctx, b.lab.Host(1), p)
	if err != nil {
		return l, err
	}
	defer stop()
	bare := b.client.Watch(ctx, barePrefix, clientv3.WithPrefix())
	if err := wait.For(ctx, 100*time.Millisecond); err != nil {
		return l, err
	}
	once := func(write func() error, arrive func() (time.Time, error)) (float64, error) {
		if err := wait.For(ctx, eventPause); err != nil {
			return 0, err
		}
		written := make(chan error, 1) // the event may arrive before the reply to the write
		start := time.Now()
		go func() { written <- write() }()
		end, err := arrive()
		return ms(end.Sub(start)), errors.Join(err, <-written)
	}

	steps := []struct {
		into  *[]float64
		write func() error
		wait  func() (time.Time, error)
	}{
		{&l.add, func() error { return b.put(ctx, p.key(), value) }, func() (time.Time, error) { return announced(false) }},
		{&l.watch, func() error { return b.put(ctx, barePrefix+p.subnet.String(), value) }, func() (time.Time, error) { return waitWatch(bare) }},
		{&l.remove, func() error { return b.remove(ctx, p.key()) }, func() (time.Time, error) { return announced(true) }},
		{&l.watch, func() error { return b.remove(ctx, barePrefix+p.subnet.String()) }, func() (time.Time, error) { return waitWatch(bare) }},
	}

	for range count {
		for _, s := range steps {
			took, err := once(s.write, s.wait)
			if err != nil {
				return l, err
			}
			*s.into = append(*s.into, took)
		}
	}
	return l, nil
}

func (b *bed) put(ctx context.Context, key, value string) error {
	_, err := b.client.Put(ctx, key, value)
	return err
}

func (b *bed) remove(ctx context.Context, key string) error {
	_, err := b.client.Delete(ctx, key)
	return err
}

func waitWatch(events clientv3.WatchChan) (time.Time, error) {
	select {
	case resp, ok := <-events:
		if !ok {
			return time.Time{}, fmt.Errorf("etcd watch ended: %w", resp.Err())
		}
		return time.Now(), resp.Err()
	case <-time.After(patience):
		return time.Time{}, fmt.Errorf("etcd watch: nothing within %s", patience)
	}
}

// listen subscribes to the kernel's announcements about the objects of p on host. wait
// blocks until all of them exist or, if gone is true, until all are gone. It returns the
// time of the last announcement, or an error if none arrives within patience. The caller
// must call stop, unless listen returns an error.
func (b *bed) listen(ctx context.Context, host *lab.Host, p peer) (wait func(gone bool) (time.Time, error), stop func(), err error) {
	var r *rtnl
	var ifindex int
	err = host.Do(ctx, func() error {
		link, err := net.InterfaceByName(b.device())
		if err != nil {
			return err
		}
		ifindex = link.Index
		r, err = openRTNL(unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	tv := unix.NsecToTimeval(int64(patience))
	if err := unix.SetsockoptTimeval(r.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		r.close()
		return nil, nil, err
	}
	want := 1
	if objectsOf(b.backend).vtep {
		want = 3
	}
	return func(gone bool) (time.Time, error) {
		have := map[string]bool{}
		for len(have) < want {
			err := r.receive(func(typ uint16, _ uint32, payload []byte) error {
				if what := p.concerned(typ, payload, ifindex, gone); what != "" {
					have[what] = true
				}
				return nil
			})
			if err != nil {
				return time.Time{}, fmt.Errorf("wait for the kernel to announce %d objects of %s, have %v: %w", want, p.subnet, have, err)
			}
		}
		return time.Now(), nil
	}, r.close, nil
}

// concerned returns the name of the object of p that a message announces as new or, if
// gone is true, as deleted. It returns "" for any other message. Neighbours and FDB
// entries must belong to the device ifindex.
func (p peer) concerned(typ uint16, payload []byte, ifindex int, gone bool) string {
	switch {
	case typ == unix.RTM_NEWROUTE && !gone, typ == unix.RTM_DELROUTE && gone:
		if len(payload) < unix.SizeofRtMsg {
			return ""
		}
		found := ""
		attrs(payload[unix.SizeofRtMsg:], func(typ uint16, data []byte) {
			if typ == unix.RTA_DST && payload[1] == byte(p.subnet.Bits()) && equalAddr(data, p.subnet.Addr()) {
				found = "route"
			}
		})
		return found

	case typ == unix.RTM_NEWNEIGH && !gone, typ == unix.RTM_DELNEIGH && gone:
		if len(payload) < unix.SizeofNdMsg || int(binary.NativeEndian.Uint32(payload[4:])) != ifindex {
			return ""
		}
		found := ""
		attrs(payload[unix.SizeofNdMsg:], func(typ uint16, data []byte) {
			switch {
			case typ == unix.NDA_LLADDR && payload[0] == unix.AF_BRIDGE && string(data) == string(p.mac[:]):
				found = "FDB entry"
			case typ == unix.NDA_DST && payload[0] == unix.AF_INET && equalAddr(data, p.subnet.Addr()):
				found = "neighbour"
			}
		})
		return found
	}
	return ""
}

func equalAddr(data []byte, a netip.Addr) bool {
	have, _ := netip.AddrFromSlice(data)
	return have == a
}
