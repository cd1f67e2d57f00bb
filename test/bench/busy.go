// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// foreign is a device of another program on a busy host. It has many routes, and
// neighbours that change constantly.
type foreign struct {
	host  *lab.Host
	index int
}

const foreignDevice = "busy0"

func makeBusy(ctx context.Context, h *lab.Host, count int) *foreign {
	f := &foreign{host: h}
	withNetlink(ctx, h, func(nl *netlink.Handle) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = foreignDevice
		link := &netlink.Veth{LinkAttrs: attrs, PeerName: foreignDevice + "p"}
		must.Do(nl.LinkAdd(link))
		f.index = link.Attrs().Index
		must.Do(nl.LinkSetUp(must.Get(nl.LinkByName(link.PeerName))))
		must.Do(nl.LinkSetUp(link))
	})
	withRTNL(ctx, h, func(r *rtnl) {
		dst := netip.AddrFrom4([4]byte{100, 64})
		inBatches(r, make([]struct{}, count), func(struct{}) {
			r.putLinkRoute(netip.PrefixFrom(dst, 32), f.index)
			dst = dst.Next()
		})
	})
	return f
}

func (f *foreign) remove(ctx context.Context) {
	withNetlink(ctx, f.host, func(nl *netlink.Handle) { must.Do(nl.LinkDel(must.Get(nl.LinkByName(foreignDevice)))) })
}

func (f *foreign) churn(ctx context.Context, rate int, during func()) {
	ctx, cancel := context.WithCancel(ctx)
	failed := make(chan error, 1)
	go func() {
		failed <- must.Catch(func() { withRTNL(ctx, f.host, func(r *rtnl) { f.change(ctx, r, rate) }) })
	}()
	defer func() {
		cancel()
		must.Do(<-failed)
	}()
	during()
}

func (f *foreign) change(ctx context.Context, r *rtnl, rate int) {
	const every = 10 * time.Millisecond
	tick := time.NewTicker(every)
	defer tick.Stop()
	share := rate * int(every) / int(time.Second)
	first := netip.AddrFrom4([4]byte{100, 64})
	ip := first
	mac := [6]byte{2, 1}
	for n := 0; ctx.Err() == nil; n++ {
		mac[5] = byte(n) // so that each write changes something
		for range share {
			r.putNeigh(f.index, ip, mac)
			ip = ip.Next()
			if ip.As4()[2] > 3 { // start again after a thousand neighbours
				ip = first
			}
		}
		r.flush()

		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}
