// Package iptables renders and applies firewall rules by the programs iptables,
// iptables-save and iptables-restore, in the variant that the host has.
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
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"

	"flanneld/pkg/firewall"
	"flanneld/pkg/firewall/nftables"
	"flanneld/pkg/oneline"
	"flanneld/pkg/prefix"
)

// lockWait is how long iptables-restore waits for the xtables lock, in
// seconds. Then it is asked again later: never are two of them waiting.
const lockWait = 10

// runTimeout bounds one program, lock and all.
const runTimeout = 30 * time.Second

// pipeDelay is how long the rest of what a program has written may take to be
// read once it has ended: a moment, but where the host is busy a long one.
const pipeDelay = 10 * time.Second

// ErrMissing means that a program is not installed.
var ErrMissing = errors.New("program is not installed")

// Variant says which of several sets of programs to use: the suffix of
// iptables and ip6tables in their names.
type Variant string

// The variants.
const (
	// Default is what the host's alternatives point to.
	Default Variant = ""
	// Legacy talks to the kernel's own iptables.
	Legacy Variant = "-legacy"
	// NFT translates to nftables.
	NFT Variant = "-nft"
)

// Present reports whether the programs of the variant are installed, for one
// family at least.
func (v Variant) Present() bool {
	return slices.ContainsFunc(families(), func(f prefix.Family) bool { return installed(v.Program(f)) })
}

func installed(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}

// Places are the chains where a change matters to Apply, in the variant NFT.
func Places() []firewall.Place {
	var places []firewall.Place
	for _, c := range firewall.Chains() {
		p := placeOf(c)
		places = append(places, firewall.Place{Table: p.table, Chain: p.parent}, firewall.Place{Table: p.table, Chain: p.chain})
	}
	return places
}

// Tables are the tables that hold our chains.
func Tables() []string { return []string{"nat", "filter", "mangle"} }

func families() []prefix.Family { return []prefix.Family{prefix.IPv4, prefix.IPv6} }

// Program returns the name of the program for family f.
func (v Variant) Program(f prefix.Family) string {
	if f == prefix.IPv4 {
		return "iptables" + string(v)
	}
	return "ip6tables" + string(v)
}

// Applier implements firewall.Applier. It is not safe for concurrent use.
type Applier struct {
	variant Variant
	known   map[prefix.Family]kind
	leads   leadsFunc
	legacy  legacy
}

// New returns an applier that uses the programs of variant v.
func New(v Variant) *Applier {
	return &Applier{variant: v, known: map[prefix.Family]kind{}, leads: nftables.Leads, legacy: newLegacy()}
}

// Variant returns Legacy or NFT, whichever the programs turn out to be for
// family f.
func (a *Applier) Variant(ctx context.Context, f prefix.Family) (Variant, error) {
	k, err := a.kind(ctx, f)
	if err != nil || !k.nft {
		return Legacy, err
	}
	return NFT, nil
}

// kind asks once.
func (a *Applier) kind(ctx context.Context, f prefix.Family) (kind, error) {
	if k, ok := a.known[f]; ok {
		return k, nil
	}
	k, err := a.variant.probe(ctx, f)
	if err == nil {
		a.known[f] = k
	}
	return k, err
}

// Apply implements firewall.Applier. Where nothing has changed it runs one program for each
// family that p concerns, and none if the kernel's own iptables holds the rules.
func (a *Applier) Apply(ctx context.Context, p firewall.Policy) (changed bool, err error) {
	var errs []error
	for _, f := range families() {
		if t := p.Table(f); t.Concerns() {
			wrote, err := a.apply(ctx, p, f)
			changed = changed || wrote
			errs = append(errs, err)
		}
	}
	return changed, oneline.Join(errs...)
}

func (a *Applier) apply(ctx context.Context, p firewall.Policy, f prefix.Family) (changed bool, err error) {
	// To ask would be to make them.
	wanted := p.Table(f).Wanted()
	nothing := func() bool { return !wanted && len(legacyTables(f)) == 0 }
	if a.variant == Legacy && nothing() {
		return false, nil
	}
	k, err := a.kind(ctx, f)
	if errors.Is(err, ErrMissing) && !wanted {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if !k.nft && nothing() {
		return false, nil
	}
	p.Random = p.Random && k.random
	program, table := a.variant.Program(f), p.Table(f)
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

// read returns what is there, and which tables iptables-save hides. With an error
// have is nil, or those of its tables are that cannot be read.
func (a *Applier) read(ctx context.Context, f prefix.Family, k kind) (have dump, hidden []string, err error) {
	have, err = a.save(ctx, f, k)
	if err == nil && k.nft {
		hidden, err = a.reveal(ctx, f, have)
	}
	return have, hidden, err
}

// save returns what iptables-save says. Over one rule of nft it may give up all
// tables: then it is asked for each, and the rest is left to reveal.
func (a *Applier) save(ctx context.Context, f prefix.Family, k kind) (dump, error) {
	program := a.variant.Program(f) + "-save"
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

// legacyTables are the tables of the kernel's own iptables in this network
// namespace.
func legacyTables(f prefix.Family) []string {
	file := "/proc/thread-self/net/ip_tables_names"
	if f == prefix.IPv6 {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	names, _ := os.ReadFile(file) // it is there with the module
	return strings.Fields(string(names))
}

// kind is what the programs of one family can do.
type kind struct{ nft, random, wait bool }

// probe asks for the version. The library knows what a version can do, and keeps the
// variant to itself. It is asked second: run ends a program that hangs, the library
// waits for it.
func (v Variant) probe(ctx context.Context, f prefix.Family) (kind, error) {
	text, err := run(ctx, "", v.Program(f), "--version")
	if err != nil {
		return kind{}, err
	}
	t, err := goiptables.New(goiptables.Path(v.Program(f)))
	if err != nil {
		return kind{}, fmt.Errorf("what %s can do: %w", v.Program(f), err)
	}
	// iptables-restore has --wait since the version that has --random-fully, 1.6.2.
	return kind{nft: strings.Contains(text, "(nf_tables)"), random: t.HasRandomFully(), wait: t.HasRandomFully()}, nil
}

// run runs a program to its end and returns what it says on stdout.
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
		return "", fmt.Errorf("run %s: %w%s", name, err, complaint(stderr.String()))
	}
	return stdout.String(), nil
}

// complaint is the part of what a program said on stderr that fits a line.
func complaint(text string) string {
	const most = 300
	text = strings.Join(strings.Fields(text), " ")
	if text == "" {
		return ""
	}
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return ": " + text
}
