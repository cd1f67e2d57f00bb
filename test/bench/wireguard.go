// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

const wireguardGroup = "wireguard"

// wireguardConfig returns a backend configuration with which the daemon carries the
// packets, even if the kernel has WireGuard.
func wireguardConfig() map[string]any {
	return map[string]any{"Type": "wireguard", "Implementation": "userspace"}
}

// measureWireGuard compares the wireguard backend's userspace mode with a program that
// consists only of wireguard-go, on equal hosts. In each round it measures both, in
// alternating order.
func (r *runner) measureWireGuard(ctx context.Context) error {
	const tcp = "TCP, 1 stream, hosts"
	for round := range r.rounds {
		order := []string{"flanneld", "wireguard-go"}
		if round%2 == 1 {
			order[0], order[1] = order[1], order[0]
		}

		got := map[string]carried{}
		for _, who := range order {
			var err error
			if got[who], err = r.wireguardCPU(ctx, who); err != nil {
				return fmt.Errorf("%s: %w", who, err)
			}
			r.report.add(wireguardGroup, tcp+", "+who, -1, "Gbit/s", got[who].gbps)
			r.report.add(wireguardGroup, tcp+", CPU of both processes, "+who, -1, "s/GB", got[who].cpuPerGbit*8)
		}

		r.report.add(wireguardGroup, tcp+", CPU, flanneld / wireguard-go", -1, "",
			got["flanneld"].cpuPerGbit/got["wireguard-go"].cpuPerGbit, 1.1)
		if err := r.wireguardRestart(ctx); err != nil {
			return fmt.Errorf("restart: %w", err)
		}
	}
	return nil
}

// wireguardCPU sends TCP traffic from host 1 to host 2 through the tunnel of who,
// "flanneld" or "wireguard-go", and measures it.
func (r *runner) wireguardCPU(ctx context.Context, who string) (carried, error) {
	b, err := newBed(ctx, r.flanneld)
	if err != nil {
		return carried{}, err
	}
	defer b.close()
	to := plainAddr(2)
	if who == "flanneld" {
		to, err = r.startWireGuard(ctx, b)
	} else {
		var configs []string
		if configs, err = b.wireguardPair(); err == nil {
			var stop func()
			stop, err = b.startPlain(ctx, plainWireGuard, configs)
			defer stop()
		}
	}
	if err != nil {
		return carried{}, err
	}
	hosts := b.lab.Hosts()
	return r.iperf(ctx, b, hosts[0].Namespace, hosts[1].Namespace, to)
}

// startWireGuard starts a daemon and a pod on each host, and waits until the pods reach
// each other. It returns an address of host 2 whose route leads through the tunnel.
func (r *runner) startWireGuard(ctx context.Context, b *bed) (netip.Addr, error) {
	if err := b.putConfig(ctx, wireguardConfig(), nil); err != nil {
		return netip.Addr{}, err
	}
	ready, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := b.lab.StartFlanneld(ready, lab.FlanneldOptions{}); err != nil {
		return netip.Addr{}, err
	}
	if err := b.lab.AddPods(ready); err != nil {
		return netip.Addr{}, err
	}
	return b.lab.Pods()[1].Addrs()[0].Prev(), b.meet(ctx)
}

// wireguardRestart restarts the daemon of host 1 during traffic between pods, and records
// the longest time without an answer.
func (r *runner) wireguardRestart(ctx context.Context) error {
	b, err := newBed(ctx, r.flanneld)
	if err != nil {
		return err
	}
	defer b.close()
	if _, err := r.startWireGuard(ctx, b); err != nil {
		return err
	}
	pods := b.lab.Pods()
	host := b.lab.Host(1)
	const rate = 200 // packets per second
	flow, err := pods[0].StartFlow(ctx, pods[1], prefix.IPv4, rate)
	if err != nil {
		return err
	}
	if err := wait.For(ctx, time.Second); err != nil {
		return err
	}
	if _, err := host.Daemon().Stop(ctx); err != nil {
		return err
	}
	if err := b.lab.StartFlanneld(ctx, lab.FlanneldOptions{}); err != nil {
		return err
	}
	if err := wait.For(ctx, time.Second); err != nil {
		return err
	}
	r.report.add(wireguardGroup, "longest time without an answer at a restart", -1, "ms", ms(flow.Stop().Gap), 1000)
	return nil
}

// wireguardPair returns the configurations of runWireGuard for two hosts that are peers,
// with new keys.
func (b *bed) wireguardPair() (configs []string, err error) {
	var keys [2]wgtypes.Key
	for i := range keys {
		if keys[i], err = wgtypes.GeneratePrivateKey(); err != nil {
			return nil, err
		}
	}

	for i := range keys {
		other := 1 - i
		public := keys[other].PublicKey()
		configs = append(configs, fmt.Sprintf("private_key=%s\nlisten_port=%d\npublic_key=%s\nendpoint=%s\nallowed_ip=%s/32\n",
			hex.EncodeToString(keys[i][:]), plainPort, hex.EncodeToString(public[:]),
			netip.AddrPortFrom(b.lab.Hosts()[other].Addr(prefix.IPv4), plainPort), plainAddr(other+1)))
	}
	return configs, nil
}

// runWireGuard runs wireguard-go with its own TUN device and sockets, and nothing else,
// until the device is gone.
func runWireGuard(config string) error {
	t, err := tun.CreateTUN(plainDevice, plainMTU)
	if err != nil {
		return err
	}
	d := device.NewDevice(t, conn.NewDefaultBind(), device.NewLogger(device.LogLevelSilent, ""))
	if err := d.IpcSet(config); err != nil {
		return err
	}
	if err := d.Up(); err != nil {
		return err
	}
	<-d.Wait()
	return errors.New("the device has gone")
}
