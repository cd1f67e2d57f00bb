// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/probe/paths"
)

// newProber returns the prober of a session that begins with the state now. A broken path is only
// reported: the prober never changes anything.
func (p *parts) newProber(now lastknown.State, be backend.Backend, running backend.Network, syncer *backend.Syncer) *paths.Prober {
	c := paths.Config{
		Own:      now.Own.Subnets(),
		Network:  paths.Network{BackendType: now.Config.BackendType, MTU: running.MTU(), Devices: len(be.Scope().Devices) > 0, Ports: backend.Ports(be)},
		Peers:    func(ctx context.Context) ([]paths.Peer, bool) { return reachable(ctx, syncer) },
		Limit:    p.host.Probes,
		Answered: p.metrics.Answered,
	}
	if s, ok := running.(backend.PathSizer); ok {
		c.Network.PathMTU = s.PathMTU
	}
	if warn := warner(p.store); warn != nil {
		c.Changed = func(p paths.Result) {
			if !p.OK && p.Broken != paths.Underlay { // Kubernetes reports a host that is down, and all other hosts would warn of it
				warn("FlannelPathBroken", fmt.Sprintf("%s at %s, %s: %s", p.Subnet, p.PublicIP, p.Broken, p.Advice))
			}
		}
	}
	return paths.NewProber(c)
}

// reachable returns the peers that are not refused, with their paths. ok is false if the lease loop
// does not answer within statusTimeout.
func reachable(ctx context.Context, syncer *backend.Syncer) (peers []paths.Peer, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	in, err := syncer.Inspect(ctx, false)
	if err != nil {
		return nil, false
	}

	for _, p := range in.Peers {
		if p.Refused != "" {
			continue
		}
		peer := paths.Peer{Key: p.Lease.Key}
		for _, e := range p.Lease.Endpoints {
			peer.Paths = append(peer.Paths, paths.Path{Subnet: e.Subnet, PublicIP: e.PublicIP})
		}
		peers = append(peers, peer)
	}
	return peers, true
}
