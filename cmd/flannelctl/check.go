// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/doctor/linux"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// checkAtOnce is the maximum number of checks at the same time. Each one checks one family of one
// peer.
const checkAtOnce = 32

// verdict is the result of a check of one family of one peer.
type verdict struct {
	paths.Path
	Peer string `json:"peer,omitempty"` // key of its lease
	// Verdict has in Broken also causes that were found on this host, such as refused or forwarding. Broken is empty if
	// the check cannot tell whether a part is broken.
	paths.Verdict

	unserved bool // nothing is sent
}

func newCheckCommand(h host) *cobra.Command {
	var (
		daemon daemonFlags
		out    output
		only   []string
		failed bool
		pod    podFlags
	)

	cmd := &cobra.Command{
		Use: "check", Short: "Check the path from this host to every peer, and name the broken part", Args: cobra.NoArgs,
		Long: `Sends a few packets to every peer that this host's flanneld knows: to its public
address, to its address in the network, to that address with packets of the full
MTU that must not be fragmented, and over a TCP connection. The output names the
first step that fails and where to look. It also asks the kernel of this host what it
does with packets of pods, like flannelctl doctor. The exit code is 1 if a path is
broken, and 2 if flanneld cannot be asked.

It needs root. The address in the network is that of the tunnel device (10.5.7.0 of
10.5.7.0/24). With host-gw, alloc, aws-vpc, gce, ali-vpc, tencent-vpc and extension, which have no device, it is
that of the pods' bridge (10.5.7.1), which exists only if the host has pods. If only
that does not answer, the result is unknown: the exit code stays 0, and in JSON ok is
false.

With --pod it sends from a pod, which it adds through the CNI configuration of this
host and then removes: first to the gateway, the bridge of this host, then to the
bridge of every peer. The column HALF says how far packets pass.`,
		Example: "  flannelctl check\n  flannelctl check --peer 192.0.2.12 -o json\n  flannelctl check --failed -o name\n  flannelctl check --pod --target 10.5.7.2,10.96.0.1:443",
		RunE: func(cmd *cobra.Command, _ []string) error {
			peers, err := parsePeers(only)
			if err != nil {
				return err
			}
			targets, err := pod.parse()
			if err != nil {
				return err
			}
			r, err := daemon.one(cmd.Context())
			if err != nil {
				return err
			}
			if pod.use {
				return checkPod(cmd, r, peers, targets, pod, out)
			}
			return check(cmd, r, peers, failed, out)
		},
	}

	out.addTo(cmd, "wide", "name")
	daemon.addTo(cmd, h)
	pod.addTo(cmd)
	cmd.Flags().BoolVar(&failed, "failed", false, "print only peers whose result is not ok")
	cmd.Flags().StringSliceVar(&only, "peer", nil, "check only these peers, by public address or subnet")
	completeFrom(cmd, "peer", &daemon, peerNames)
	return cmd
}

// parsePeers parses the values of --peer. An address becomes a prefix of full length. The
// host bits of a prefix are cleared. Any other value is an error.
func parsePeers(texts []string) ([]netip.Prefix, error) {
	var peers []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if a, e := netip.ParseAddr(text); e == nil && a.Zone() == "" {
			p = prefix.Host(a.Unmap())
			err = nil
		}
		if err != nil {
			return nil, openError{fmt.Errorf("--peer %q is invalid: expected the public address or the subnet of a peer", text)}
		}
		peers = append(peers, p.Masked())
	}
	return peers, nil
}

// check prints each verdict as soon as it and those before it are known, because peers that do not answer take seconds.
func check(cmd *cobra.Command, r status.Report, only []netip.Prefix, failed bool, out output) error {
	ctx := cmd.Context()
	verdicts := toCheck(r, only)
	if len(verdicts) == 0 {
		err := out.print(cmd.OutOrStdout(), verdicts, func(io.Writer) {})
		return oneline.Join(err, errors.New("there is no peer to check"))
	}
	facts := linux.Gather(ctx, r)
	findings := doctor.Examine(facts)

	shown := []verdict{} // not nil, so that JSON contains [] if there is none
	show := func(v verdict) { shown = append(shown, v) }
	if out.hasRows() {
		t := out.table(cmd.OutOrStdout(), "SUBNET\tPUBLIC IP\tRESULT\tRTT\t+KEY\t+LARGEST\tADVICE", longest(verdicts)...)
		show = func(v verdict) {
			t.row(v.Subnet.String(), v.Subnet, v.PublicIP, v.Result(), dash(v.RoundTrip()), v.Peer, number(v.Largest), v.Advice)
		}
	}

	broken := 0
	for v := range diagnose(ctx, r, verdicts) {
		if err := ctx.Err(); err != nil {
			return err
		}

		known := findings
		if v.silent() {
			facts.Attached, _ = linux.Attached(r, facts.Bridges) // again, because it has only filters that have dropped packets
			facts.Silent = []netip.Prefix{v.Subnet}
			if len(facts.Attached) > 0 {
				known = doctor.Examine(facts)
			}
		}
		v.Verdict = because(v.Verdict, v.Subnet, !v.unserved, known)
		if v.Broken != "" {
			broken++
		}
		if !failed || !v.OK {
			show(v)
		}
	}

	var err error
	if !out.hasRows() {
		err = out.print(cmd.OutOrStdout(), shown, nil)
	}
	if err == nil && broken > 0 {
		err = fmt.Errorf("%d of %d ways are broken", broken, len(verdicts))
	}
	return err
}

