// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"fmt"

	"golang.org/x/sync/errgroup"
)

// Each calls f for the numbers from from up to but excluding to, several at a time, and returns the first
// error. After an error it calls f for some more of the numbers, but not for all.
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

// NodeImages returns the greater part of a Node in a busy cluster: the images that it has, some
// 15 kB. They differ from those of other Nodes.
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
