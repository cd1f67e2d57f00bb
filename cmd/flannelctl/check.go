// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/status"
)

// Limits of a check.
const (
	checkTimeout = 2 * time.Second // time to wait for an answer
	checkAtOnce  = 32              // number of peers that are checked at the same time
	smallPacket  = 84              // bytes
)

// verdict is the result of a check of one family of one peer.
type verdict struct {
	Subnet   netip.Prefix `json:"subnet"`
	PublicIP netip.Addr   `json:"publicIP"`
	OK       bool         `json:"ok"`
	RTT      float64      `json:"rttMilliseconds,omitempty"`
	// Broken is the part of the path that does not work: underlay, network, mtu or
	// checksum. It is empty if OK is false but the check found no address to try.
	Broken string `json:"broken,omitempty"`
	Advice string `json:"advice,omitempty"`
}

func (v verdict) result() string {
	if v.OK {
		return "ok"
	}
	return cmp.Or(v.Broken, "unknown")
}

func newCheckCommand() *cobra.Command {
	var (
		network *string
		out     output
		socket  string
		only    []string
	)
	cmd := &cobra.Command{
		Use: "check", Short: "Check the path from this host to every peer, and name the broken part", Args: cobra.NoArgs,
		Long: `Sends a few packets to every peer that this host's flanneld knows: to its public
address, to its address in the network, to that address with packets of the full
MTU that must not be fragmented, and over a TCP connection. The output names the
first step that fails and where to look. The exit code is 1 if a step fails.

It needs root. The address in the network is that of the tunnel device (10.5.7.0 of
10.5.7.0/24). With host-gw, alloc and extension, which have no device, it is that
of the pods' bridge (10.5.7.1), which exists only if the host has pods.`,
		Example: "  flannelctl check\n  flannelctl check --peer 192.0.2.12 -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			peers, err := parsePeers(only)
			if err != nil {
				return err
			}
			r, err := fetchOne(cmd.Context(), status.Client(socket), "http://flanneld", *network)
			if err != nil {
				return err
			}
			return check(cmd, r, peers, out)
		},
	}
	out.addTo(cmd)
	network = addNetworkTo(cmd)
	cmd.Flags().StringVar(&socket, "socket", status.SocketPath("/run/flannel/subnet.env"), "local socket of the daemon")
	cmd.Flags().StringSliceVar(&only, "peer", nil, "check only these peers, by public address or subnet")
	return cmd
}

// parsePeers parses the values of --peer. An address becomes a prefix of full length.
func parsePeers(texts []string) ([]netip.Prefix, error) {
	var peers []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if a, e := netip.ParseAddr(text); e == nil && a.Zone() == "" {
			p, err = prefix.Host(a.Unmap()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("--peer %q is invalid: expected the public address or the subnet of a peer", text)
		}
		peers = append(peers, p.Masked())
	}
	return peers, nil
}

func check(cmd *cobra.Command, r status.Report, only []netip.Prefix, out output) error {
	var (
		mu       sync.Mutex
		verdicts = []verdict{} // not nil, so that JSON contains [] if there is no peer
		broken   int
	)
	group, ctx := errgroup.WithContext(cmd.Context())
	group.SetLimit(checkAtOnce)
	for _, p := range r.Peers {
		if p.State == status.Refused {
			continue
		}
		for i, s := range p.Subnets {
			if !chosen(only, s, p.PublicIPs[i]) {
				continue
			}
			group.Go(func() error {
				v := probe(ctx, s, p.PublicIPs[i], r.Network)
				mu.Lock()
				defer mu.Unlock()
				verdicts = append(verdicts, v)
				if v.Broken != "" {
					broken++
				}
				return ctx.Err()
			})
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	sortBySubnet(verdicts)
	err := out.print(cmd.OutOrStdout(), verdicts, func(w io.Writer) {
		fmt.Fprintln(w, "SUBNET\tPUBLIC IP\tRESULT\tRTT\tADVICE")
		for _, v := range verdicts {
			rtt := "-"
			if v.RTT > 0 {
				rtt = fmt.Sprintf("%.2f ms", v.RTT)
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", v.Subnet, v.PublicIP, v.result(), rtt, v.Advice)
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

func chosen(only []netip.Prefix, s netip.Prefix, public netip.Addr) bool {
	return len(only) == 0 || slices.Contains(only, s.Masked()) || slices.Contains(only, prefix.Host(public))
}

// probe tries the parts of the path to a peer, from the outside to the inside.
func probe(ctx context.Context, s netip.Prefix, public netip.Addr, n status.Network) verdict {
	v := verdict{Subnet: s, PublicIP: public}
	inner := end(n, s)
	echo := func(dst netip.Addr, size int, whole bool) (time.Duration, error) {
		var rtt time.Duration
		var err error
		for range 2 { // the first packet may wait for neighbour resolution
			rtt, err = ping.Ping(ctx, dst, ping.Options{Size: size, DontFragment: whole, Timeout: checkTimeout})
			if err == nil {
				break
			}
		}
		return rtt, err
	}
	fail := func(leg string, err error, advice string) verdict {
		v.Broken, v.Advice = leg, fmt.Sprintf("%s (%v)", advice, err)
		return v
	}
	_, outerErr := echo(public, smallPacket, false)
	rtt, err := echo(inner, smallPacket, false)
	switch {
	case err != nil && outerErr != nil:
		return fail("underlay", outerErr, public.String()+" does not answer either: check the host and the path to it")
	case err != nil && len(n.Devices) == 0:
		return fail("", err, fmt.Sprintf("the host answers, %s does not: no pods have a bridge there yet, a firewall drops packets to them, or a router or cloud in between drops packets of pods (source/destination check)", inner))
	case err != nil:
		return fail("network", err, fmt.Sprintf("the host answers, its end of the network does not: a firewall that drops the backend's packets (%s), or flanneld there", carried(n)))
	}
	if _, err := echo(inner, n.MTU, true); err != nil {
		return fail("mtu", err, fmt.Sprintf("small packets pass, those of %d bytes do not: the underlay's MTU is smaller than that of its interface: set the interface's MTU, or with vxlan and wireguard Backend.MTU", n.MTU))
	}
	if err := knock(ctx, inner); err != nil {
		return fail("checksum", err, `pings pass, TCP does not: a firewall drops it, or a network card or kernel corrupts checksums: with vxlan try "ChecksumOffload": "off"`)
	}
	v.OK, v.RTT = true, float64(rtt)/float64(time.Millisecond)
	return v
}

// end returns the address of a subnet's host in the network: that of its tunnel device
// or, with a backend without a device, that of the pods' bridge.
func end(n status.Network, s netip.Prefix) netip.Addr {
	if len(n.Devices) == 0 {
		return prefix.First(s)
	}
	return s.Masked().Addr()
}

// carried describes the packets that a firewall must let through.
func carried(n status.Network) string {
	if len(n.Ports) == 0 {
		return n.BackendType
	}
	return n.BackendType + ": UDP " + strings.Trim(fmt.Sprint(n.Ports), "[]")
}

// knock opens a TCP connection. A refusal by the host or by a firewall counts as an
// answer. Only silence is a failure.
func knock(ctx context.Context, dst netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", netip.AddrPortFrom(dst, 1).String())
	if err == nil {
		return conn.Close()
	}
	for _, answer := range []error{syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EACCES} {
		if errors.Is(err, answer) {
			return nil
		}
	}
	return err
}

func sortBySubnet(verdicts []verdict) {
	slices.SortFunc(verdicts, func(a, b verdict) int { return a.Subnet.Compare(b.Subnet) })
}
