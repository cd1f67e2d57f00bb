// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
	"github.com/flanneld/flanneld/pkg/daemon"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/doctor/linux"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
	"github.com/flanneld/flanneld/subnet/kube"
)

// startOptions returns the options of a flanneld that would start now with the flags in args, the variables of this
// environment and those of the systemd unit. If none of them locates the store, it looks for it.
func (h host) startOptions(args []string) (o storeOptions, err error) {
	o.kubernetes = true
	var env []string
	if text, err := os.ReadFile(h.settings); err == nil {
		for name, value := range subnetfile.Variables(text) {
			env = append(env, name+"="+value)
		}
	}
	env = append(env, os.Environ()...)
	given, err := options.Given(args, env)
	if err != nil {
		return o, err
	}
	if !slices.ContainsFunc(locating, func(name string) bool { return given[name] != "" }) {
		o.place = h.findStore(true)
		env = append(o.variables(), env...)
	}
	if given[netConfigPath] == "" && o.settings[netConfigPath] == "" {
		args = append(slices.Clone(args), "--"+netConfigPath+"="+os.DevNull) // the file exists only in pods
	}
	o.Options, err = options.Parse(args, env)
	return o, err
}

// before returns the facts about this host for a flanneld that would start now with the flags in args.
func (h host) before(ctx context.Context, args []string) (doctor.Facts, error) {
	o, err := h.startOptions(args)
	if err != nil {
		return doctor.Facts{}, err
	}
	b := &doctor.Before{}
	var denied error // the last one that root would not get, which need not be a problem
	fail := func(problem string, err error, fix string) {
		if err == nil {
			return
		}
		f := doctor.Finding{Problem: problem + ": " + err.Error(), Fix: fix, Serious: true}
		if errors.Is(err, fs.ErrPermission) {
			denied = err
			f.Serious = false
			f.Fix = "run flannelctl as root"
		}
		b.Findings = append(b.Findings, f)
	}

	note := func(problem, fix string) { b.Findings = append(b.Findings, doctor.Finding{Problem: problem, Fix: fix}) }

	r := status.Report{Datastore: status.Datastore{Kind: o.StoreKind(), Connected: true}}
	cfg, ports, err := o.examineStore(ctx, fail, note)
	if errors.Is(err, subnet.ErrNoConfig) {
		fail("the network is not known", err, "flannelctl config set net-conf.json; on Kubernetes the ConfigMap "+defaultConfigMap)
	} else {
		fail("the store cannot be used", err, "flannelctl.md says where the store is looked for; see etcd.md and kubernetes.md")
	}

	r.Network.Prefixes = cfg.Prefixes()
	r.Network.BackendType = cfg.BackendType
	r.Network.Ports = ports

	previous, err := subnetfile.Read(o.SubnetFile)
	fail("the subnet file cannot be read", err, "remove "+o.SubnetFile)
	for _, e := range previous.Entries {
		b.Former = append(b.Former, e.Network)
		r.Lease.Subnets = append(r.Lease.Subnets, e.Subnet)
	}

	var families []prefix.Family
	for _, n := range cfg.Networks {
		families = append(families, n.Family())
	}
	if len(families) == 0 { // they are not known
		families = []prefix.Family{prefix.IPv4}
	}
	choice := localChoice{ipv6: slices.Contains(families, prefix.IPv6)}
	candidates, err := choice.choose(ctx, o.Options)
	fail("there is no external interface", err, "flannelctl interface --no-daemon shows why; --iface chooses one")

	for _, c := range candidates {
		if !c.Chosen {
			continue
		}
		note(fmt.Sprintf("%s (%s) would be the external interface: %s", c.Name, list(c.Addresses), cmp.Or(strings.Join(c.For, "; "), "nothing speaks for another one")),
			"--iface chooses another one; flannelctl interface --no-daemon shows all")
		r.Interface.Name = c.Name
		for _, a := range c.Addresses {
			// The rules for packets from another host are examined for a neighbour of this address.
			r.Interface.Addresses = append(r.Interface.Addresses, status.Address{Local: a, Public: a})
			r.Peers = append(r.Peers, status.Peer{Lease: status.Lease{PublicIPs: []netip.Addr{a.Next()}}})
		}
	}

	if o.IPMasq || o.IPTablesForwardRules {
		fail("the rules of the firewall cannot be written", writeRules(ctx, o.Options, cfg.NFTables, families), "install iptables, or set --firewall=auto")
	}
	for flag, address := range map[string]string{"--healthz-port": o.HealthzAddr(), "--statusz-address": o.StatuszAddress} {
		if address != "" {
			fail(flag+" cannot be used", free(ctx, address), "choose another port; ss -ltnp shows the program")
		}
	}
	if b.Ranges, err = linux.Ranges(); err != nil {
		fail("the routes of this host cannot be read", err, "run flannelctl as root")
	}
	facts := linux.Gather(ctx, r)
	facts.Before = b
	facts.Unread = cmp.Or(facts.Unread, denied)
	return facts, nil
}