// longest returns the longest cell of each column of a table.
func longest(verdicts []verdict) []string {
	cells := []string{"", "", "forwarding", "999.99 ms", "", "", ""}
	for _, v := range verdicts {
		for i, text := range map[int]string{0: v.Subnet.String(), 1: v.PublicIP.String(), 4: v.Peer} {
			if len(text) > len(cells[i]) {
				cells[i] = text
			}
		}
	}
	return cells
}

// toCheck returns a verdict without a result for each path to the peers in only, or to all if it is empty, sorted by
// subnet.
func toCheck(r status.Report, only []netip.Prefix) []verdict {
	verdicts := []verdict{}
	for _, p := range r.Peers {
		for i, s := range p.Subnets {
			if chosen(only, s, p.PublicIPs[i]) {
				verdicts = append(verdicts, verdict{Path: paths.Path{Subnet: s, PublicIP: p.PublicIPs[i]}, Peer: p.Key, unserved: !p.State.Served()})
			}
		}
	}
	slices.SortFunc(verdicts, func(a, b verdict) int { return a.Subnet.Compare(b.Subnet) })
	return verdicts
}

// diagnose checks paths, and yields their verdicts in the same order. They lack a result for peers that are
// not served, to which nothing is sent, and if ctx ends.
func diagnose(ctx context.Context, r status.Report, verdicts []verdict) iter.Seq[verdict] {
	ways := pathsOf(r)
	results := make([]chan verdict, len(verdicts))
	for i := range results {
		results[i] = make(chan verdict, 1)
	}

	return func(yield func(verdict) bool) {
		ctx, stop := context.WithCancel(ctx)
		var checks sync.WaitGroup
		defer checks.Wait()
		defer stop()
		checks.Go(func() {
			slots := make(chan struct{}, checkAtOnce)
			for i, v := range verdicts {
				slots <- struct{}{}
				checks.Go(func() {
					defer func() { <-slots }()
					if !v.unserved {
						v = v.diagnosed(ctx, ways, r.Paths)
					}
					results[i] <- v
				})
			}
		})
		for _, result := range results {
			if !yield(<-result) {
				return
			}
		}
	}
}

// diagnosed returns the verdict with its result, and with the direction that the daemon has found if the path is broken.
func (v verdict) diagnosed(ctx context.Context, ways paths.Network, found *paths.Outcome) verdict {
	v.Verdict = certain(paths.Diagnose(ctx, v.Path, ways))
	if v.OK {
		return v
	}
	if found != nil {
		for _, p := range found.Worst {
			if p.OneWay && p.Subnet == v.Subnet {
				p.Verdict = v.Verdict
				v.Advice = p.Text()
			}
		}
	}
	if v.Broken == paths.Underlay {
		v.Advice = cmp.Or(linux.Neighbour(v.PublicIP), v.Advice)
	}
	if v.Broken != paths.MTU && v.Broken != paths.Checksum {
		v.Advice = cmp.Or(linux.Twins(ctx, v.PublicIP), v.Advice)
	}
	return v
}

// silent reports whether the host of a peer answers, and its end of the network does not.
func (v verdict) silent() bool { return v.Broken != "" && v.Broken != paths.Underlay }

// because returns the verdict about the path to a subnet with the cause that was found on this host, if there is one, or
// with what may be the cause. A peer whose host is not reached at all keeps its verdict, unless the address of this host is
// the cause. served says that this host serves the peer: a refused one may have the same subnet.
func because(v paths.Verdict, subnet netip.Prefix, served bool, findings []doctor.Finding) paths.Verdict {
	for _, f := range findings {
		if v.Broken == paths.Underlay && f.Word != doctor.Duplicate || served && f.Word == string(status.Refused) {
			continue
		}
		if f.Concerns(subnet) {
			return paths.Verdict{Broken: paths.Part(f.Word), Advice: f.Problem + "; fix: " + f.Fix}
		}
		if f.Word == "" && !v.OK && slices.Contains(f.Subnets, subnet) {
			v.Advice = strings.TrimPrefix(v.Advice+"; or "+f.Problem, "; or ")
		}
	}
	return v
}

func chosen(only []netip.Prefix, s netip.Prefix, public netip.Addr) bool {
	return len(only) == 0 || slices.Contains(only, s.Masked()) || slices.Contains(only, prefix.Host(public))
}

// pathsOf returns the properties of a network that paths.Diagnose needs.
func pathsOf(r status.Report) paths.Network {
	narrow := map[netip.Prefix]int{}
	for _, p := range r.Peers {
		maps.Copy(narrow, p.PathMTU)
	}
	n := r.Network
	return paths.Network{
		BackendType: n.BackendType, MTU: n.MTU, Devices: len(n.Devices) > 0, Ports: n.Ports,
		PathMTU: func(s netip.Prefix) int { return narrow[s] },
	}
}

// certain returns v with only what is known for certain.
func certain(v paths.Verdict) paths.Verdict {
	if v.Broken == paths.Unknown {
		v.Broken = ""
	}
	if !v.OK {
		v.RTT = 0
	}
	return v
}
