// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

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
	Subnet   netip.Prefix `json:"subnet"`
	PublicIP netip.Addr   `json:"publicIP"`
	Peer     string       `json:"peer,omitempty"` // key of its lease
	status.Outcome
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
			return nil, fmt.Errorf("--peer %q is invalid: expected the public address or the subnet of a peer", text)
		}
		peers = append(peers, p.Masked())
	}
	return peers, nil
}

func check(cmd *cobra.Command, r status.Report, only []netip.Prefix, failed bool, out output) error {
	verdicts := checkAll(cmd.Context(), r, only, cmd.ErrOrStderr())
	findings := examine(cmd.Context(), []status.Report{r}, nil, func(status.Report) []netip.Prefix { return silent(verdicts) })
	if err := cmd.Context().Err(); err != nil {
		return err
	}

	broken := 0
	for i, v := range verdicts {
		verdicts[i] = v.because(findings)
		if v.Broken == string(paths.Underlay) {
			verdicts[i].Advice = cmp.Or(linux.Neighbour(v.PublicIP), v.Advice)
		}
		if verdicts[i].Broken != "" {
			broken++
		}
	}
	shown := slices.Clone(verdicts)
	if failed {
		shown = slices.DeleteFunc(shown, func(v verdict) bool { return v.OK })
	}
	err := out.print(cmd.OutOrStdout(), shown, func(w io.Writer) {
		t := out.table(w, "SUBNET\tPUBLIC IP\tRESULT\tRTT\t+KEY\t+LARGEST\tADVICE")
		for _, v := range shown {
			t.row(v.Subnet.String(), v.Subnet, v.PublicIP, v.Result(), dash(v.RoundTrip()), v.Peer, number(v.Largest), v.Advice)
		}
	})

	switch {
	case err != nil:
		return err
	case len(verdicts) == 0:
		return errors.New("there is no peer to check")
	case broken > 0:
		return fmt.Errorf("%d of %d ways are broken", broken, len(verdicts))
	}
	return nil
}

// checkAll checks the paths to the peers in only, or to all if it is empty. The verdicts are sorted by subnet. They lack
// a result for refused peers, to which nothing is sent, and if ctx ends. Because peers that do not answer take seconds,
// checkAll writes a line after each hundred.
func checkAll(ctx context.Context, r status.Report, only []netip.Prefix, progress io.Writer) []verdict {
	var mu sync.Mutex
	verdicts := []verdict{} // not nil, so that JSON contains [] if there is no peer
	ways := pathsOf(r)
	group := errgroup.Group{}
	group.SetLimit(checkAtOnce)
	for _, p := range r.Peers {
		for i, s := range p.Subnets {
			if !chosen(only, s, p.PublicIPs[i]) {
				continue
			}

			group.Go(func() error {
				v := verdict{Subnet: s, PublicIP: p.PublicIPs[i], Peer: p.Key}
				if p.State != status.Refused {
					v.Outcome = outcomeOf(paths.Diagnose(ctx, paths.Path{Subnet: s, PublicIP: p.PublicIPs[i]}, ways))
					v = v.directed(r.Paths)
				}
				mu.Lock()
				defer mu.Unlock()
				verdicts = append(verdicts, v)
				if len(verdicts)%100 == 0 {
					fmt.Fprintln(progress, len(verdicts), "checked")
				}
				return nil
			})
		}
	}
	_ = group.Wait()
	slices.SortFunc(verdicts, func(a, b verdict) int { return a.Subnet.Compare(b.Subnet) })
	return verdicts
}

// silent returns the subnets of peers whose hosts answer, and whose ends of the network do not.
func silent(verdicts []verdict) (subnets []netip.Prefix) {
	for _, v := range verdicts {
		if v.Broken != "" && v.Broken != string(paths.Underlay) {
			subnets = append(subnets, v.Subnet)
		}
	}
	return subnets
}

// directed returns the verdict with the direction that the daemon has found, if the path is broken.
func (v verdict) directed(found *status.Paths) verdict {
	if v.OK || found == nil {
		return v
	}
	for _, p := range found.Worst {
		if p.OneWay && p.Subnet == v.Subnet {
			v.Advice = status.Path{Subnet: p.Subnet, OneWay: true, Outcome: v.Outcome}.Text()
		}
	}
	return v
}

// because returns the verdict with the cause that was found on this host, if there is one, or with what may be the
// cause. A peer whose host is not reached at all keeps its verdict.
func (v verdict) because(findings []doctor.Finding) verdict {
	if v.Broken == string(paths.Underlay) {
		return v
	}
	for _, f := range findings {
		if f.Concerns(v.Subnet) {
			v.Outcome = status.Outcome{Broken: f.Word, Advice: f.Problem + "; fix: " + f.Fix}
			return v
		}
		if f.Word == "" && !v.OK && slices.Contains(f.Subnets, v.Subnet) {
			v.Advice += "; or " + f.Problem
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

// outcomeOf returns an outcome in which Broken may also be a cause that was found on this host, such as refused or
// forwarding. It is empty if the check cannot tell whether a part is broken.
func outcomeOf(v paths.Verdict) status.Outcome {
	o := status.OutcomeOf(v)
	if v.Broken == paths.Unknown {
		o.Broken = ""
	}
	if !v.OK {
		o.RTT = 0
	}
	return o
}
