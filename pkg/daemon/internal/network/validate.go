// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// lookupTimeout limits the lookup of the names of etcd endpoints. The connection to etcd has looked them up
// before, so they are usually cached.
const lookupTimeout = time.Second

// CheckRanges returns an error if a host could be given a subnet of cfg that contains an address of this host
// or of etcd, because routes to that subnet would cut the host off. It ignores addresses that are in the
// ranges of used as well. used is the configuration in use, or zero.
func CheckRanges(ctx context.Context, cfg, used subnet.Config, iface underlay.Interface, etcdEndpoints []string) error {
	var own []netip.Addr
	for _, a := range iface.Addrs {
		own = append(own, a.Local, a.Public)
	}
	if err := cfg.Spares(used, "this host", own...); err != nil {
		return err
	}
	return cfg.Spares(used, "etcd", endpointAddrs(ctx, etcdEndpoints)...)
}

// endpointAddrs returns the addresses of etcd endpoints. It leaves out names that cannot be looked up.
func endpointAddrs(ctx context.Context, endpoints []string) (addrs []netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	for _, e := range endpoints {
		if !strings.Contains(e, "://") { // etcd's client allows HOST:PORT too
			e = "http://" + e
		}
		u, err := url.Parse(e)
		if err != nil {
			continue
		}
		found, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname()) // returns an address as it is
		for _, a := range found {
			addrs = append(addrs, a.Unmap())
		}
	}
	return addrs
}

// checkRanges is CheckRanges with the interface iface and the options of this network. With Kubernetes it
// returns nil, because the API assigns the subnets.
func (n *Network) checkRanges(ctx context.Context, cfg, used subnet.Config, iface underlay.Interface) error {
	if n.opts.KubeSubnetMgr || slices.Equal(cfg.Networks, used.Networks) {
		return nil
	}
	return CheckRanges(ctx, cfg, used, iface, n.opts.EtcdEndpoints)
}

// usualMTU is the MTU of most external interfaces in bytes.
const usualMTU = 1500

// Validate parses a network configuration and returns it with its backend, for a host whose
// interface has the usual MTU. network is the name of the network if there are several, and otherwise
// empty. pools is set if flanneld assigns subnets from the networks, as with etcd. warnings contains
// one line for each warning, including those of cfg. It may be set together with an error.
func Validate(network string, text []byte, pools bool, backends backend.Registry) (cfg subnet.Config, be backend.Backend, warnings []string, err error) {
	if cfg, err = subnet.ParseConfig(text); err != nil {
		return cfg, nil, cfg.Warnings, err
	}
	if _, err := cfg.Pools(); pools && err != nil {
		return cfg, nil, cfg.Warnings, err
	}
	be, more, err := backends.New(backend.Env{Network: network, Config: cfg, Underlay: underlay.Interface{Name: "any", MTU: usualMTU}})
	return cfg, be, slices.Concat(cfg.Warnings, more), err
}
