// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

// foreignRules is the number of rules of other programs on a busy host, as kube-proxy
// creates them for some thousands of services.
const foreignRules = 20_000

// firewallTriggers is how many changes of other programs the daemon has to repair in one
// round.
const firewallTriggers = 10

// firewallKind is one way to program traffic rules. variant is the iptables variant of the
// other programs.
type firewallKind struct {
	name, variant string
	args          []string
	// trigger is a command with which another program makes a change that the daemon must
	// repair.
	trigger string
}

func firewallKinds() []firewallKind {
	iptables := func(variant, trigger string) firewallKind {
		return firewallKind{"iptables-" + variant, variant, []string{"--firewall=iptables"}, trigger}
	}
	return []firewallKind{
		{"nftables", "nft", []string{"--firewall=nftables"}, "nft flush chain ip flannel-ipv4 forward"},
		iptables("nft", "iptables-nft -F FLANNEL-FWD"),
		iptables("legacy", "iptables-legacy -F FLANNEL-FWD"),
	}
}

// measureFirewall measures the cost of masquerade and forward rules for both families, on a
// host without and on one with many rules of other programs.
func (r *runner) measureFirewall(ctx context.Context) error {
	for _, k := range firewallKinds() {
		for _, foreign := range []int{0, foreignRules} {
			if err := r.firewallRound(ctx, k, foreign); err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
		}
	}
	return nil
}

// firewallRound measures one kind. foreign is the number of rules of other programs on the
// host. It uses a new host, because rules stay when a daemon stops.
func (r *runner) firewallRound(ctx context.Context, k firewallKind, foreign int) error {
	families := []prefix.Family{prefix.IPv4, prefix.IPv6}
	network, err := lab.NetworkConfig(families, json.RawMessage(`{"Type":"vxlan"}`))
	if err != nil {
		return err
	}
	l, err := lab.New(ctx, lab.Config{Hosts: 1, Families: families, Network: network, Flanneld: r.flanneld})
	if err != nil {
		return err
	}
	defer l.Close()
	h := l.Host(1)
	if err := addForeignRules(ctx, h, k.variant, foreign); err != nil {
		return err
	}
	programs, err := newPrograms(k.variant)
	if err != nil {
		return err
	}
	defer programs.remove()
	group := "Traffic rules by " + k.name
	run, err := programs.count(ctx, h, k, r.atRest)
	if err != nil {
		return err
	}
	r.report.add(group, "programs run in a minute, at rest", foreign, "programs", run*float64(time.Minute)/float64(r.atRest), 0)

	d, err := startFirewall(ctx, h, k, programs.plain)
	if err != nil {
		return err
	}
	defer d.Kill()
	before, err := treeCPU(d.PID())
	if err != nil {
		return err
	}
	if err := wait.For(ctx, r.atRest); err != nil {
		return err
	}
	after, err := treeCPU(d.PID())
	if err != nil {
		return err
	}
	cpu := ms(after-before) * float64(time.Minute) / float64(r.atRest)
	r.report.add(group, "CPU in a minute, at rest, programs included", foreign, "ms", cpu, 150)
	return r.firewallRepairs(ctx, group, k, foreign, d)
}

// firewallRepairs makes changes that d repairs, and records the CPU time per repair.
func (r *runner) firewallRepairs(ctx context.Context, group string, k firewallKind, foreign int, d *lab.Daemon) error {
	repairs := func() (float64, error) {
		_, page, err := d.Get(ctx, "/metrics")
		if err != nil {
			return 0, err
		}
		return figure(page, "flannel_firewall_repairs_total")
	}

	were, err := repairs()
	if err != nil {
		return err
	}
	before, err := treeCPU(d.PID())
	if err != nil {
		return err
	}

	for range firewallTriggers {
		if out, err := r.inHost(ctx, d, k.trigger); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if err := wait.For(ctx, 2*time.Second); err != nil {
			return err
		}
	}

	after, err := treeCPU(d.PID())
	if err != nil {
		return err
	}
	are, err := repairs()
	if err != nil {
		return err
	}
	if are == were {
		return fmt.Errorf("none of %d changes was repaired", firewallTriggers)
	}
	r.report.add(group, "CPU of one repair, and the look behind it", foreign, "ms", ms(after-before)/(are-were))
	return nil
}

