// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net/netip"
	"os"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/metrics"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/version"
	"github.com/flanneld/flanneld/subnet"
)

// statusTimeout limits the time that a report waits for the lease loop.
const statusTimeout = 2 * time.Second

// inspect returns the state of the present session, if there is one.
func (n *network) inspect(ctx context.Context, holdings bool) (lastKnown, backend.Inspection) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	s := n.serving.Load()
	if s == nil {
		return lastKnown{}, backend.Inspection{}
	}
	now := s.begin
	last, _ := n.state.get()
	now.Own = last.Own // renewed in the meantime
	in, err := s.inspect(ctx, holdings)
	if s.left.Load() != nil { // reason why the next session does not start
		_, err = n.ready.health.Part(partDatapath)
	}
	if err != nil {
		in.Err = err
	}
	return now, in
}

// look returns the values of the metrics.
func (n *network) look(ctx context.Context) metrics.Values {
	now, in := n.inspect(ctx, false)
	ready, _ := n.ready.health.Ready()
	since, away := n.ready.health.Part(partDatastore)
	l := metrics.Values{
		Ready: ready, Backend: now.Config.BackendType, Objects: in.Counts, LastSync: in.LastSync,
		Connected: !since.IsZero() && away == nil, LeaseExpires: now.Own.Expires,
		Peers: map[string]int{"served": 0, "held": 0, "refused": 0},
		Mode:  in.Mode, Dropped: in.Dropped, RestartNeeded: n.config.difference() != "",
	}
	if use := n.poolUse(now, in); use != nil {
		l.Pool = map[string]uint64{"free": use.Free, "leased": use.Leased, "reserved": use.Reserved}
	}
	for _, p := range in.Peers {
		switch {
		case p.Refused != "":
			l.Peers["refused"]++
		case p.Held:
			l.Peers["held"]++
		default:
			l.Peers["served"]++
		}
	}
	return l
}

// poolUse returns how much of the range of subnets is in use, for the family with the
// fewest free subnets. It returns nil if flanneld does not assign subnets.
func (n *network) poolUse(now lastKnown, in backend.Inspection) *subnet.Usage {
	pools, err := now.Config.Pools()
	if n.opts.KubeSubnetMgr || err != nil || len(pools) == 0 {
		return nil
	}
	leases := []subnet.Lease{now.Own}
	for _, p := range in.Peers {
		if !p.Held { // the store considers its subnet free
			leases = append(leases, p.Lease)
		}
	}
	least := pools[0].Usage(leases)
	for _, p := range pools[1:] {
		if u := p.Usage(leases); u.Free < least.Free {
			least = u
		}
	}
	return &least
}

// statusReport returns the status for people. Its lists are never nil, so that programs
// can iterate over the JSON.
func (n *network) statusReport(ctx context.Context) (status.Report, error) {
	now, in := n.inspect(ctx, true)
	r := status.Report{
		Version: version.String(), PID: os.Getpid(), Started: n.host.started, Now: time.Now(),
		Network: status.Network{
			Name: n.name, Phase: string(n.progress.phase()), BackendType: now.Config.BackendType, Mode: in.Mode, Prefixes: networks(now.Config), SubnetFile: n.opts.SubnetFile,
		},
		Interface: status.Interface{Name: now.Interface.Name, Index: now.Interface.Index, MTU: now.Interface.MTU, Reason: now.Interface.Reason, Addresses: []status.Address{}},
		Lease:     statusLease(now.Own),
		Datastore: status.Datastore{Kind: n.opts.StoreKind()},
		Firewall:  n.statusFirewall(),
		Kernel:    status.Kernel{LastSync: in.LastSync, Objects: map[string]status.Count{}},
		Peers:     []status.Peer{},
		Events:    n.host.journal.Events(), RestartNeeded: n.config.difference(),
	}
	r.Ready, r.Reasons = n.ready.health.Ready()
	if s := n.serving.Load(); s != nil {
		r.Network.MTU, r.Network.Devices, r.Network.Ports = s.mtu, s.be.Scope().Devices, backend.Ports(s.be)
	}
	if use := n.poolUse(now, in); use != nil {
		r.Network.Pool = (*status.Pool)(use)
	}
	for _, a := range now.Interface.Addrs {
		r.Interface.Addresses = append(r.Interface.Addresses, status.Address{Local: a.Local, Public: a.Public})
	}
	since, err := n.ready.health.Part(partDatastore)
	r.Datastore.Since, r.Datastore.Connected = since, !since.IsZero() && err == nil
	r.Datastore.Error, r.Kernel.Error = oneline.Text(err), oneline.Text(in.Err)
	for kind, c := range in.Counts {
		r.Kernel.Objects[kind] = status.Count(c)
	}
	for _, p := range in.Peers {
		r.Peers = append(r.Peers, statusPeer(p))
	}
	return r, nil
}

func (n *network) statusFirewall() (f status.Firewall) {
	if !n.opts.IPMasq && !n.opts.IPTablesForwardRules {
		return f
	}
	if n.serving.Load() != nil {
		f.Kind = string(n.rules.Flavour())
	}
	_, err := n.ready.health.Part(partRules)
	f.Error = oneline.Text(err)
	return f
}

func statusLease(l subnet.Lease) status.Lease {
	s := status.Lease{
		Key: l.Key, Type: l.BackendType, Permanent: l.Permanent, Expires: l.Expires,
		Subnets: []netip.Prefix{}, PublicIPs: []netip.Addr{},
	}
	for _, e := range l.Endpoints {
		s.Subnets = append(s.Subnets, e.Subnet)
		s.PublicIPs = append(s.PublicIPs, e.PublicIP)
	}
	return s
}

func statusPeer(p backend.PeerReport) status.Peer {
	peer := status.Peer{Lease: statusLease(p.Lease), State: status.InPlace, Error: p.Refused, Changed: p.Changed}
	for _, h := range p.Objects {
		peer.Objects = append(peer.Objects, status.Object{Text: h.Object, Present: h.Present})
		if !h.Present {
			peer.State = status.Missing
		}
	}
	switch {
	case p.Refused != "":
		peer.State = status.Refused
	case p.Held && peer.State == status.InPlace:
		peer.State = status.Held
	}
	return peer
}
