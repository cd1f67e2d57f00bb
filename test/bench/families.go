// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

// podNetwork6 is the IPv6 pod network of this measure: 65,536 subnets of /64.
const podNetwork6 = "fd00:5::/48"

// measureFamilies compares cold starts with IPv4, with IPv6 and with both. They
// alternate.
func (r *runner) measureFamilies(ctx context.Context) error {
	const group = "vxlan, cold start"
	v4 := []prefix.Family{prefix.IPv4}
	v6 := []prefix.Family{prefix.IPv6}
	for range r.rounds {
		took := map[string]time.Duration{}
		for _, c := range []struct {
			name     string
			families []prefix.Family
		}{{"IPv4", v4}, {"IPv6", v6}, {"dual stack", slices.Concat(v4, v6)}} {
			d, err := r.familyRound(ctx, c.families)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			took[c.name] = d
			r.report.add(group, "exec to all programmed, "+c.name, r.large, "ms", ms(d))
		}
		r.report.add(group, "exec to all programmed, IPv6 / IPv4", r.large, "×", float64(took["IPv6"])/float64(took["IPv4"]))
		r.report.add(group, "exec to all programmed, dual stack / IPv4", r.large, "×", float64(took["dual stack"])/float64(took["IPv4"]), 1.6)
	}
	return nil
}

// familyRound starts the daemon on a new host, and returns the time from exec until the kernel
// has the routes to a sample of the peers. It returns an error unless all routes exist shortly
// after.
func (r *runner) familyRound(ctx context.Context, families []prefix.Family) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	network := map[string]any{"EnableIPv4": false, "Backend": map[string]any{"Type": "vxlan"}}
	for _, f := range families {
		if f == prefix.IPv4 {
			network["EnableIPv4"] = true
			network["Network"] = podNetwork
			network["SubnetLen"] = 24
			network["SubnetMin"] = ownSubnets
		} else {
			network["EnableIPv6"] = true
			network["IPv6Network"] = podNetwork6
			network["IPv6SubnetMin"] = "fd00:5:0:f000::"
		}
	}

	config, err := json.Marshal(network)
	if err != nil {
		return 0, err
	}
	l, err := lab.New(ctx, lab.Config{Hosts: 1, Families: families, Network: config, Flanneld: r.flanneld})
	if err != nil {
		return 0, err
	}
	defer l.Close()
	subnets, err := putFamilyPeers(ctx, l, r.large, families)
	if err != nil {
		return 0, err
	}
	h := l.Host(1)
	began := time.Now()
	d, err := h.StartFlanneld(ctx, lab.FlanneldOptions{})
	if err != nil {
		return 0, err
	}
	var took time.Duration
	err = h.Do(ctx, func() error {
		took, err = awaitRoutes(ctx, subnets, began)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, d.Log())
	}
	return took, checkRoutes(ctx, h, subnets)
}

// putFamilyPeers puts the leases of n peers into the store, and returns their subnets
// in all families.
func putFamilyPeers(ctx context.Context, l *lab.Lab, n int, families []prefix.Family) (subnets []netip.Prefix, err error) {
	c, err := l.Etcd().Client(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var ops []clientv3.Op
	for _, p := range makePeers(n) {
		data := p.vtep(1)
		key := "0.0.0.0-0"
		lease := map[string]any{"PublicIP": "0.0.0.0", "PublicIPv6": nil, "BackendType": "vxlan"}
		for _, f := range families {
			if f == prefix.IPv4 {
				key = fmt.Sprintf("%s-%d", p.subnet.Addr(), p.subnet.Bits())
				lease["PublicIP"] = p.ip
				lease["BackendData"] = data
				subnets = append(subnets, p.subnet)
				continue
			}
			s := p.subnet6()
			key += fmt.Sprintf("&%s-%d", s.Addr(), s.Bits())
			lease["PublicIPv6"] = p.ip6()
			lease["BackendV6Data"] = data
			subnets = append(subnets, s)
		}

		value, err := json.Marshal(lease)
		if err != nil {
			return nil, err
		}
		ops = append(ops, clientv3.OpPut(etcdPrefix+"/subnets/"+key, string(value)))
	}

	for some := range slices.Chunk(ops, txnOps) {
		if _, err := c.Txn(ctx).Then(some...).Commit(); err != nil {
			return nil, fmt.Errorf("write leases: %w", err)
		}
	}
	return subnets, nil
}

// awaitRoutes polls until the routes to a sample of the subnets exist, and returns the
// time since began. It must run in the network namespace of the host. See samples.
func awaitRoutes(ctx context.Context, subnets []netip.Prefix, began time.Time) (time.Duration, error) {
	r, err := openRTNL()
	if err != nil {
		return 0, err
	}
	defer r.close()
	every := unix.NsecToTimespec(int64(pollEvery))
	for sample := 0; sample < len(subnets); {
		if ctx.Err() != nil {
			return 0, fmt.Errorf("wait for the route to %s: %w", subnets[sample], context.Cause(ctx))
		}
		found, err := r.hasRoute(subnets[sample])
		if err != nil {
			return 0, err
		}
		if found {
			sample += max(1, len(subnets)/samples)
			continue
		}
		_ = unix.Nanosleep(&every, nil)
	}
	return time.Since(began), nil
}

// checkRoutes waits a short time until the routes to all subnets exist, also those
// that were not in the sample. It returns an error if one is still missing then.
func checkRoutes(ctx context.Context, h *lab.Host, subnets []netip.Prefix) error {
	missing := 0
	for range 100 {
		missing = 0
		err := h.Netlink(ctx, func(nl *netlink.Handle) error {
			have := map[netip.Prefix]bool{}
			for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
				routes, err := nl.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
				if err != nil {
					return fmt.Errorf("list routes of %s: %w", h.Name(), err)
				}
				for _, route := range routes {
					if route.Dst == nil {
						continue
					}
					addr, _ := netip.AddrFromSlice(route.Dst.IP)
					bits, _ := route.Dst.Mask.Size()
					have[netip.PrefixFrom(addr.Unmap(), bits)] = true
				}
			}

			for _, s := range subnets {
				if !have[s] {
					missing++
				}
			}
			return nil
		})
		if err != nil || missing == 0 {
			return err
		}
		if err := wait.For(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s has no route to %d of %d subnets", h.Name(), missing, len(subnets))
}
