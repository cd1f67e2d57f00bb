// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

const maxNetworks = 100

// Network is one of several networks, which one daemon on each host serves.
type Network struct {
	Name   string
	Config json.RawMessage // network configuration in the store at the start
}

// Networks returns a network for each name. Each has a pod range of its own and, if its backend needs
// one, a VNI or port of its own. Network i, counted from 0, has the backend type
// backends[i%len(backends)]. The keys in extra are added to the configuration of each backend.
func Networks(names []string, families []prefix.Family, backends []string, extra map[string]any) ([]Network, error) {
	var all []Network
	for i, name := range names {
		b := map[string]any{}
		backend := backends[i%len(backends)]
		switch backend {
		case "vxlan":
			b["VNI"] = 1 + i
		case "udp":
			b["Port"] = 8285 + i
		case "wireguard":
			b["ListenPort"] = 51820 + 2*i
			b["ListenPortV6"] = 51821 + 2*i
		}

		maps.Copy(b, extra)
		b["Type"] = backend
		text, err := json.Marshal(b)
		if err != nil {
			return nil, fmt.Errorf("write backend of network %s: %w", name, err)
		}
		config, err := networkConfig(i, families, text)
		if err != nil {
			return nil, err
		}
		all = append(all, Network{name, config})
	}
	return all, nil
}

// NetworkFile returns the path of the subnet file of one of several networks on a host.
func NetworkFile(network string) string { return "/run/flannel/networks/" + network + ".env" }

// SetNetworks makes daemons that start from now on serve these networks, or one network without a name if there are no
// names. The hosts must have no pods. The caller writes the configurations of the networks.
func (l *Lab) SetNetworks(names ...string) {
	l.cfg.Networks = nil
	for _, name := range names {
		l.cfg.Networks = append(l.cfg.Networks, Network{Name: name})
	}
}

func networkBridge(network string) string { return "br-" + network }

func (l *Lab) networkNames() []string { // none for the only network, which has no name
	var names []string
	for _, n := range l.cfg.Networks {
		names = append(names, n.Name)
	}
	return names
}

// HasPods reports whether p is part of the pod range of a network of the lab.
func (l *Lab) HasPods(p netip.Prefix) bool {
	f := prefix.FamilyOf(p.Addr())
	for i := range max(1, len(l.cfg.Networks)) {
		if prefix.Contains(podNetwork(i, f), p) {
			return true
		}
	}
	return false
}

// IsBridge reports whether the device with that name is a bridge of pods on a host.
func (l *Lab) IsBridge(device string) bool {
	return device == PodBridge || slices.ContainsFunc(l.networkNames(), func(n string) bool { return device == networkBridge(n) })
}

func (l *Lab) subnetFiles() []string {
	var files []string
	for _, name := range l.networkNames() {
		files = append(files, NetworkFile(name))
	}
	if len(files) == 0 {
		files = append(files, SubnetFile)
	}
	return files
}

func (l *Lab) putNetworks(ctx context.Context) error {
	if l.cfg.Network != nil {
		if err := l.PutNetwork(ctx, l.cfg.Network); err != nil {
			return err
		}
	}
	for _, n := range l.cfg.Networks {
		if err := l.put(ctx, Prefix+"/"+n.Name+"/config", n.Config); err != nil {
			return err
		}
	}
	return nil
}
