// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/oneline"
)

// plan contains what one comparison wants: the routes, and the reasons why others are impossible.
type plan struct {
	wanted   []want
	right    map[Route]bool // wanted routes that the tables had when they were read
	problems problems       // why there are no right routes to some destinations
	// all is set if wanted has the routes to all hosts to which routes can lead: the store has told the hosts, and
	// the cloud their targets.
	all bool
	// followers contains the first subnet of each host whose packets follow a table, by the id of the table. It
	// is complete if all is set.
	followers map[string][]netip.Prefix
}

// problems are the reasons why routes are not in order.
type problems []problem

type problem struct {
	dst    netip.Prefix
	action string // the action that has failed, with its route; empty if no action has failed
	err    error  // has the same text for all routes with the same problem, so that an announcement is short
}

func (p *problems) add(dst netip.Prefix, action string, err error) {
	*p = append(*p, problem{dst, action, err})
}

// full returns the error with the action before its text.
func (p problem) full() error {
	if p.action == "" {
		return p.err
	}
	return fmt.Errorf("%s: %w", p.action, p.err)
}

// of returns the problems of the destinations dsts as one error, or nil if they have none. If dsts is empty, it
// returns the problems of all destinations.
func (p problems) of(dsts []netip.Prefix) error {
	var errs []error
	for _, one := range p {
		if len(dsts) == 0 || slices.Contains(dsts, one.dst) {
			errs = append(errs, one.full())
		}
	}
	return oneline.Join(errs...)
}

// present returns the wanted routes that the tables have.
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