// writeRules returns why the traffic rules cannot be written, or nil.
func writeRules(ctx context.Context, o options.Options, inNFTables bool, families []prefix.Family) error {
	switch {
	case o.Firewall == options.FirewallAuto:
		return nil // it takes what there is
	case o.Firewall == options.FirewallNFTables, o.Firewall == options.FirewallConfig && inNFTables:
		return nftables.Available()
	}

	programs := iptables.NewPrograms(iptables.Default)
	for _, f := range families {
		if _, err := programs.Variant(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

// free returns why a program cannot listen on a TCP address, or nil.
func free(ctx context.Context, address string) error {
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return ln.Close()
}

// examineStore returns the network configuration in the store with the UDP ports of its backend, and reports
// what the user may not do there.
func (o storeOptions) examineStore(ctx context.Context, fail func(string, error, string), note func(string, string)) (cfg subnet.Config, ports []int, err error) {
	var text []byte
	err = o.read(func(from store) error {
		if o.KubeSubnetMgr {
			missing, err := kube.Missing(ctx, o.kubeConfig())
			if err != nil {
				return err
			}
			if len(missing) > 0 {
				fail("the API server refuses this user", errors.New(strings.Join(missing, ", ")), "kubectl apply the ClusterRole of the manifests; see kubernetes.md")
			}
			if !slices.Contains(missing, "list nodes") {
				nodes, err := kube.WithoutPodCIDR(ctx, o.kubeConfig())
				if err != nil {
					return err
				}
				if len(nodes) > 0 {
					fail("Nodes have no podCIDR", errors.New(oneline.List(nodes, ", ")), "start kube-controller-manager with --allocate-node-cidrs and --cluster-cidr; see kubernetes.md")
				}
			}
		}

		var failed error
		if text, _, failed = config(ctx, from); failed != nil && !errors.Is(failed, subnet.ErrNoConfig) {
			return failed
		}
		if a, ok := from.(*etcd.Admin); ok {
			if _, err := a.Entries(ctx, false); err != nil {
				return err
			}
			switch may, err := a.MayWrite(ctx); {
			case err != nil:
				return err
			case !may:
				note("the user of etcd may not write all leases: flanneld needs the right to write that of this host", "flannelctl roles prints the commands for hosts with a key of their own; see etcd.md")
			}
		}
		return failed
	})
	if err != nil {
		return cfg, nil, err
	}

	backends, err := allBackends()
	if err != nil {
		return cfg, nil, err
	}
	cfg, be, _, err := daemon.ValidateConfig(text, !o.KubeSubnetMgr, backends.Registry)
	if err != nil {
		return subnet.Config{}, nil, fmt.Errorf("the network configuration is invalid: %w", err)
	}
	if !o.KubeSubnetMgr {
		err := daemon.CheckRanges(ctx, cfg, externalInterface(ctx, cfg), o.EtcdEndpoints)
		fail("the network configuration is refused on this host", err, "choose another Network")
	}
	return cfg, be.Describe().AllPorts(), nil
}
