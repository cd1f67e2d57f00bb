// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/traffic"
	"github.com/flanneld/flanneld/pkg/wait"
)

const (
	// uncrowded is the largest number of paths with which each path is checked once in every interval.
	uncrowded = Rate * int(interval/time.Second)
	// watchFor is the duration of a sample. The next sample begins at about the end of the last one, so that
	// a device is watched nearly all the time. Samples of a fast device are shorter.
	watchFor = 2 * time.Second
	// large is the size in bytes above which a packet shows that the MTU of its path matters: the least
	// MTU that a path may get over IPv4. Acknowledgements are smaller.
	large = 576
)

// sample is the function that Prober.sample contains outside of tests.
func sample(ctx context.Context, device string) ([]netip.Addr, error) {
	return traffic.Sample(ctx, device, large, watchFor)
}

// watch finds the paths that carry large packets, until ctx ends. It does so only while some paths have to
// wait for their check. Samples begin at varying intervals, because traffic may be periodic too.
func (p *Prober) watch(ctx context.Context) {
	var logged sync.Once
	for ctx.Err() == nil {
		var samples sync.WaitGroup
		for _, device := range p.crowded() {
			samples.Go(func() {
				to, err := p.sample(ctx, device)
				if gone := errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENETDOWN); err != nil && !gone && ctx.Err() == nil {
					logged.Do(func() {
						klog.FromContext(ctx).Error(err, "cannot find out which paths carry packets: the MTU of each path is checked in turn")
					})
				}
				p.carry(to)
			})
		}
		_ = wait.For(ctx, wait.Vary(watchFor, 0.2))
		samples.Wait()
	}
}

// crowded returns the devices of all paths if there are so many paths that some have to wait, otherwise nil.
func (p *Prober) crowded() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.paths) <= uncrowded {
		return nil
	}
	var devices []string
	for _, s := range p.paths {
		if !slices.Contains(devices, s.path.Device) {
			devices = append(devices, s.path.Device)
		}
	}
	return devices
}

// carry records that large packets were sent to these addresses, and wakes Run. It ignores addresses to
// which there is no path.
func (p *Prober) carry(to []netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range to {
		if s := p.to(a); s != nil {
			p.order.carries(s, time.Now())
			p.added.Send()
		}
	}
}

// to returns the path to the smallest subnet that contains the address, or nil if there is none.
func (p *Prober) to(a netip.Addr) *state {
	for bits := a.BitLen(); bits > 0; bits-- {
		subnet := netip.PrefixFrom(a, bits).Masked()
		if s := p.paths[subnet]; s != nil {
			return s
		}
	}
	return nil
}
