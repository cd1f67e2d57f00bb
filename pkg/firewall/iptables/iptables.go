// SPDX-License-Identifier: Apache-2.0

// Package iptables applies firewall rules with the programs iptables, iptables-save and
// iptables-restore, in the variant that the host uses.
package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/firewall/nftables"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// lockWait is the time in seconds that iptables-restore waits for the xtables lock. After
// that Apply fails, and its caller repeats it later.
const lockWait = 10

// runTimeout limits the run time of a program, including the wait for the lock.
const runTimeout = 30 * time.Second

// pipeDelay limits the time for reading the remaining output of a program that has ended.
// Reading it usually takes no time, but a busy host may take long.
const pipeDelay = 10 * time.Second

// ErrMissing means that a program is not installed.
var ErrMissing = errors.New("program is not installed")

// Variant selects one of several installed sets of programs. Its value is the part of their
// names after iptables or ip6tables.
type Variant string

// The variants.
const (
	// Default is the variant that the host's alternatives select.
	Default Variant = ""
	// Legacy uses the kernel's own iptables.
	Legacy Variant = "-legacy"
	// NFT translates rules to nftables.
	NFT Variant = "-nft"
)

// Present reports whether the program of the variant is installed for at least one family.
func (v Variant) Present() bool {
	return slices.ContainsFunc(families(), func(f prefix.Family) bool { return installed(v.Program(f)) })
}

func installed(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}

// Places returns flanneld's chains and their parents in the variant NFT. Apply must run
// again when they change.
func Places() []firewall.Place {
	var places []firewall.Place
	for _, c := range firewall.Chains() {
		p := placeOf(c)
		places = append(places, firewall.Place{Table: p.table, Chain: p.parent}, firewall.Place{Table: p.table, Chain: p.chain})
	}
	return places
}

// Tables returns the tables that contain flanneld's chains.
func Tables() []string { return []string{"nat", "filter", "mangle"} }

func families() []prefix.Family { return []prefix.Family{prefix.IPv4, prefix.IPv6} }

// Program returns the name of the program for family f.
func (v Variant) Program(f prefix.Family) string {
	if f == prefix.IPv4 {
		return "iptables" + string(v)
	}
	return "ip6tables" + string(v)
}

// Programs are the programs of a variant. They are probed once for each family, when that
// is first needed. They are safe for concurrent use.
type Programs struct {
	variant Variant

	mu    sync.Mutex
	known map[prefix.Family]kind
}

// NewPrograms returns the programs of variant v.
func NewPrograms(v Variant) *Programs { return &Programs{variant: v, known: map[prefix.Family]kind{}} }

// Variant returns Legacy or NFT: the variant that the programs for family f implement. It
// returns Legacy with an error if it cannot find out.
func (p *Programs) Variant(ctx context.Context, f prefix.Family) (Variant, error) {
	k, err := p.kind(ctx, f)
	if err != nil || !k.nft {
		return Legacy, err
	}
	return NFT, nil
}

// kind returns the result of probe for a family. It probes again only if that has failed
// before. Two calls at the same time may both probe, so that neither waits for the other.
func (p *Programs) kind(ctx context.Context, f prefix.Family) (kind, error) {
	p.mu.Lock()
	k, known := p.known[f]
	p.mu.Unlock()
	if known {
		return k, nil
	}
	k, err := p.variant.probe(ctx, f)
	if err == nil {
		p.mu.Lock()
		p.known[f] = k
		p.mu.Unlock()
	}
	return k, err
}

// Applier implements firewall.Applier. It is not safe for concurrent use.
type Applier struct {
	programs *Programs
	targets  targetsFunc
	legacy   legacy
}

// New returns an Applier that uses the programs of variant v.
func New(v Variant) *Applier { return NewPrograms(v).Applier() }

// Applier returns an Applier that uses p.
func (p *Programs) Applier() *Applier {
	return &Applier{programs: p, targets: nftables.Targets, legacy: newLegacy()}
}

// Apply implements firewall.Applier. If nothing has changed it usually runs one program for
// each family that the policies concern, and none with the variant Legacy.
func (a *Applier) Apply(ctx context.Context, policies ...firewall.Policy) (changed bool, err error) {
	var errs []error
	for _, f := range families() {
		if t := firewall.TableOf(f, policies...); t.Concerns() {
			wrote, err := a.apply(ctx, policies, f, t)
			changed = changed || wrote
			errs = append(errs, err)
		}
	}
	return changed, oneline.Join(errs...)
}

