// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

const wireguardGroup = "wireguard"

// measureWireGuard compares the wireguard backend's userspace mode with a program that
// consists only of wireguard-go, on equal hosts. In each round it measures both, in
// alternating order.
func (r *runner) measureWireGuard(ctx context.Context) {
	const tcp = "TCP, 1 stream, hosts"
	for round := range r.rounds {
		order := []string{"flanneld", "wireguard-go"}
		if round%2 == 1 {
			slices.Reverse(order)
		}

		got := map[string]carried{}
		for _, who := range order {
			got[who] = r.wireguardCPU(ctx, who)
			r.report.add(wireguardGroup, tcp+", "+who, -1, "Gbit/s", got[who].gbps)
			r.report.add(wireguardGroup, tcp+", CPU of both processes, "+who, -1, "s/GB", got[who].cpuPerGbit*8)
		}

		r.report.add(wireguardGroup, tcp+", CPU, flanneld / wireguard-go", -1, "",
			got["flanneld"].cpuPerGbit/got["wireguard-go"].cpuPerGbit, 1.1)
		r.wireguardRestart(ctx)
	}
}

// wireguardCPU sends TCP traffic from host 1 to host 2 through the tunnel of who,
// "flanneld" or "wireguard-go", and measures it.
func (r *runner) wireguardCPU(ctx context.Context, who string) carried {
	b := newBed(ctx, r.flanneld)
	defer b.close()
	to := plainAddr(2)
	if who == "flanneld" {
		to = b.startWireGuard(ctx)
	} else {
		b.startWireGuardGo(ctx)
	}
	hosts := b.lab.Hosts()
	return r.iperf(ctx, b, hosts[0].Namespace, hosts[1].Namespace, to)
}

// startWireGuard starts a daemon and a pod on each host, and waits until the pods reach
// each other. The daemon carries the packets even if the kernel has WireGuard. It returns an
// address of host 2 whose route leads through the tunnel.
func (b *bed) startWireGuard(ctx context.Context) netip.Addr {
	b.putConfig(ctx, map[string]any{"Type": "wireguard", "Implementation": "userspace"}, nil)
	b.connect(ctx)
	return b.lab.Pods()[1].Addrs()[0].Prev()
}

// wireguardRestart measures the longest time in which no packet of a flow between two
// pods is answered while the daemon of one host restarts.
func (r *runner) wireguardRestart(ctx context.Context) {
	b := newBed(ctx, r.flanneld)
	defer b.close()
	b.startWireGuard(ctx)
	pods := b.lab.Pods()
	const rate = 200 // packets per second
	flow := must.Get(pods[0].StartFlow(ctx, pods[1], prefix.IPv4, rate))
	pause(ctx, time.Second)
	must.Get(b.lab.Host(1).Daemon().Stop(ctx))
	must.Do(must.Get(b.lab.Host(1).StartFlanneld(ctx, lab.FlanneldOptions{})).Ready(ctx))
	pause(ctx, time.Second)
	r.report.add(wireguardGroup, "longest time without an answer at a restart", -1, "ms", ms(flow.Stop().Gap), 1000)
}

// startWireGuardGo runs wireguard-go on both hosts, with new keys, until the end of the bed.
func (b *bed) startWireGuardGo(ctx context.Context) {
	hosts := b.lab.Hosts()
	keys := [2]wgtypes.Key{must.Get(wgtypes.GeneratePrivateKey()), must.Get(wgtypes.GeneratePrivateKey())}
	for i, h := range hosts {
		other := 1 - i
		public := keys[other].PublicKey()
		b.plain = append(b.plain, b.startPlain(ctx, h, plainWireGuard, fmt.Sprintf("private_key=%s\nlisten_port=%d\npublic_key=%s\nendpoint=%s\nallowed_ip=%s/32\n",
			hex.EncodeToString(keys[i][:]), plainPort, hex.EncodeToString(public[:]),
			netip.AddrPortFrom(hosts[other].Addr(prefix.IPv4), plainPort), plainAddr(other+1))))
		must.Get(h.Exec(ctx, "sh", "-c", fmt.Sprintf("ip addr add %[2]s/24 dev %[1]s && ip link set %[1]s mtu %[3]d up", plainDevice, plainAddr(i+1), plainMTU)))
	}
}

// runWireGuard runs wireguard-go with its own TUN device and sockets, and nothing else,
// until the device is gone.
func runWireGuard(config string) {
	d := device.NewDevice(must.Get(tun.CreateTUN(plainDevice, plainMTU)), conn.NewDefaultBind(), device.NewLogger(device.LogLevelSilent, ""))
	must.Do(d.IpcSet(config))
	must.Do(d.Up())
	sayThere()
	<-d.Wait()
	must.Fail("the device has gone")
}
