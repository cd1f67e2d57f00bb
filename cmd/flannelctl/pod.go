// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/doctor/linux"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// podFlags are the flags of check --pod.
type podFlags struct {
	use                bool
	confDir, pluginDir string
	targets            []string
}

func (f *podFlags) addTo(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.use, "pod", false, "send from a pod that exists for a moment")
	cmd.Flags().StringVar(&f.confDir, "cni-conf-dir", "/etc/cni/net.d", "with --pod: folder of the CNI configuration")
	cmd.Flags().StringVar(&f.pluginDir, "cni-bin-dir", "/opt/cni/bin", "with --pod: folder of the CNI plugins")
	cmd.Flags().StringSliceVar(&f.targets, "target", nil, "with --pod: reach these too: addresses of pods, or ADDRESS:PORT of services (TCP)")
}

// parse returns the targets.
func (f *podFlags) parse() ([]paths.Target, error) {
	if len(f.targets) > 0 && !f.use {
		return nil, openError{errors.New("--target needs --pod: this host itself only checks peers")}
	}
	targets, err := parseTargets(f.targets)
	if err != nil {
		return nil, openError{fmt.Errorf("--target %w", err)}
	}
	return targets, nil
}

// podTimeout limits the time to add or delete a pod.
const podTimeout = 30 * time.Second

// errCannotAsk means that nothing is known about the network.
var errCannotAsk = openError{errors.New("cannot check from a pod")}

// interrupted returns the end of ctx in place of an error that it may have caused.
func interrupted(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	return cmp.Or(ctx.Err(), err)
}

// pod is a process in a network namespace of its own, which CNI plugins attach.
type pod struct {
	// namespace keeps the namespace until the plugins have removed its interfaces, even if the process has ended. The
	// kernel removes both when this program ends, even if it is killed.
	namespace *os.File

	process *exec.Cmd
	targets io.WriteCloser // standard input
	results *bytes.Buffer  // standard output
	failure *bytes.Buffer  // standard error

	plugins *libcni.CNIConfig
	network *libcni.NetworkConfigList
	runtime *libcni.RuntimeConf
}

// startPod starts the process of a pod. The caller must end it.
func (f podFlags) startPod(ctx context.Context, subnets []netip.Prefix) (*pod, error) {
	network, err := f.network(subnets)
	program, failed := os.Executable()
	if err = cmp.Or(err, failed); err != nil {
		return nil, err
	}

	p := &pod{results: &bytes.Buffer{}, failure: &bytes.Buffer{}, network: network, plugins: libcni.NewCNIConfig([]string{f.pluginDir}, nil)}
	p.process = exec.CommandContext(ctx, program, "probe") //nolint:gosec // it is this program
	p.process.Stdout = p.results
	p.process.Stderr = p.failure
	p.process.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if p.targets, err = p.process.StdinPipe(); err == nil {
		err = p.process.Start()
	}
	if errors.Is(err, syscall.EPERM) {
		return nil, fmt.Errorf("%w: only root may make a network namespace", errCannotAsk)
	}
	if err != nil {
		return nil, err
	}

	if p.namespace, err = os.Open(fmt.Sprintf("/proc/%d/ns/net", p.process.Process.Pid)); err != nil {
		return nil, oneline.Join(err, p.process.Cancel(), p.process.Wait())
	}
	p.runtime = &libcni.RuntimeConf{
		ContainerID: "flannelctl-" + rand.Text(), IfName: podInterface,
		NetNS: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.namespace.Fd()),
	}
	return p, nil
}

// network returns the first CNI configuration that gives pods addresses of these subnets, or else the first one.
func (f podFlags) network(subnets []netip.Prefix) (*libcni.NetworkConfigList, error) {
	files, err := libcni.ConfFiles(f.confDir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errCannotAsk, err)
	}
	slices.Sort(files)
	var first *libcni.NetworkConfigList
	for _, path := range files {
		list, err := load(path)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", errCannotAsk, path, err)
		}
		if slices.ContainsFunc(list.Plugins, func(p *libcni.PluginConfig) bool { return serves(p, subnets) }) {
			return list, nil
		}
		first = cmp.Or(first, list)
	}
	if first == nil {
		return nil, fmt.Errorf("%w: %s has no CNI configuration: name the folder with --cni-conf-dir", errCannotAsk, f.confDir)
	}
	return first, nil
}

