// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

const (
	networksGroup = "vxlan, several networks"

	manyNetworks = 100
	networkPeers = 10 // number of peers in each network
)

// served is the cost of a daemon that serves one or several networks.
type served struct {
	ready  time.Duration // from exec to /readyz
	cpu    time.Duration // of the process, until then
	memory float64       // RSS in bytes, at rest
	idle   time.Duration // CPU time in a minute at rest
	asked  float64       // number of requests to etcd at rest, during options.atRest
}

// measureNetworks compares a daemon with one network without a name, a daemon with one named
// network, and a daemon with a hundred networks. They alternate.
func (r *runner) measureNetworks(ctx context.Context) {
	const group = networksGroup
	for range max(1, r.rounds/3) { // a round takes minutes, because of the time at rest
		took := map[int]served{}
		for _, n := range []int{0, 1, manyNetworks} {
			took[n] = r.networksRound(ctx, n)
		}

		plain := took[0]
		one := took[1]
		many := took[manyNetworks]
		r.report.add(group, "exec to ready, one network without a name", 1, "ms", ms(plain.ready))
		r.report.add(group, "RSS, one network without a name", 1, "MB", mb(plain.memory))
		r.report.add(group, "exec to ready", 1, "ms", ms(one.ready))
		r.report.add(group, "RSS", 1, "MB", mb(one.memory))
		r.report.add(group, "CPU a minute, at rest", 1, "ms", ms(one.idle))
		r.report.add(group, "exec to ready", manyNetworks, "ms", ms(many.ready), 2000)
		r.report.add(group, "exec to ready, 100 networks / 1", manyNetworks, "×", float64(many.ready)/float64(one.ready))
		r.report.add(group, "CPU until then", manyNetworks, "ms", ms(many.cpu))
		r.report.add(group, "RSS", manyNetworks, "MB", mb(many.memory))
		r.report.add(group, "RSS, 100 networks / 1", manyNetworks, "×", many.memory/one.memory)
		r.report.add(group, "RSS of each further network", manyNetworks, "kB", 1000*mb(many.memory-one.memory)/(manyNetworks-1), 400)
		r.report.add(group, "CPU a minute, at rest", manyNetworks, "ms", ms(many.idle))
		r.report.add(group, "CPU a minute, at rest, of each further network", manyNetworks, "ms", max(0, ms(many.idle-one.idle))/(manyNetworks-1), 1)
		r.report.add(group, "requests to etcd, at rest", manyNetworks, "calls", many.asked, 0)
	}
}

// networksRound starts a daemon with n networks on a new host, and measures it. If n is 0, the
// daemon has one network without a name.
func (r *runner) networksRound(ctx context.Context, n int) (s served) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute+r.atRest)
	defer cancel()
	l := must.Get(lab.New(ctx, lab.Config{Hosts: 1, Flanneld: r.flanneld}))
	defer l.Close()
	subnets := putNetworks(ctx, l, n)
	h := l.Host(1)
	var args []string
	if n > 0 {
		args = []string{"--watch-networks"}
	}

	began := time.Now()
	d := must.Get(h.StartFlanneld(ctx, lab.FlanneldOptions{Args: args}))
	untilReady(ctx, d)
	s.ready = time.Since(began)
	s.cpu = figures.ProcessCPU(d.PID())
	checkRoutes(ctx, h, subnets)
	pause(ctx, afterStart)
	m := figures.ProcessMemory(d.PID())
	s.memory = m.Anonymous + m.File
	cpu, asked := idle(ctx, h, d, r.atRest)
	s.idle, s.asked = time.Duration(float64(cpu)/r.atRest.Minutes()), asked.Total()
	return s
}

func putNetworks(ctx context.Context, l *lab.Lab, n int) (subnets []netip.Prefix) {
	c := must.Get(l.Etcd().Client(ctx))
	defer c.Close()
	var ops []clientv3.Op
	for i := range max(1, n) {
		root := etcdPrefix
		vni := i + 1
		if n > 0 {
			root += fmt.Sprintf("/n%02d", i)
		}

		const firstNetwork = 100 // the second byte of the first pod range, 10.100.0.0/16
		network := [4]byte{10, byte(firstNetwork + i)}
		ops = append(ops, clientv3.OpPut(root+"/config", marshal(map[string]any{
			"Network": netip.PrefixFrom(netip.AddrFrom4(network), 16), "Backend": map[string]any{"Type": "vxlan", "VNI": vni},
		})))
		for j, p := range makePeers(networkPeers) {
			network[2] = byte(j + 1)
			subnet := netip.PrefixFrom(netip.AddrFrom4(network), 24)
			lease := marshal(map[string]any{"PublicIP": p.ip, "BackendType": "vxlan", "BackendData": p.vtep(vni)})
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s/subnets/%s-%d", root, subnet.Addr(), subnet.Bits()), lease))
			subnets = append(subnets, subnet)
		}
	}
	write(ctx, c, ops)
	return subnets
}