// inHost runs a script in the daemon's namespaces, and returns its output.
func (r *runner) inHost(ctx context.Context, d *lab.Daemon, script string) ([]byte, error) {
	return exec.CommandContext(ctx, "nsenter", "-t", fmt.Sprint(d.PID()), "-n", "-m", "sh", "-ec", script).CombinedOutput()
}

func startFirewall(ctx context.Context, h *lab.Host, k firewallKind, path string) (*lab.Daemon, error) {
	d, err := h.StartFlanneld(ctx, lab.FlanneldOptions{Args: append(k.args, "--ip-masq"), Env: []string{"PATH=" + path + ":" + os.Getenv("PATH")}})
	if err != nil {
		return nil, err
	}
	if err := d.Ready(ctx); err != nil {
		return nil, err
	}
	return d, wait.For(ctx, afterStart)
}

// addForeignRules creates count rules in chains of a hundred, half of them for each family,
// like those of another program on a busy host. No rule jumps to these chains, so they cost
// only those programs that read all rules.
func addForeignRules(ctx context.Context, h *lab.Host, variant string, count int) error {
	if count == 0 {
		return nil
	}

	const perChain = 100
	var rules strings.Builder
	rules.WriteString("*nat\n")
	for i := range count / 2 {
		if i%perChain == 0 {
			fmt.Fprintf(&rules, ":KUBE-SVC-%d - [0:0]\n", i/perChain)
		}
		fmt.Fprintf(&rules, "-A KUBE-SVC-%d -p tcp -m tcp --dport %d -m comment --comment \"default/service\" -j RETURN\n", i/perChain, 1+i%60000)
	}

	rules.WriteString("COMMIT\n")
	file := h.Path("/run/foreign-rules")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		return err
	}

	for _, family := range []string{"iptables", "ip6tables"} {
		if out, err := h.Exec(ctx, "sh", "-ec", fmt.Sprintf("%s-%s-restore --noflush /run/foreign-rules", family, variant)); err != nil {
			return fmt.Errorf("add foreign rules: %w: %s", err, out)
		}
	}
	return nil
}

// firewallPrograms are two folders with the programs of one iptables variant. plain has links
// to the programs. counted has scripts that add a line to log before they run the program.
type firewallPrograms struct{ dir, plain, counted, log string }

func newPrograms(variant string) (firewallPrograms, error) {
	dir, err := os.MkdirTemp("", "bench-programs")
	p := firewallPrograms{dir, filepath.Join(dir, "plain"), filepath.Join(dir, "counted"), filepath.Join(dir, "log")}
	errs := []error{err, os.Mkdir(p.plain, 0o700), os.Mkdir(p.counted, 0o700)}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			for _, v := range []string{"", "-nft", "-legacy"} {
				behind := family + v + suffix
				if v == "" {
					behind = family + "-" + variant + suffix
				}
				path, err := exec.LookPath(behind)
				script := fmt.Sprintf("#!/bin/sh\necho %s >>%s\nexec %s \"$@\"\n", behind, p.log, path)
				errs = append(errs, err, os.Symlink(path, filepath.Join(p.plain, family+v+suffix)),
					os.WriteFile(filepath.Join(p.counted, family+v+suffix), []byte(script), 0o700))
			}
		}
	}
	return p, errors.Join(errs...)
}

func (p firewallPrograms) remove() { _ = os.RemoveAll(p.dir) }

// count starts a daemon with the counted programs, and returns how many programs it runs in
// the time d when it is idle.
func (p firewallPrograms) count(ctx context.Context, h *lab.Host, k firewallKind, d time.Duration) (float64, error) {
	daemon, err := startFirewall(ctx, h, k, p.counted)
	if err != nil {
		return 0, err
	}
	defer daemon.Kill()
	lines := func() int {
		text, err := os.ReadFile(p.log)
		if err != nil { // no program has run yet
			return 0
		}
		return strings.Count(string(text), "\n")
	}

	before := lines()
	err = wait.For(ctx, d)
	return float64(lines() - before), err
}
