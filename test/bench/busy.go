// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/test/lab"
)

// foreign is a device of another program on a busy host. It has many routes, and
// neighbours that change constantly.
type foreign struct {
	host  *lab.Host
	index int
}

const foreignDevice = "busy0"

// makeBusy creates the foreign device and count routes to it, each to one address, as
// a routing daemon would.
func makeBusy(ctx context.Context, h *lab.Host, count int) (*foreign, error) {
	f := &foreign{host: h}
	err := h.Netlink(ctx, func(nl *netlink.Handle) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = foreignDevice
		link := &netlink.Veth{LinkAttrs: attrs, PeerName: foreignDevice + "p"}
		if err := nl.LinkAdd(link); err != nil {
			return fmt.Errorf("add %s: %w", foreignDevice, err)
		}
		peer, err := nl.LinkByName(link.PeerName)
		if err != nil {
			return err
		}
		f.index = link.Attrs().Index
		return errors.Join(nl.LinkSetUp(peer), nl.LinkSetUp(link))
	})
	if err != nil {
		return nil, err
	}
	return f, withRTNL(ctx, h, func(r *rtnl) error {
		dst := netip.AddrFrom4([4]byte{100, 64})
		for i := range count {
			r.putLinkRoute(netip.PrefixFrom(dst, 32), f.index)
			dst = dst.Next()
			if i%batch == batch-1 || i == count-1 {
				if err := r.flush(); err != nil {
					return fmt.Errorf("add foreign routes: %w", err)
				}
			}
		}
		return nil
	})
}

// remove removes the device, and with it its routes and neighbours.
func (f *foreign) remove(ctx context.Context) error {
	return f.host.Netlink(ctx, func(nl *netlink.Handle) error {
		link, err := nl.LinkByName(foreignDevice)
		if err != nil {
			return err
		}
		return nl.LinkDel(link)
	})
}

// churn changes as many neighbours per second as rate says, until stop is called or a
// change fails. stop returns the error of the failed change.
func (f *foreign) churn(ctx context.Context, rate int) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var failed error
	wg.Go(func() {
		failed = withRTNL(ctx, f.host, func(r *rtnl) error {
			const every = 10 * time.Millisecond
			tick := time.NewTicker(every)
			defer tick.Stop()
			share := rate * int(every) / int(time.Second)
			ip := netip.AddrFrom4([4]byte{100, 64})
			mac := [6]byte{2, 1}
			for n := 0; ; n++ {
				mac[5] = byte(n) // so that each write changes something
				for range share {
					r.putNeigh(f.index, ip, mac)
					ip = ip.Next()
					if ip.As4()[2] > 3 { // start again after a thousand neighbours
						ip = netip.AddrFrom4([4]byte{100, 64})
					}
				}
				if err := r.flush(); err != nil {
					return fmt.Errorf("change foreign neighbours: %w", err)
				}

				select {
				case <-tick.C:
				case <-ctx.Done():
					return nil
				}
			}
		})
	})
	return func() error {
		cancel()
		wg.Wait()
		return failed
	}
}
