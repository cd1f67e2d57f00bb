// SPDX-License-Identifier: Apache-2.0

// Package iptables applies firewall rules with the programs iptables, iptables-save and
// iptables-restore, in the variant that the caller selects. Choose finds the variant that
// other software on the host uses. Docker returns what rules of Docker do to packets.
package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// lockWait is the time in seconds that iptables-restore waits for the xtables lock, if it has
// the option --wait. After that Apply fails, and its caller repeats it later.
const lockWait = 10

// Applier implements firewall.Applier. It is not safe for concurrent use.
type Applier struct {
	programs *Programs
	targets  targetsFunc
	trusted  map[prefix.Family]trusted // only for the kernel's own iptables
}

// New returns an Applier that uses the programs of variant v.
func New(v Variant) *Applier { return NewPrograms(v).Applier() }

// Applier returns an Applier that uses p.
func (p *Programs) Applier() *Applier {
	return &Applier{programs: p, targets: nftables.Targets, trusted: map[prefix.Family]trusted{}}
}

// Apply implements firewall.Applier. If nothing has changed it usually runs one program for
// each family that the policies concern. With the variant Legacy it runs none if the last call
// has found the rules of the same policies, and reading them again now would take too much CPU time.
func (a *Applier) Apply(ctx context.Context, policies ...firewall.Policy) (changed bool, err error) {
	return firewall.ApplyFamilies(policies, func(t firewall.Table) (bool, error) { return a.apply(ctx, policies, t) })
}

// apply applies the policies to one family, for which table contains the rules.
func (a *Applier) apply(ctx context.Context, policies []firewall.Policy, table firewall.Table) (changed bool, err error) {
	f := table.Family
	// Do not run a program if nothing is wanted and no tables exist, because the program
	// would create them.
	wanted := table.Wanted()
	if !wanted && !a.programs.variant.hasTables(f) {
		return false, nil
	}

	k, err := a.programs.kind(ctx, f)
	if !wanted && (errors.Is(err, ErrMissing) || err == nil && !k.nft && !Legacy.hasTables(f)) {
		return false, nil
	}
	if err != nil {
		return false, err
	}

	if !k.recent {
		policies = slices.Clone(policies)
		for i := range policies {
			policies[i].Random = false
		}
		table = firewall.TableOf(f, policies...)
	}

	if a.trusted[f].rests(table) {
		return false, nil
	}
	delete(a.trusted, f)
	var hidden []string
	have, cost, err := a.save(ctx, f, k)
	if err == nil && k.nft {
		hidden, err = a.correct(ctx, f, have)
	}
	if err != nil {
		err = fmt.Errorf("read rules: %w", err)
	}
	if have == nil {
		return false, err
	}

	script := plan(have, table)
	if script == "" {
		if err == nil && !k.nft {
			a.trusted[f] = trusted{table, time.Now().Add(restFactor * cost)}
		}
		return false, err
	}

	args := []string{"--noflush"}
	if k.recent {
		args = append(args, fmt.Sprintf("--wait=%d", lockWait))
	}
	if _, failed := run(ctx, script, a.programs.variant.Program(f)+"-restore", args...); failed != nil {
		return ctx.Err() != nil, oneline.Join(err, fmt.Errorf("write rules: %w", a.refused(f, hidden, failed)))
	}
	return true, err
}

// save returns the parsed output of iptables-save, and its CPU time.
func (a *Applier) save(ctx context.Context, f prefix.Family, k kind) (_ dump, cost time.Duration, err error) {
	program := a.programs.variant.Program(f) + "-save"
	text, cost, err := measure(ctx, "", program)
	if _, failed := errors.AsType[*exec.ExitError](err); failed && k.nft {
		// A single rule of nft can make it fail for all tables. correct reads those that are
		// left out here.
		d := dump{}
		for _, table := range append(Tables(), "raw") { // Docker has rules in raw
			if text, err := run(ctx, "", program, "-t", table); err == nil {
				maps.Copy(d, parseSave(text))
			}
		}
		return d, cost, nil
	}
	if err != nil {
		return nil, cost, err
	}
	return parseSave(text), cost, nil
}
