// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/probe/paths"
)

// newProber returns the prober of s. A broken path is only reported: the prober never changes anything.
func (n *Network) newProber(s *session, now lastknown.State, running backend.Network) *paths.Prober {
	d := s.be.Describe()
	c := paths.Config{
		Own: now.Own.Subnets(),
		Network: paths.Network{
			BackendType: now.Config.BackendType, MTU: d.MTU, Devices: len(d.Scope.Devices) > 0, Ports: d.AllPorts(),
			PathMTU: running.Report().PathMTU,
		},
		Peers:    func(ctx context.Context) ([]paths.Peer, bool) { return reachable(ctx, s.syncer) },
		Limit:    n.host.Probes,
		Answered: n.metrics.Answered,
	}
	c.Changed = func(r paths.Result) {
		// Kubernetes reports a host that is down, and all other hosts would warn of it.
		if !r.OK && r.Broken != paths.Underlay {
			n.store.Warn("FlannelPathBroken", fmt.Sprintf("%s at %s, %s: %s", r.Subnet, r.PublicIP, r.Broken, r.Advice))
		}
	}
	return paths.NewProber(c)
}

// reachable returns the peers that are neither refused nor only reserved, with their paths. ok is false if
// the lease loop does not answer within statusTimeout.
func reachable(ctx context.Context, syncer *backend.Syncer) (peers []paths.Peer, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	in, err := syncer.Inspect(ctx, false)
	if err != nil {
		return nil, false
	}

	for _, p := range in.Peers {
		if p.Refused != "" || p.Reserved {
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