// load reads a list of plugins, or a file with one plugin.
func load(path string) (*libcni.NetworkConfigList, error) {
	if strings.HasSuffix(path, ".conflist") {
		return libcni.NetworkConfFromFile(path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	one, err := libcni.NetworkPluginConfFromBytes(text)
	if err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromBytes(fmt.Appendf(nil, `{"name":%q,"cniVersion":%q,"plugins":[%s]}`, one.Network.Name, one.Network.CNIVersion, text))
}

// serves reports whether a plugin is flannel's and reads the file with one of these subnets.
func serves(p *libcni.PluginConfig, subnets []netip.Prefix) bool {
	conf := struct{ SubnetFile string }{"/run/flannel/subnet.env"}
	if p.Network.Type != "flannel" || json.Unmarshal(p.Bytes, &conf) != nil {
		return false
	}
	file, err := subnetfile.Load(conf.SubnetFile)
	return err == nil && slices.ContainsFunc(file.Entries, func(e subnetfile.Entry) bool { return slices.Contains(subnets, e.Subnet.Masked()) })
}

// attach adds the pod to the network, and returns its addresses with their gateways.
func (p *pod) attach(ctx context.Context) (map[prefix.Family]attachment, error) {
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	raw, err := p.plugins.AddNetworkList(ctx, p.network, p.runtime)
	if err != nil {
		return nil, fmt.Errorf("the CNI configuration %s gives a pod no network: %s", p.network.Name, oneline.Collapse(err.Error()))
	}
	result, err := current.NewResultFromResult(raw)
	if err != nil {
		return nil, err
	}

	attached := map[prefix.Family]attachment{}
	for _, ip := range result.IPs {
		own, err := netip.ParsePrefix(ip.Address.String())
		if err != nil {
			return nil, err
		}
		gateway, ok := netip.AddrFromSlice(ip.Gateway)
		if !ok {
			gateway = prefix.First(own.Masked())
		}
		attached[prefix.FamilyOf(own.Addr())] = attachment{own.Addr(), gateway.Unmap()}
	}
	return attached, nil
}

// attachment is an address of a pod, and its gateway: the address of the bridge on this host.
type attachment struct{ own, gateway netip.Addr }

// probe lets the pod try all targets.
func (p *pod) probe(targets []string) ([]reach, error) {
	_, err := io.WriteString(p.targets, strings.Join(targets, "\n"))
	if err = oneline.Join(err, p.targets.Close(), p.process.Wait()); err != nil {
		return nil, fmt.Errorf("probe from the pod: %w: %s", err, oneline.Collapse(p.failure.String()))
	}
	var results []reach
	return results, json.Unmarshal(p.results.Bytes(), &results)
}

// end removes the pod, even if ctx has ended.
func (p *pod) end(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), podTimeout)
	defer cancel()
	err := p.plugins.DelNetworkList(ctx, p.network, p.runtime)
	_ = p.process.Cancel()
	_ = p.process.Wait()
	_ = p.namespace.Close()
	if err != nil {
		return fmt.Errorf("remove the pod: %s", oneline.Collapse(err.Error()))
	}
	return nil
}

// half is a part of the way of a packet from a pod.
type half string

const (
	toGateway half = "gateway" // from the pod to the bridge on its host
	outside   half = "outside" // from there to the peer
	toTarget  half = "target"  // from there to an address of the command line
)

// leg is the result of a check from a pod.
type leg struct {
	From netip.Addr `json:"from"`
	Half half       `json:"half"`
	reach

	path    paths.Path // to the peer, or only the subnet of the peer that has the target
	end     netip.Addr // the peer's address in the network, if it has one besides the bridge
	settled bool       // nothing is sent
}

