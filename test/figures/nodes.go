// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/test/must"
)

// Each calls f for all numbers i with from <= i < to, 16 at a time. A call that fails ends the measurement
// after the calls that run.
func Each(from, to int, f func(int)) {
	group, ctx := errgroup.WithContext(context.Background())
	group.SetLimit(16)
	for i := from; i < to && ctx.Err() == nil; i++ {
		group.Go(func() error { return must.Catch(func() { f(i) }) })
	}
	must.Do(group.Wait())
}

// Addr returns the address at an offset from an IPv4 address.
func Addr(first string, offset int) netip.Addr {
	a := netip.MustParseAddr(first).As4()
	binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])+uint32(offset))
	return netip.AddrFrom4(a)
}

// NodeImages returns a list of images for the status of a Node, about 15 kB. It is the greater
// part of a Node in a busy cluster. The digests differ from those of other Nodes.
func NodeImages(node int) (list []any) {
	for i := range 50 {
		repository := fmt.Sprintf("registry.example.com/team-%d/some-service-with-a-name-%d", i%7, i)
		list = append(list, map[string]any{
			"names":     []string{fmt.Sprintf("%s@sha256:%064x", repository, node*100+i), fmt.Sprintf("%s:v1.%d.%d", repository, i, node%10)},
			"sizeBytes": 100_000_000 + i,
		})
	}
	return list
}
