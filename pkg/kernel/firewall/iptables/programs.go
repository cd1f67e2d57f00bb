// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

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

// hasTables reports whether there are tables that the programs of the variant change. It returns true for
// Default, of which that is not known.
func (v Variant) hasTables(f prefix.Family) bool {
	switch v {
	case Legacy:
		return len(legacyTables(f)) > 0
	case NFT:
		return slices.ContainsFunc(Tables(), func(name string) bool {
			there, err := nftables.HasTable(f, name)
			return err == nil && there
		})
	default:
		return true
	}
}

func families() []prefix.Family { return []prefix.Family{prefix.IPv4, prefix.IPv6} }

// Program returns the name of the program for family f.
func (v Variant) Program(f prefix.Family) string {
	return map[prefix.Family]string{prefix.IPv4: "iptables", prefix.IPv6: "ip6tables"}[f] + string(v)
}

// Programs are the programs of a variant. They are probed once for each family, when that
// is first needed. They are safe for concurrent use.
type Programs struct {
	variant Variant
	known   sync.Map // of kind, by family
}

// NewPrograms returns the programs of variant v.
func NewPrograms(v Variant) *Programs { return &Programs{variant: v} }

// Variant returns Legacy or NFT: the variant that the programs for family f implement. It
// returns Legacy with an error if it cannot find out.
func (p *Programs) Variant(ctx context.Context, f prefix.Family) (Variant, error) {
	k, err := p.kind(ctx, f)
	if err != nil || !k.nft {
		return Legacy, err
	}
	return NFT, nil
}

func (p *Programs) kind(ctx context.Context, f prefix.Family) (kind, error) {
	// Two calls at the same time may both probe, so that neither waits for the other.
	if k, known := p.known.Load(f); known {
		return k.(kind), nil
	}

	k, err := p.variant.probe(ctx, f)
	if err == nil {
		p.known.Store(f, k)
	}
	return k, err
}

// kind says whether programs are of the variant NFT, and are recent enough for the options --random-fully and
// --wait.
type kind struct{ nft, recent bool }

func (v Variant) probe(ctx context.Context, f prefix.Family) (kind, error) {
	// The library knows which options a version has, but not the variant, and it would wait for a
	// program that hangs.
	text, err := run(ctx, "", v.Program(f), "--version")
	if err != nil {
		return kind{}, err
	}
	t, err := goiptables.New(goiptables.Path(v.Program(f)))
	if err != nil {
		return kind{}, fmt.Errorf("read the version of %s: %w", v.Program(f), err)
	}

	// iptables-restore has --wait since 1.6.2, the version that introduced --random-fully.
	return kind{nft: strings.Contains(text, "(nf_tables)"), recent: t.HasRandomFully()}, nil
}

// run returns the standard output of a program, or ErrMissing, or an error with its error output.
func run(ctx context.Context, stdin, name string, args ...string) (string, error) {
	text, _, err := measure(ctx, stdin, name, args...)
	return text, err
}

// measure is like run, and also returns the CPU time of the program.
func measure(ctx context.Context, stdin, name string, args ...string) (text string, cost time.Duration, err error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", name, ErrMissing)
	}

	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = pipeDelay
	var stdout, stderr bytes.Buffer
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr

	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if said := oneline.Collapse(stderr.String()); said != "" {
			err = fmt.Errorf("%w: %s", err, oneline.Shorten(said, 300))
		}
		return "", 0, fmt.Errorf("run %s: %w", name, err)
	}
	return stdout.String(), cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}
