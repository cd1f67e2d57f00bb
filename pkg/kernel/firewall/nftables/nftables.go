// SPDX-License-Identifier: Apache-2.0

// Package nftables applies firewall rules through netlink, in tables of its own, and
// listens to changes by other programs. It runs no program. HasTable, Targets, Docker and
// Watch are not limited to these tables, and only read.
package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// attempts is the maximum number of attempts at a pass. An attempt fails if another program
// changes the ruleset during it.
const attempts = 10

// Applier implements firewall.Applier.
type Applier struct{}

// New returns an Applier.
func New() *Applier { return &Applier{} }

// Available returns nil if the kernel has nftables, and otherwise an error that says why
// not.
func Available() error {
	c, err := dial(prefix.IPv4)
	if err != nil {
		return err
	}
	defer c.close()
	_, err = c.generation()
	return err
}

// HasTable reports whether a table with that name exists, of any program.
func HasTable(f prefix.Family, name string) (there bool, err error) {
	c, err := dial(f)
	if err != nil {
		return false, err
	}
	defer c.close()
	err = c.get(unix.NFT_MSG_GETTABLE, 0, []netlink.Attribute{str(unix.NFTA_TABLE_NAME, name)}, func(attrs) { there = true })
	return there, err
}

// Apply implements firewall.Applier. All changes to a family are one transaction, or two,
// see once.
func (a *Applier) Apply(ctx context.Context, policies ...firewall.Policy) (changed bool, err error) {
	return firewall.ApplyFamilies(policies, func(t firewall.Table) (bool, error) {
		wrote, err := apply(ctx, t)
		if errors.Is(err, errNoKernel) && !t.Wanted() {
			return wrote, nil // a kernel without nftables has no rules to remove
		}
		if err != nil {
			err = fmt.Errorf("nftables table %s: %w", tableName(t.Family), err)
		}
		return wrote, err
	})
}

func apply(ctx context.Context, t firewall.Table) (changed bool, err error) {
	for range attempts {
		wrote, more, err := once(t)
		changed = changed || wrote
		if err == nil && !more || err != nil && !errors.Is(err, errRaced) {
			return changed, err
		}
		if ctx.Err() != nil {
			return changed, context.Cause(ctx)
		}
	}
	return changed, errRaced
}

// once reads the rules, plans and writes. It returns errRaced if the ruleset has changed meanwhile. If
// more is set, once must be called again: the kernel does not accept the activation of a dormant table
// together with changes of its chains.
func once(t firewall.Table) (changed, more bool, err error) {
	c, err := dial(t.Family)
	if err != nil {
		return false, false, err
	}
	defer c.close()

	generation, err := c.generation()
	if err != nil {
		return false, false, err
	}
	have, err := c.table(tableName(t.Family))
	if err != nil {
		return false, false, err
	}
	changes, err := c.plan(have, t)
	if err != nil || len(changes) == 0 {
		return false, false, err
	}
	if err := c.commit(generation, changes); err != nil {
		return false, false, err
	}
	return true, have.dormant, nil
}

// plan returns the changes that turn the existing table into t.
func (c *conn) plan(have table, t firewall.Table) ([]netlink.Message, error) {
	var changes []netlink.Message
	left := have.chains
	wanted := false
	for _, chain := range firewall.Chains() {
		there := have.ours[chain]
		a := t.Arrange(chain, there.decoded)
		if a.Empty() {
			if there.exists {
				changes = append(changes, c.delRules(chain), c.delChain(chain))
				left--
			}
			continue
		}

		wanted = true
		if a.Exact && there.exists && there.right {
			continue
		}

		of, err := c.planChain(chain, there, a)
		if err != nil {
			return nil, err
		}
		changes = append(changes, of...)
	}

	switch {
	case wanted && !have.exists:
		changes = append([]netlink.Message{c.newTable()}, changes...)
	case wanted && have.dormant && len(changes) == 0:
		return []netlink.Message{c.newTable()}, nil
	case have.exists && !wanted && left == 0:
		return []netlink.Message{c.delTable(tableName(t.Family))}, nil
	}
	return changes, nil
}

// planChain plans one chain that is wanted and not as it should be. It writes the rules of other daemons again.
func (c *conn) planChain(chain firewall.Chain, there chainState, a firewall.Arrangement) ([]netlink.Message, error) {
	var rules [][]byte
	for _, r := range slices.Concat(a.Common, a.Own) {
		raw, err := encode(c.family, r)
		if err != nil {
			return nil, err
		}
		rules = append(rules, raw)
	}
	for n, i := range a.Others {
		rules = slices.Insert(rules, len(a.Common)+n, there.rules[i])
	}

	var changes []netlink.Message
	if there.exists {
		changes = append(changes, c.delRules(chain))
	}
	if there.exists && !there.right {
		changes = append(changes, c.delChain(chain))
	}
	if !there.right {
		changes = append(changes, c.newChain(chain))
	}
	for _, raw := range rules {
		changes = append(changes, c.newRule(chain, raw))
	}
	return changes, nil
}
