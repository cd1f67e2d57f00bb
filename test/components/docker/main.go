// SPDX-License-Identifier: Apache-2.0

// Docker-network creates Docker's network with Docker's own packages, as dockerd does at its
// start, and connects one container. There is no containerd, no image and no API: the
// container is a network namespace that exists already.
//
// Its options are named like those of dockerd, docker network create (-opt) and docker run
// (-publish). The network namespace of the container is in -container. Like dockerd it also
// reads options from /etc/docker/daemon.json. It writes "ready" when all is done, and runs
// until its standard input ends. Then everything stays in the kernel, as after a dockerd that
// is killed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/moby/moby/v2/daemon/libnetwork"
	nwconfig "github.com/moby/moby/v2/daemon/libnetwork/config"
	"github.com/moby/moby/v2/daemon/libnetwork/drivers/bridge"
	"github.com/moby/moby/v2/daemon/libnetwork/ipamutils"
	"github.com/moby/moby/v2/daemon/libnetwork/netlabel"
	"github.com/moby/moby/v2/daemon/libnetwork/types"
	"github.com/moby/sys/reexec"
)

// options contains options of dockerd, and those that docker network create and docker run
// would get.
type options struct {
	Bip                string `json:"bip"`
	FixedCIDRv6        string `json:"fixed-cidr-v6"`
	IPv6               bool   `json:"ipv6"`
	MTU                int    `json:"mtu"`
	IPMasq             bool   `json:"ip-masq"`
	AllowDirectRouting bool   `json:"allow-direct-routing"`
	AcceptFwMark       string `json:"bridge-accept-fwmark"`
	FirewallBackend    string `json:"firewall-backend"`

	container string            // path of its network namespace
	publish   int               // TCP port of the container to publish; 0: none
	network   map[string]string // driver options of a network to create; nil: the default bridge
}

func main() {
	if reexec.Init() {
		return
	}
	o, err := readOptions()
	if err == nil {
		err = run(context.Background(), o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func readOptions() (options, error) {
	o := options{IPMasq: true}
	text, err := os.ReadFile("/etc/docker/daemon.json")
	if err == nil {
		err = json.Unmarshal(text, &o)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return o, fmt.Errorf("read daemon.json: %w", err)
	}
	flag.StringVar(&o.Bip, "bip", o.Bip, "")
	flag.StringVar(&o.FixedCIDRv6, "fixed-cidr-v6", o.FixedCIDRv6, "")
	flag.BoolVar(&o.IPv6, "ipv6", o.IPv6, "")
	flag.IntVar(&o.MTU, "mtu", o.MTU, "")
	flag.BoolVar(&o.IPMasq, "ip-masq", o.IPMasq, "")
	flag.String("H", "", "has no effect")
	flag.StringVar(&o.container, "container", "", "network namespace of the container")
	flag.IntVar(&o.publish, "publish", 0, "TCP port of the container to publish")
	flag.Func("opt", "driver option of a network other than the default bridge", func(text string) error {
		if o.network == nil {
			o.network = map[string]string{}
		}
		key, value, _ := strings.Cut(text, "=")
		o.network[key] = value
		return nil
	})
	flag.Parse()
	return o, nil
}

func run(ctx context.Context, o options) error {
	const state = "/var/lib/docker/network"
	if err := errors.Join(os.MkdirAll(state, 0o711), os.MkdirAll("/run/docker", 0o711)); err != nil {
		return err
	}
	controller, err := libnetwork.New(ctx,
		nwconfig.OptionDataDir(state), nwconfig.OptionExecRoot("/run/docker"),
		nwconfig.OptionDefaultDriver("bridge"), nwconfig.OptionDefaultNetwork("bridge"),
		nwconfig.OptionFirewallBackend(o.FirewallBackend),
		nwconfig.OptionDefaultAddressPoolConfig(ipamutils.GetLocalScopeDefaultNetworks()),
		nwconfig.OptionBridgeConfig(bridge.Configuration{
			EnableIPForwarding: true, EnableIPTables: true, EnableIP6Tables: true,
			AllowDirectRouting: o.AllowDirectRouting, AcceptFwMark: o.AcceptFwMark,
		}),
	)
	if err != nil {
		return fmt.Errorf("start network: %w", err)
	}
	network, err := o.newNetwork(ctx, controller)
	if err != nil {
		return fmt.Errorf("create network: %w", err)
	}
	if o.container != "" {
		if err := o.attach(ctx, controller, network); err != nil {
			return fmt.Errorf("attach container: %w", err)
		}
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// newNetwork makes a network with the driver options of -opt. Without them it makes the default
// bridge, with the options that dockerd gives it.
func (o options) newNetwork(ctx context.Context, c *libnetwork.Controller) (*libnetwork.Network, error) {
	name, opts := "flannel", o.network
	if opts == nil {
		name, opts = "bridge", map[string]string{
			bridge.BridgeName: bridge.DefaultBridgeName, bridge.DefaultBridge: "true", bridge.EnableICC: "true",
			bridge.EnableIPMasquerade: strconv.FormatBool(o.IPMasq), netlabel.DriverMTU: strconv.Itoa(o.MTU),
		}
	}
	gateway, _, _ := strings.Cut(o.Bip, "/")
	var v6 []*libnetwork.IpamConf
	if o.IPv6 {
		v6 = []*libnetwork.IpamConf{{PreferredPool: o.FixedCIDRv6, SubPool: o.FixedCIDRv6}}
	}
	return c.NewNetwork(ctx, "bridge", name, "",
		libnetwork.NetworkOptionEnableIPv4(true), libnetwork.NetworkOptionEnableIPv6(o.IPv6),
		libnetwork.NetworkOptionDriverOpts(opts),
		libnetwork.NetworkOptionIpam("default", "", []*libnetwork.IpamConf{{PreferredPool: o.Bip, Gateway: gateway}}, v6, nil))
}

func (o options) attach(ctx context.Context, c *libnetwork.Controller, n *libnetwork.Network) error {
	var exposed []types.TransportPort
	var bindings []types.PortBinding
	if o.publish != 0 {
		exposed = []types.TransportPort{{Proto: types.TCP, Port: uint16(o.publish)}}
		bindings = []types.PortBinding{{Proto: types.TCP, Port: uint16(o.publish)}}
	}
	sandbox, err := c.NewSandbox(ctx, "container", libnetwork.OptionUseExternalKey(),
		libnetwork.OptionHostsPath("/run/docker/hosts"), libnetwork.OptionResolvConfPath("/run/docker/resolv.conf"),
		libnetwork.OptionExposedPorts(exposed), libnetwork.OptionPortMapping(bindings))
	if err != nil {
		return err
	}
	endpoint, err := n.CreateEndpoint(ctx, "container", libnetwork.CreateOptionExposedPorts(exposed), libnetwork.CreateOptionPortMapping(bindings))
	if err != nil {
		return err
	}
	if err := endpoint.Join(ctx, sandbox); err != nil {
		return err
	}
	return sandbox.SetKey(ctx, o.container)
}
