// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
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
	programs      float64 // target: how many it may run in a minute at rest
	// trigger is a command with which another program makes a change that the daemon must
	// repair.
	trigger string
}

func firewallKinds() []firewallKind {
	return []firewallKind{
		{"nftables", "nft", []string{"--firewall=nftables"}, 0, "nft flush chain ip flannel-ipv4 forward"},
		{"iptables-nft", "nft", []string{"--firewall=iptables"}, 0, "iptables-nft -F FLANNEL-FWD"},
		{"iptables-legacy", "legacy", []string{"--firewall=iptables"}, 24, "iptables-legacy -F FLANNEL-FWD"},
	}
}

// measureFirewall measures the cost of masquerade and forward rules for both families, on a
// host without and on one with many rules of other programs.
func (r *runner) measureFirewall(ctx context.Context) {
	for _, k := range firewallKinds() {
		for _, foreign := range []int{0, foreignRules} {
			r.firewallRound(ctx, k, foreign)
		}
	}
}

// firewallRound measures one kind. foreign is the number of rules of other programs on the
// host. It uses a new host, because rules stay when a daemon stops.
func (r *runner) firewallRound(ctx context.Context, k firewallKind, foreign int) {
	families := []prefix.Family{prefix.IPv4, prefix.IPv6}
	network := must.Get(lab.NetworkConfig(families, json.RawMessage(`{"Type":"vxlan"}`)))
	l := must.Get(lab.New(ctx, lab.Config{Hosts: 1, Families: families, Network: network, Flanneld: r.flanneld}))
	defer l.Close()
	h := l.Host(1)
	addForeignRules(ctx, h, k.variant, foreign)
	programs := newPrograms(k.variant)
	defer programs.remove()
	group := "Traffic rules by " + k.name
	minutes := r.atRest.Minutes()

	d := startFirewall(ctx, h, k, programs.counted)
	ran := programs.count()
	pause(ctx, r.atRest)
	r.report.add(group, "programs run in a minute, at rest", foreign, "programs", float64(programs.count()-ran)/minutes, k.programs)
	d.Kill()

	d = startFirewall(ctx, h, k, programs.plain)
	defer d.Kill()
	cpu := spent(treeCPU, d.PID(), func() { pause(ctx, r.atRest) })
	r.report.add(group, "CPU in a minute, at rest, programs included", foreign, "ms", ms(cpu)/minutes, 150)

	repairs := func() float64 { return figure(metrics(ctx, d), "flannel_firewall_repairs_total") }
	before := repairs()
	cpu = spent(treeCPU, d.PID(), func() {
		for range firewallTriggers {
			must.Get(h.Exec(ctx, "sh", "-ec", k.trigger))
			pause(ctx, 2*time.Second)
		}

		// The daemon seldom reads legacy rules if there are many.
		limited, cancel := context.WithTimeoutCause(ctx, 10*time.Minute, fmt.Errorf("%s: none of %d changes was repaired", k.name, firewallTriggers))
		defer cancel()
		for repairs() == before {
			pause(limited, 2*time.Second)
		}
	})
	r.report.add(group, "CPU of one repair, and the look behind it", foreign, "ms", ms(cpu)/(repairs()-before))
}

func startFirewall(ctx context.Context, h *lab.Host, k firewallKind, path string) *lab.Daemon {
	d := must.Get(h.StartFlanneld(ctx, lab.FlanneldOptions{Args: append(k.args, "--ip-masq"), Env: []string{"PATH=" + path + ":" + os.Getenv("PATH")}}))
	must.Do(d.Ready(ctx))
	pause(ctx, afterStart)
	return d
}

// addForeignRules creates count rules in chains of a hundred, half of them for each family,
// like those of another program on a busy host. No rule jumps to these chains, so they cost
// only those programs that read all rules.
func addForeignRules(ctx context.Context, h *lab.Host, variant string, count int) {
	if count == 0 {
		return
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
	must.Do(os.WriteFile(file, []byte(rules.String()), 0o600))

	for _, family := range []string{"iptables", "ip6tables"} {
		must.Get(h.Exec(ctx, "sh", "-ec", fmt.Sprintf("%s-%s-restore --noflush /run/foreign-rules", family, variant)))
	}
}

// firewallPrograms are two folders with the programs of one iptables variant. plain has links
// to the programs. counted has scripts that add a line to log before they run the program.
type firewallPrograms struct{ dir, plain, counted, log string }

func newPrograms(variant string) firewallPrograms {
	dir := must.Get(os.MkdirTemp("", "bench-programs"))
	p := firewallPrograms{dir, filepath.Join(dir, "plain"), filepath.Join(dir, "counted"), filepath.Join(dir, "log")}
	must.Do(errors.Join(os.Mkdir(p.plain, 0o700), os.Mkdir(p.counted, 0o700), os.WriteFile(p.log, nil, 0o600)))
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			for _, v := range []string{"", "-nft", "-legacy"} {
				name := family + v + suffix
				behind := family + cmp.Or(v, "-"+variant) + suffix
				path := must.Get(exec.LookPath(behind))
				script := fmt.Sprintf("#!/bin/sh\necho %s >>%s\nexec %s \"$@\"\n", behind, p.log, path)
				must.Do(os.Symlink(path, filepath.Join(p.plain, name)))
				must.Do(os.WriteFile(filepath.Join(p.counted, name), []byte(script), 0o700))
			}
		}
	}
	return p
}

func (p firewallPrograms) remove() { _ = os.RemoveAll(p.dir) }

func (p firewallPrograms) count() int { return bytes.Count(must.Get(os.ReadFile(p.log)), []byte("\n")) }
