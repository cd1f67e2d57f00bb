// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
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
func (b *bed) events(ctx context.Context, count int) (l latencies) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the bare watch, because each open watch makes later measures slower
	p := makePeer(len(b.peers))
	value := p.value(b.backend, "")
	announced, stop := b.listen(ctx, b.lab.Host(1), p)
	defer stop()
	watch := b.client.Watch(ctx, barePrefix, clientv3.WithPrefix())
	pause(ctx, 100*time.Millisecond)
	seen := func() time.Time { return waitWatch(watch) }

	for range count {
		for _, s := range []struct {
			into   *[]float64
			key    string
			remove bool
			arrive func() time.Time
		}{
			{&l.add, p.key(), false, func() time.Time { return announced(false) }},
			{&l.watch, barePrefix + p.subnet.String(), false, seen},
			{&l.remove, p.key(), true, func() time.Time { return announced(true) }},
			{&l.watch, barePrefix + p.subnet.String(), true, seen},
		} {
			pause(ctx, eventPause)
			start := time.Now()
			arrived := during(func() {
				if s.remove {
					b.remove(ctx, s.key)
				} else {
					b.put(ctx, s.key, value)
				}
			}, s.arrive)
			*s.into = append(*s.into, ms(arrived.Sub(start)))
		}
	}
	return l
}

// during makes a write while it waits for its event, which may arrive before the reply to the write.
func during(write func(), arrive func() time.Time) time.Time {
	written := make(chan error, 1)
	go func() { written <- must.Catch(write) }()
	at := arrive()
	must.Do(<-written)
	return at
}

func (b *bed) put(ctx context.Context, key, value string) { must.Get(b.client.Put(ctx, key, value)) }

func (b *bed) remove(ctx context.Context, key string) { must.Get(b.client.Delete(ctx, key)) }

func waitWatch(events clientv3.WatchChan) time.Time {
	select {
	case resp, ok := <-events:
		if !ok || resp.Err() != nil {
			must.Fail("etcd watch ended: %w", resp.Err())
		}
	case <-time.After(patience):
		must.Fail("etcd watch: nothing within %s", patience)
	}
	return time.Now()
}

// listen subscribes to the kernel's announcements about the objects of p on host. wait
// blocks until all of them exist or, if gone is true, until all are gone. It returns the
// time of the last announcement, and ends the measure if none arrives within patience. The caller
// must call stop.
func (b *bed) listen(ctx context.Context, host *lab.Host, p peer) (wait func(gone bool) time.Time, stop func()) {
	var r *rtnl
	var ifindex int
	inside(ctx, host.Namespace, func() {
		ifindex = link(b.device()).Index
		r = openRTNL(unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE)
	})
	r.limitWait(patience)
	want := 1
	if objectsOf(b.backend).vtep {
		want = 3
	}
	return func(gone bool) time.Time {
		have := map[string]bool{}
		for len(have) < want {
			err := r.receive(func(typ uint16, _ uint32, payload []byte) {
				if what := p.concerned(typ, payload, ifindex, gone); what != "" {
					have[what] = true
				}
			})
			if err != nil {
				must.Fail("wait for the kernel to announce %d objects of %s, have %v: %w", want, p.subnet, have, err)
			}
		}
		return time.Now()
	}, r.close
}

// concerned returns the name of the object of p that a message announces as new or, if
// gone is true, as deleted. It returns "" for any other message. Neighbours and FDB
// entries must belong to the device ifindex.
func (p peer) concerned(typ uint16, payload []byte, ifindex int, gone bool) string {
	switch {
	case typ == unix.RTM_NEWROUTE && !gone, typ == unix.RTM_DELROUTE && gone:
		if dst, _, ok := parseRoute(payload); ok && dst == p.subnet {
			return "route"
		}

	case typ == unix.RTM_NEWNEIGH && !gone, typ == unix.RTM_DELNEIGH && gone:
		n := parseNeigh(payload)
		switch {
		case n.ifindex != ifindex:
		case n.family == unix.AF_BRIDGE && n.mac == p.mac:
			return "FDB entry"
		case n.family == unix.AF_INET && n.dst == p.subnet.Addr():
			return "neighbour"
		}
	}
	return ""
}
