// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/paths"
	"github.com/flanneld/flanneld/subnet"
)

// newProber returns the prober of a session. A broken path is only reported: the prober never
// changes anything.
func (r *runner) newProber(s *session) *paths.Prober {
	now := s.begin.Load()
	c := paths.Config{
		Own:      now.Own.Subnets(),
		Network:  paths.Network{BackendType: now.Config.BackendType, MTU: s.mtu, Devices: len(s.be.Scope().Devices) > 0, Ports: backend.Ports(s.be)},
		Peers:    s.reachable,
		Limit:    r.host.Probes,
		Answered: r.metrics.Answered,
	}
	if s.sizer != nil {
		c.Network.PathMTU = s.sizer.PathMTU
	}
	if w, ok := r.store.(subnet.Warner); ok {
		c.Changed = func(p paths.Result) {
			if !p.OK && p.Broken != paths.Underlay { // Kubernetes reports a host that is down, and all other hosts would warn of it
				w.Warn("FlannelPathBroken", fmt.Sprintf("%s at %s, %s: %s", p.Subnet, p.PublicIP, p.Broken, p.Advice))
			}
		}
	}
	return paths.NewProber(c)
}

// reachable returns the peers that packets are sent to, with their paths. ok is false if the lease loop
// does not answer within statusTimeout.
func (s *session) reachable(ctx context.Context) (peers []paths.Peer, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	in, err := s.inspect(ctx, false)
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
