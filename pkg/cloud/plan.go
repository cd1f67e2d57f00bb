// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"fmt"
	"net/netip"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// plan contains what one comparison wants: the routes, and the reasons why others are impossible.
type plan struct {
	wanted   []want
	right    map[Route]bool // wanted routes that the tables had when they were read
	problems problems       // why there are no right routes to some destinations
}

type problems []problem

type problem struct {
	dst    netip.Prefix
	action string // the action that has failed, with its route
	err    error
}

func (p *problems) add(dst netip.Prefix, action string, err error) {
	*p = append(*p, problem{dst, action, err})
}

func (p problems) error() error {
	var errs []error
	for _, one := range p {
		errs = append(errs, fmt.Errorf("%s: %w", one.action, one.err))
	}
	return oneline.Join(errs...)
}

func present(tables []Table, wanted []want) map[Route]bool {
	right := map[Route]bool{}
	for _, t := range tables {
		all := map[Route]bool{}
		for _, w := range wanted {
			all[w.in(t.ID)] = true
		}
		for _, r := range t.Routes {
			if all[r] {
				right[r] = true
			}
		}
	}
	return right
}