// podCheck is a check from a pod.
type podCheck struct {
	report   status.Report
	findings []doctor.Finding // about this host
	legs     []leg
}

// checkPod sends from a pod that exists while it runs.
func checkPod(cmd *cobra.Command, r status.Report, only []netip.Prefix, targets []paths.Target, f podFlags, out output) (err error) {
	ctx := cmd.Context()
	p, err := f.startPod(ctx, r.Lease.Subnets)
	if err != nil {
		return err
	}
	defer func() { err = oneline.Join(interrupted(ctx, err), p.end(ctx)) }()

	attached, err := p.attach(ctx)
	c := podCheck{report: r, findings: doctor.Examine(linux.Gather(ctx, r))}
	if err != nil {
		return c.explain(err)
	}
	c.plan(attached, only, targets)
	var all []string
	for _, l := range c.legs {
		if !l.settled {
			all = append(all, l.To)
		}
		if l.end.IsValid() {
			all = append(all, l.end.String())
		}
	}

	results, err := p.probe(all)
	if err != nil {
		return err
	}
	answers := map[string]reach{}
	for _, a := range results {
		answers[a.To] = a
	}
	if err := c.judge(ctx, answers); err != nil {
		return err
	}
	return c.print(cmd.OutOrStdout(), out)
}

// explain adds the cause that is known to an error.
func (c *podCheck) explain(err error) error {
	for _, f := range c.findings {
		if f.Word == "bridge" {
			return fmt.Errorf("%w: %s; fix: %s", err, f.Problem, f.Fix)
		}
	}
	return err
}

// plan adds the legs: to the gateways, to the peers and to the targets.
func (c *podCheck) plan(attached map[prefix.Family]attachment, only []netip.Prefix, targets []paths.Target) {
	for _, s := range c.report.Lease.Subnets {
		a, ok := attached[prefix.FamilyOf(s.Addr())]
		l := leg{From: a.own, Half: toGateway, reach: reach{To: a.gateway.String()}}
		if !ok || !s.Contains(a.own) {
			l.settled = true
			l.reach = reach{s.String(), paths.Verdict{Broken: "address", Advice: fmt.Sprintf("the CNI configuration gives a pod no address of %s", s)}}
		}
		c.legs = append(c.legs, l)
	}

	for _, p := range c.report.Peers {
		for i, s := range p.Subnets {
			a, ok := attached[prefix.FamilyOf(s.Addr())]
			if !ok || !chosen(only, s, p.PublicIPs[i]) {
				continue
			}
			l := leg{From: a.own, Half: outside, reach: reach{To: prefix.First(s).String()}, path: paths.Path{Subnet: s, PublicIP: p.PublicIPs[i]}}
			l.settled = !p.State.Served()
			if len(c.report.Network.Devices) > 0 && !l.settled {
				l.end = s.Masked().Addr()
			}
			c.legs = append(c.legs, l)
		}
	}
	slices.SortStableFunc(c.legs, func(a, b leg) int { return a.path.Subnet.Compare(b.path.Subnet) })

	for _, t := range targets {
		l := leg{From: attached[prefix.FamilyOf(t.Addr)].own, Half: toTarget, reach: reach{To: t.String()}}
		for _, p := range c.report.Peers {
			for _, s := range p.Subnets {
				if s.Contains(t.Addr) {
					l.path.Subnet = s
				}
			}
		}
		c.legs = append(c.legs, l)
	}
}

