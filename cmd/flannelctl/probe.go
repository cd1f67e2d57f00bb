// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/probe/ping"
)

// reach is what passes from a pod to a target.
type reach struct {
	To string `json:"to"`
	paths.Verdict
}

// newProbeCommand returns the program of the pods of check --pod and of connectivity test.
func newProbeCommand() *cobra.Command {
	var port uint16
	cmd := &cobra.Command{
		Use: "probe [TARGET]...", Short: "Try to reach targets from the pod of a check", Hidden: true,
		Long: `Sends small and full-size packets to each target, and prints the results as JSON. A
target is an address, an address with a TCP port, or gateway. Without arguments it reads the
targets from standard input, until its end. It needs CAP_NET_RAW. With --listen it only accepts
connections, until a signal.`,
		Example: "  flannelctl probe gateway 10.5.7.1 10.96.0.1:443",
		RunE: func(cmd *cobra.Command, args []string) error {
			if port != 0 {
				return listen(cmd.Context(), port)
			}
			if len(args) == 0 {
				text, err := io.ReadAll(cmd.InOrStdin())
				if err != nil {
					return err
				}
				args = strings.Fields(string(text))
			}

			if i := slices.Index(args, "gateway"); i >= 0 {
				own, err := gateways()
				if err != nil {
					return err
				}
				args = slices.Concat(args[:i], own, args[i+1:])
			}
			targets, err := parseTargets(args)
			if err != nil {
				return err
			}
			results, err := probe(cmd, targets)
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(results)
		},
	}
	cmd.Flags().Uint16Var(&port, "listen", 0, "accept connections to this TCP port")
	return cmd
}

// listen accepts connections and closes them until ctx ends.
func listen(ctx context.Context, port uint16) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", fmt.Sprintf(":%d", port))
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		_ = conn.Close()
	}
}

// gateways returns the gateways of a pod: the first addresses of the subnets in which it has an address.
func gateways() (all []string, err error) {
	eth0, err := net.InterfaceByName(podInterface)
	if err != nil {
		return nil, err
	}
	addrs, err := eth0.Addrs()
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() {
			all = append(all, prefix.First(p.Masked()).String())
		}
	}
	return all, err
}

func parseTargets(texts []string) ([]paths.Target, error) {
	var targets []paths.Target
	for _, text := range texts {
		t, err := paths.ParseTarget(text)
		if err != nil {
			return nil, err
		}
		targets = append(targets, t)
	}
	return targets, nil
}

// podInterface is the interface of pods. All runtimes of Kubernetes give it this name.
const podInterface = "eth0"

// probe tries all targets, and returns the results in the order of the targets.
func probe(cmd *cobra.Command, targets []paths.Target) ([]reach, error) {
	eth0, err := net.InterfaceByName(podInterface)
	if err != nil {
		return nil, err
	}
	pinger := ping.NewPinger()
	defer pinger.Close()

	results := make([]reach, len(targets))
	group, ctx := errgroup.WithContext(cmd.Context())
	group.SetLimit(checkAtOnce)
	for i, t := range targets {
		group.Go(func() error {
			results[i] = reach{t.String(), certain(paths.Reach(ctx, pinger, t, eth0.MTU))}
			return ctx.Err()
		})
	}
	return results, group.Wait()
}
