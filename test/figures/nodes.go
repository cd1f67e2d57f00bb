// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"fmt"

	"golang.org/x/sync/errgroup"
)

// Each calls f for all numbers i with from <= i < to, 16 at a time, and returns the first
// error. An error ends only one of the 16 workers: the others still call f for the rest of
// their numbers.
func Each(from, to int, f func(int) error) error {
	const workers = 16
	var group errgroup.Group
	for w := range workers {
		group.Go(func() error {
			for i := from + w; i < to; i += workers {
				if err := f(i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
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