// apply applies the policies to family f. table contains their rules of this family.
// changed is as in Apply.
func (a *Applier) apply(ctx context.Context, policies []firewall.Policy, f prefix.Family, table firewall.Table) (changed bool, err error) {
	// Do not run a program if nothing is wanted and no tables exist, because the program
	// would create them.
	wanted := table.Wanted()
	nothing := func() bool { return !wanted && len(legacyTables(f)) == 0 }
	if a.programs.variant == Legacy && nothing() {
		return false, nil
	}
	k, err := a.programs.kind(ctx, f)
	if errors.Is(err, ErrMissing) && !wanted {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if !k.nft && nothing() {
		return false, nil
	}
	if !k.random {
		policies = slices.Clone(policies)
		for i := range policies {
			policies[i].Random = false
		}
		table = firewall.TableOf(f, policies...)
	}
	program := a.programs.variant.Program(f)
	var now exact
	if !k.nft {
		var same bool
		if now, same = a.legacy.unchanged(f, table); same {
			return false, nil
		}
	}
	have, hidden, err := a.read(ctx, f, k)
	if err != nil {
		err = fmt.Errorf("read rules: %w", err)
	}
	if have == nil {
		return false, err
	}
	script := plan(have, table)
	if script == "" {
		if err == nil {
			a.legacy.remember(f, now)
		}
		return false, err
	}
	args := []string{"--noflush"}
	if k.wait {
		args = append(args, fmt.Sprintf("--wait=%d", lockWait))
	}
	if _, failed := run(ctx, script, program+"-restore", args...); failed != nil {
		return ctx.Err() != nil, oneline.Join(err, fmt.Errorf("write rules: %w", a.refused(f, hidden, failed)))
	}
	return true, err
}

// read returns the existing rules, and the names of the tables that iptables-save hides. If
// it fails, have is nil, or contains nil for the tables that cannot be read.
func (a *Applier) read(ctx context.Context, f prefix.Family, k kind) (have dump, hidden []string, err error) {
	have, err = a.save(ctx, f, k)
	if err == nil && k.nft {
		hidden, err = a.correct(ctx, f, have)
	}
	return have, hidden, err
}

// save returns the parsed output of iptables-save. A single rule of nft can make
// iptables-save fail for all tables. In that case save reads the tables one by one, and
// leaves out those for which it fails. correct then reads these.
func (a *Applier) save(ctx context.Context, f prefix.Family, k kind) (dump, error) {
	program := a.programs.variant.Program(f) + "-save"
	text, err := run(ctx, "", program)
	if _, failed := errors.AsType[*exec.ExitError](err); failed && k.nft {
		d := dump{}
		for _, table := range Tables() {
			if text, err := run(ctx, "", program, "-t", table); err == nil {
				maps.Copy(d, parseSave(text))
			}
		}
		return d, nil
	}
	if err != nil {
		return nil, err
	}
	return parseSave(text), nil
}

// legacyTables returns the names of the tables of the kernel's own iptables in the network
// namespace of this thread. It returns none if the kernel module is not loaded.
func legacyTables(f prefix.Family) []string {
	file := "/proc/thread-self/net/ip_tables_names"
	if f == prefix.IPv6 {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	names, _ := os.ReadFile(file) // the file exists if the module is loaded
	return strings.Fields(string(names))
}

// kind describes the programs of one family: whether they are of the variant NFT, and
// whether they have the options --random-fully and --wait.
type kind struct{ nft, random, wait bool }

// probe reads the version of the programs. The library knows which options a version has,
// but not the variant. probe calls run first, because run ends a program that hangs, while
// the library would wait for it.
func (v Variant) probe(ctx context.Context, f prefix.Family) (kind, error) {
	text, err := run(ctx, "", v.Program(f), "--version")
	if err != nil {
		return kind{}, err
	}
	t, err := goiptables.New(goiptables.Path(v.Program(f)))
	if err != nil {
		return kind{}, fmt.Errorf("read the version of %s: %w", v.Program(f), err)
	}
	// iptables-restore has --wait since 1.6.2, the version that introduced
	// --random-fully.
	return kind{nft: strings.Contains(text, "(nf_tables)"), random: t.HasRandomFully(), wait: t.HasRandomFully()}, nil
}

// run runs a program with stdin as its input and returns its standard output. It returns
// ErrMissing if the program is not installed. Other errors contain the program's error
// output.
func run(ctx context.Context, stdin, name string, args ...string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, ErrMissing)
	}
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = pipeDelay
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return "", fmt.Errorf("run %s: %w%s", name, err, shorten(stderr.String()))
	}
	return stdout.String(), nil
}

// shorten returns ": " and the beginning of a program's error output, in one line for the
// log. It returns "" if there is no output.
func shorten(text string) string {
	const most = 300
	text = oneline.Collapse(text)
	if text == "" {
		return ""
	}
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return ": " + text
}