// judge completes the legs with the answers, and names the causes of failures.
func (c *podCheck) judge(ctx context.Context, answers map[string]reach) error {
	var group errgroup.Group
	group.SetLimit(checkAtOnce)
	passed := map[netip.Addr]bool{} // by address of the pod: some packet has passed the gateway
	for i := range c.legs {
		l := &c.legs[i]
		if !l.settled {
			l.reach = answers[l.To]
		}
		passed[l.From] = passed[l.From] || l.Half != toGateway && (l.OK || answers[l.end.String()].OK)
	}
	ended := map[netip.Addr]bool{} // no packet reaches the gateway
	for _, l := range c.legs {
		if l.Half == toGateway && !l.OK && l.Broken != paths.MTU && !passed[l.From] {
			ended[l.From] = true
		}
	}

	for i := range c.legs {
		l := &c.legs[i]
		if l.OK && l.Half == outside { // packets in the other direction may be lost
			l.Verdict = because(l.Verdict, l.path.Subnet, !l.settled, c.findings)
			continue
		}
		if l.OK || l.Broken == "address" {
			continue
		}
		group.Go(func() error {
			switch {
			case l.Half == toGateway && l.Broken != paths.MTU && passed[l.From]:
				l.Broken = ""
				l.Advice = "it does not answer, but packets pass through it"
			case l.Half == toGateway:
				c.blameBridge(l)
			case ended[l.From] && !l.settled:
				l.Broken = ""
				l.Advice = "not known, because packets do not reach the gateway"
			default:
				c.blameOutside(ctx, l, answers[l.end.String()])
			}
			return ctx.Err()
		})
	}
	return group.Wait()
}

// blameBridge names the cause that is known why packets do not reach the gateway.
func (c *podCheck) blameBridge(l *leg) {
	for _, f := range c.findings {
		about := len(f.Subnets) == 0 || slices.ContainsFunc(f.Subnets, func(s netip.Prefix) bool {
			return prefix.FamilyOf(s.Addr()) == prefix.FamilyOf(l.From)
		})
		large := l.Broken == paths.MTU
		if about && (f.Word == "mtu") == large && slices.Contains([]string{"bridge", "mtu", "firewall", "rule", "rp_filter", "ipsec"}, f.Word) {
			l.Broken = paths.Part(f.Word)
			l.Advice = f.Problem + "; fix: " + f.Fix
			return
		}
	}
	l.Advice += ": the bridge is down, has another address, or a firewall of this host drops packets of pods to it"
}

// blameOutside names the cause why packets pass the gateway and not the rest of the way. end is the answer of the
// peer's address in the network, if it has one besides the bridge.
func (c *podCheck) blameOutside(ctx context.Context, l *leg, end reach) {
	v := l.Verdict
	switch {
	case l.settled, l.Half == toTarget: // only doctor may know the cause
	case end.OK && l.Broken == paths.Tunnel:
		l.Broken = ""
		l.Advice = fmt.Sprintf("%s answers, %s does not: no pods have a bridge there yet, "+
			"or a firewall there drops packets to it", end.To, l.To)
		return
	default:
		if fromHost := certain(paths.Diagnose(ctx, l.path, pathsOf(c.report))); !fromHost.OK {
			v = fromHost
			break
		}
		v.Advice = "packets of this host pass, those of pods do not: a firewall, rule or route here or there takes them: run flannelctl doctor there (" + l.Advice + ")"
	}

	if l.path.Subnet.IsValid() {
		v = because(v, l.path.Subnet, l.Half == outside && !l.settled, c.findings)
	}
	l.Verdict = v
}

// print shows the legs, and returns an error that names the half of the way that is broken, if one is.
func (c *podCheck) print(w io.Writer, out output) error {
	err := out.print(w, c.legs, func(w io.Writer) {
		t := out.table(w, "POD\tTO\tHALF\tRESULT\tRTT\t+LARGEST\tADVICE")
		for _, l := range c.legs {
			from := "-"
			if l.From.IsValid() {
				from = l.From.String()
			}
			t.row(l.To, from, l.To, l.Half, l.Result(), dash(l.RoundTrip()), number(l.Largest), l.Advice)
		}
	})
	if err != nil {
		return err
	}

	var broken []string
	for _, l := range c.legs {
		if l.Broken != "" {
			broken = append(broken, string(l.Half))
		}
	}
	switch {
	case len(broken) > 0:
		return fmt.Errorf("%d of %d ways of a pod are broken: %s", len(broken), len(c.legs), strings.Join(slices.Compact(broken), ", "))
	case !slices.ContainsFunc(c.legs, func(l leg) bool { return l.Half != toGateway }):
		return errors.New("there is no peer to check")
	}
	return nil
}
