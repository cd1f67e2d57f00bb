// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// Host contains what the Keepers of all networks share. It finds out which firewalls this
// host has, once, when the first Keeper needs it, and lets them write rules one at a time.
// It is safe for concurrent use.
type Host struct {
	automatic func() (f Flavour, why string) // chooses the flavour for Auto

	wanted   chan []prefix.Family // makes Run search for the programs; has room for one request
	searched chan struct{}        // closed when found is set
	found    *iptables.Programs

	// writing lets one writer at a time read and write rules. iptables-restore fails if a chain
	// changes meanwhile.
	writing sync.Mutex

	writers  sync.Map // of *writer, by firewall and families
	watchers sync.Map // of *wait.Shared, by places; see watch
	warned   sync.Map // bridge settings that were warned about
}

// NewHost returns a Host. Keepers that use iptables wait until Host.Run has found the
// programs.
func NewHost() *Host {
	return &Host{automatic: sync.OnceValues(automatic), wanted: make(chan []prefix.Family, 1), searched: make(chan struct{})}
}

// Run searches the iptables programs when a Keeper first needs them, and then returns nil.
// If ctx ends first, Run also returns nil. ctx must not end before the last Keep. The search
// continues if the Keep that needs it ends, as that of a session on the last known state does
// when the store answers. So the next Keep uses the result and need not search again: on a
// busy host the programs that a search runs take most of the time of a start.
func (h *Host) Run(ctx context.Context) error {
	select {
	case families := <-h.wanted:
		h.found = search(ctx, families)
		close(h.searched)
	case <-ctx.Done():
	}
	return nil
}

// programs returns the iptables programs of this host, or nil if ctx ends first. The first call makes Run
// search them for its families. All networks of a host must use one variant of iptables, because a packet
// passes the rules of every variant.
func (h *Host) programs(ctx context.Context, families []prefix.Family) *iptables.Programs {
	select {
	case h.wanted <- families:
	default:
	}
	select {
	case <-h.searched:
		return h.found
	case <-ctx.Done():
		return nil
	}
}

func search(ctx context.Context, families []prefix.Family) *iptables.Programs {
	v, why := iptables.Choose(ctx, families, nftables.HasTable)
	if ctx.Err() == nil && why != "" {
		klog.FromContext(ctx).Info("variant of iptables chosen", "program", v.Program(prefix.IPv4), "because", why)
	}
	found := iptables.NewPrograms(v)
	for _, f := range families {
		_, _ = found.Variant(ctx, f) // a Keep asks again and reports an error
	}
	return found
}

// writer returns the writer that all networks of these families share for a firewall. A program that is
// missing for one family does not affect networks without it. The first call decides on the Applier.
func (h *Host) writer(name string, of []prefix.Family, applier firewall.Applier) *writer {
	w, _ := h.writers.LoadOrStore(fmt.Sprint(name, of), &writer{applier: applier, turn: &h.writing, policies: map[any]firewall.Policy{}})
	return w.(*writer)
}

const bridgeSettings = "/proc/sys/net/bridge"

// warnBridges logs once for each family of p if packets between pods on one bridge bypass netfilter. If a
// pod reaches another one through a Service, the answer then has the address of the other pod and not of
// the Service, in every mode of kube-proxy: only netfilter could translate it back.
func (h *Host) warnBridges(ctx context.Context, settings string, p firewall.Policy) {
	for _, f := range families(p) {
		name := map[prefix.Family]string{prefix.IPv4: "bridge-nf-call-iptables", prefix.IPv6: "bridge-nf-call-ip6tables"}[f]
		value, err := os.ReadFile(filepath.Join(settings, name))
		if err == nil && strings.TrimSpace(string(value)) != "0" {
			continue
		}
		if _, warned := h.warned.LoadOrStore(name, nil); warned {
			continue
		}

		problem := "br_netfilter is switched off"
		if err != nil {
			problem = "br_netfilter is not loaded"
		}
		klog.FromContext(ctx).Error(nil, problem+": a pod that talks to a service which is served by a pod "+
			"of the same host may get no answer; load the module br_netfilter and set this to 1", "sysctl", "net.bridge."+name)
	}
}

func families(p firewall.Policy) []prefix.Family {
	var all []prefix.Family
	for _, n := range p.Networks {
		all = append(all, prefix.FamilyOf(n.Network.Addr()))
	}
	return all
}
