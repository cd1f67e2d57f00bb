// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// inspect returns the state of the present session, or zero values if there is none. objects selects
// whether it includes the kernel objects of each peer. known is false if the session does not answer in
// time, for example during a long pass. The state of its peers is then unknown, and in contains only the
// error.
func (n *Network) inspect(ctx context.Context, objects bool) (now lastknown.State, in backend.Inspection, known bool) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	s := n.serving.Load()
	if s == nil {
		return lastknown.State{}, backend.Inspection{}, true
	}

	now = n.last()
	in, err := s.inspect(ctx, objects)
	known = err == nil
	if s.left.Load() != nil { // s has ended: report why the next session does not start
		_, err = n.ready.health.Part(partDatapath)
	}
	if err != nil {
		in.Err = err
	}
	return now, in, known
}

// values returns the values of the metrics.
func (n *Network) values(ctx context.Context) metrics.Values {
	now, in, known := n.inspect(ctx, false)
	_, cutOff := n.ready.health.Part(partPods)
	v := metrics.Values{Report: n.report(now, in, known, 0), PodsCutOff: cutOff != nil, Dropped: in.Dropped, Cloud: in.Cloud}
	if !known {
		v.Peers = nil
	}
	return v
}

// poolUse returns how much of the range of subnets is in use, for the family with the
// fewest free subnets. It returns nil if flanneld does not assign subnets.
func (n *Network) poolUse(now lastknown.State, in backend.Inspection) *subnet.Usage {
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

// Report returns the report for /statusz. If q.AllPaths is set, it has all paths, but no peers and events. The only
// network of a daemon has no name, so it returns status.ErrNoNetwork, wrapped, if q has one.
func (n *Network) Report(ctx context.Context, q status.Query) (status.Report, error) {
	if n.name == "" && q.Network != "" {
		return status.Report{}, fmt.Errorf("%w: %s: this daemon has one network without a name", status.ErrNoNetwork, q.Network)
	}
	now, in, known := n.inspect(ctx, !q.AllPaths)
	if q.AllPaths {
		r := n.report(now, in, known, math.MaxInt)
		r.Peers = []status.Peer{}
		r.Events = []status.Event{}
		return r, nil
	}
	r := n.report(now, in, known, worstPaths)
	r.Interface.Candidates = n.candidates(ctx)
	return r, nil
}

// report returns the report with so many of the worst paths, and without the candidates for the external interface. Its
// other arguments are the results of inspect.
func (n *Network) report(now lastknown.State, in backend.Inspection, known bool, worst int) status.Report {
	r := status.NewReport(n.host.Started, n.host.Journal, n.opts.StoreKind())
	r.Network = status.Network{
		Name: n.name, Phase: string(n.progress.Phase()), BackendType: now.Config.BackendType, Mode: in.Mode, Prefixes: now.Config.Prefixes(), SubnetFile: n.opts.SubnetFile,
	}
	if now.Config.Migrates() {
		r.Network.NextBackendType = now.Config.NextType
		r.Network.NextError = oneline.Text(in.NotStarted)
		r.Network.NextMode = in.NextMode
	}

	r.Interface.Name = now.Interface.Name
	r.Interface.Index = now.Interface.Index
	r.Interface.MTU = now.Interface.MTU
	r.Interface.Reason = now.Interface.Reason
	r.Lease = statusLease(now.Own)
	r.Firewall = n.firewall()
	r.Kernel.LastSync = in.LastSync
	r.RestartNeeded = n.config.restartNeeded()
	r.ConfigRejected = n.config.refusal()
	r.Ready, r.Reasons = n.ready.health.Ready()
	if s := n.serving.Load(); s != nil {
		d := s.be.Describe()
		r.Network.MTU = d.MTU
		r.Network.Devices = d.Scope.Devices
		r.Network.Ports = d.AllPorts()
	}
	if known {
		if now.Config.Migrates() {
			r.Network.Waiting = new(int)
			for _, p := range in.Peers {
				if p.Choice.Backend != "" && p.Choice.Waiting != "" {
					*r.Network.Waiting++
				}
			}
		}
		r.Network.Pool = (*status.Pool)(n.poolUse(now, in))
	}

	for _, a := range now.Interface.Addrs {
		r.Interface.Addresses = append(r.Interface.Addresses, status.Address{Local: a.Local, Public: a.Public})
	}
	since, err := n.ready.health.Part(partDatastore)
	r.Datastore.Since = since
	r.Datastore.Connected = !since.IsZero() && err == nil
	r.Datastore.Error = oneline.Text(err)
	r.Kernel.Error = oneline.Text(in.Err)
	maps.Copy(r.Kernel.Objects, in.Counts)
	if s := n.serving.Load(); s != nil && s.prober != nil {
		outcome := s.prober.Outcome(worst)
		r.Paths = &outcome
	}
	if in.Cloud != nil {
		r.Network.Cloud = statusCloud(*in.Cloud)
		r.Network.Cloud.Overflow = in.Overflow
	}

	r.Network.Location = in.Location
	for _, shared := range in.Shared {
		r.SharedPublicIPs = append(r.SharedPublicIPs, status.SharedPublicIP{PublicIP: shared.PublicIP, Leases: shared.Keys})
	}
	r.Peers = slices.Grow(r.Peers, len(in.Peers))
	for _, p := range in.Peers {
		r.Peers = append(r.Peers, statusPeer(p))
	}
	return r
}

func statusCloud(c cloud.Report) *status.Cloud {
	s := &status.Cloud{LastGood: c.Good, Routes: []status.CloudRoute{}}
	for _, r := range c.Routes {
		s.Routes = append(s.Routes, status.CloudRoute{Table: r.Table, Destination: r.Dst, Target: r.Target, Present: r.Present})
	}
	return s
}

func (n *Network) firewall() (f status.Firewall) {
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

// worstPaths is the number of the worst paths in a report without q.AllPaths.
const worstPaths = 20

func statusLease(l subnet.Lease) status.Lease {
	s := status.Lease{
		Key: l.Key, Type: l.BackendType, NextType: l.NextType, Permanent: l.Permanent, Expires: l.Expires,
		Subnets: []netip.Prefix{}, PublicIPs: []netip.Addr{},
	}
	for _, e := range l.Endpoints {
		s.Subnets = append(s.Subnets, e.Subnet)
		s.PublicIPs = append(s.PublicIPs, e.PublicIP)
	}
	return s
}

func statusPeer(p backend.PeerReport) status.Peer {
	peer := status.Peer{
		Lease: statusLease(p.Lease), State: status.InPlace, Error: p.Refused, Changed: p.Changed,
		Backend: p.Choice.Backend, Waiting: p.Choice.Waiting, PathMTU: p.PathMTUs, Objects: p.Objects,
	}
	if slices.ContainsFunc(p.Objects, func(o status.Object) bool { return !o.Present }) {
		peer.State = status.Missing
	}

	switch {
	case p.Reserved:
		peer.State = status.Reserved
	case p.Refused != "":
		peer.State = status.Refused
	case p.Held && peer.State == status.InPlace:
		peer.State = status.Held
	}
	return peer
}
