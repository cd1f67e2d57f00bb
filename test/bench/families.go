// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// podNetwork6 is the IPv6 pod network of this measure: 65,536 subnets of /64.
const podNetwork6 = "fd00:5::/48"

func (r *runner) measureFamilies(ctx context.Context) {
	const group = "vxlan, cold start"
	v4 := []prefix.Family{prefix.IPv4}
	v6 := []prefix.Family{prefix.IPv6}
	for range r.rounds {
		took := map[string]time.Duration{}
		for _, c := range []struct {
			name     string
			families []prefix.Family
		}{{"IPv4", v4}, {"IPv6", v6}, {"dual stack", slices.Concat(v4, v6)}} {
			d := r.familyRound(ctx, c.families)
			took[c.name] = d
			r.report.add(group, "exec to all programmed, "+c.name, r.large, "ms", ms(d))
		}
		r.report.add(group, "exec to all programmed, IPv6 / IPv4", r.large, "×", float64(took["IPv6"])/float64(took["IPv4"]))
		r.report.add(group, "exec to all programmed, dual stack / IPv4", r.large, "×", float64(took["dual stack"])/float64(took["IPv4"]), 1.6)
	}
}

// familyRound starts the daemon on a new host, and returns the time from exec until the kernel
// has the routes to a sample of the peers. It returns an error unless all routes exist shortly
// after.
func (r *runner) familyRound(ctx context.Context, families []prefix.Family) (took time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	network := map[string]any{"EnableIPv4": false, "Backend": map[string]any{"Type": "vxlan"}}
	for _, f := range families {
		if f == prefix.IPv4 {
			maps.Copy(network, map[string]any{"EnableIPv4": true, "Network": podNetwork, "SubnetLen": 24, "SubnetMin": ownSubnets})
		} else {
			maps.Copy(network, map[string]any{"EnableIPv6": true, "IPv6Network": podNetwork6, "IPv6SubnetMin": "fd00:5:0:f000::"})
		}
	}

	l := must.Get(lab.New(ctx, lab.Config{Hosts: 1, Families: families, Network: json.RawMessage(marshal(network)), Flanneld: r.flanneld}))
	defer l.Close()
	subnets := putFamilyPeers(ctx, l, r.large, families)
	h := l.Host(1)
	began := time.Now()
	d := must.Get(h.StartFlanneld(ctx, lab.FlanneldOptions{}))
	withRTNL(ctx, h, func(rt *rtnl) {
		for sample := 0; sample < len(subnets); sample += max(1, len(subnets)/samples) {
			for ; !rt.hasRoute(subnets[sample]); nap() {
				if ctx.Err() != nil {
					must.Fail("wait for the route to %s: %w: %s", subnets[sample], context.Cause(ctx), d.Log())
				}
			}
		}
		took = time.Since(began)
	})
	checkRoutes(ctx, h, subnets)
	return took
}

func putFamilyPeers(ctx context.Context, l *lab.Lab, n int, families []prefix.Family) (subnets []netip.Prefix) {
	c := must.Get(l.Etcd().Client(ctx))
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

		ops = append(ops, clientv3.OpPut(etcdPrefix+"/subnets/"+key, marshal(lease)))
	}
	write(ctx, c, ops)
	return subnets
}

// checkRoutes waits a short time until the routes to all subnets exist, also those
// that were not in the sample. It ends the measure if one is still missing then.
func checkRoutes(ctx context.Context, h *lab.Host, subnets []netip.Prefix) {
	missing := slices.Clone(subnets)
	for range 100 {
		have := map[netip.Prefix]bool{}
		for _, route := range must.Get(h.Routes(ctx)) {
			have[route.Dst] = true
		}
		missing = slices.DeleteFunc(missing, func(s netip.Prefix) bool { return have[s] })
		if len(missing) == 0 {
			return
		}
		pause(ctx, 10*time.Millisecond)
	}
	must.Fail("%s has no route to %d of %d subnets", h.Name(), len(missing), len(subnets))
}
