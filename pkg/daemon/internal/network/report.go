// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"maps"
	"math"
	"net/netip"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// reporter tells operators the state of a network.
type reporter struct{ *runner }

// inspect returns the state of the present session, or zero values if there is none. objects selects
// whether it includes the kernel objects of each peer. known is false if the session does not answer in
// time, for example during a long pass. The state of its peers is then unknown, and in contains only the
// error.
func (o reporter) inspect(ctx context.Context, objects bool) (now lastknown.State, in backend.Inspection, known bool) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	s := o.serving.Load()
	if s == nil {
		return lastknown.State{}, backend.Inspection{}, true
	}

	now = *s.begin.Load()
	last, _ := o.state.Get()
	now.Own = last.Own // renewed in the meantime
	in, err := s.inspect(ctx, objects)
	known = err == nil
	if s.left.Load() != nil { // s has ended: report why the next session does not start
		_, err = o.ready.health.Part(partDatapath)
	}
	if err != nil {
		in.Err = err
	}
	return now, in, known
}

// values returns the values of the metrics.
func (o reporter) values(ctx context.Context) metrics.Values {
	now, in, known := o.inspect(ctx, false)
	ready, _ := o.ready.health.Ready()
	since, away := o.ready.health.Part(partDatastore)
	l := metrics.Values{
		Ready: ready, Backend: now.Config.BackendType, Objects: in.Counts, LastSync: in.LastSync,
		Connected: !since.IsZero() && away == nil, LeaseExpires: now.Own.Expires,
		Mode: in.Mode, Dropped: in.Dropped, Cloud: in.Cloud, RestartNeeded: o.config.restartNeeded() != "", ConfigRejected: o.config.refusal() != "",
	}
	if s := o.serving.Load(); s != nil && s.prober != nil {
		outcome := s.prober.Outcome(0)
		l.Paths = &outcome
	}
	if known {
		o.countPeers(&l, now, in)
	}
	return l
}

// countPeers sets those values that are counts of peers and of their subnets.
func (o reporter) countPeers(l *metrics.Values, now lastknown.State, in backend.Inspection) {
	l.Peers = map[string]int{"served": 0, "held": 0, "refused": 0}
	if use := o.poolUse(now, in); use != nil {
		l.Pool = map[string]uint64{"free": use.Free, "leased": use.Leased, "reserved": use.Reserved}
	}

	l.Carried = carried(now, in)
	if o := in.Overflow; o != nil {
		l.CloudPeers = map[string]int{"cloud": o.ByCloud, "tunnel": o.ByTunnel}
	}
	if o := in.Location; o != nil {
		l.LocationPeers = map[string]int{o.Inside: o.ByInside, o.Between: o.ByBetween}
	}

	for _, p := range in.Peers {
		l.NarrowPaths += len(p.PathMTUs)
		switch {
		case p.Refused != "":
			l.Peers["refused"]++
		case p.Held:
			l.Peers["held"]++
		default:
			l.Peers["served"]++
		}
	}
}

// carried returns the numbers of peers by the backend of a migration that carries the packets to them. They are
// zero, and not absent, without a migration, because a short one may be over before the metric is read.
func carried(now lastknown.State, in backend.Inspection) map[string]int {
	numbers := map[string]int{"present": 0, "next": 0}
	for _, p := range in.Peers {
		switch {
		case !now.Config.Migrates() || p.Choice.Backend == "": // other networks with two backends have a Choice, too
		case p.Choice.Waiting == "":
			numbers["next"]++
		default:
			numbers["present"]++
		}
	}
	return numbers
}

// poolUse returns how much of the range of subnets is in use, for the family with the
// fewest free subnets. It returns nil if flanneld does not assign subnets.
func (o reporter) poolUse(now lastknown.State, in backend.Inspection) *subnet.Usage {
	pools, err := now.Config.Pools()
	if o.opts.KubeSubnetMgr || err != nil || len(pools) == 0 {
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

// report returns the report for /statusz. If q.AllPaths is set, it has all paths, but no peers and events.
func (o reporter) report(ctx context.Context, q status.Query) (status.Report, error) {
	now, in, known := o.inspect(ctx, !q.AllPaths)
	r := status.NewReport(o.host.Started, o.host.Journal, o.opts.StoreKind())
	r.Network = status.Network{
		Name: o.name, Phase: string(o.progress.Phase()), BackendType: now.Config.BackendType, Mode: in.Mode, Prefixes: now.Config.Prefixes(), SubnetFile: o.opts.SubnetFile,
	}
	if now.Config.Migrates() {
		r.Network.NextBackendType = now.Config.NextType
		r.Network.NextError = oneline.Text(in.NotStarted)
	}

	r.Interface.Name = now.Interface.Name
	r.Interface.Index = now.Interface.Index
	r.Interface.MTU = now.Interface.MTU
	r.Interface.Reason = now.Interface.Reason
	r.Lease, r.Firewall, r.Kernel.LastSync = statusLease(now.Own), o.firewall(), in.LastSync
	r.RestartNeeded, r.ConfigRejected = o.config.restartNeeded(), o.config.refusal()
	r.Ready, r.Reasons = o.ready.health.Ready()
	if s := o.serving.Load(); s != nil {
		r.Network.MTU, r.Network.Devices, r.Network.Ports = s.mtu, s.be.Scope().Devices, backend.Ports(s.be)
	}
	if known {
		if now.Config.Migrates() {
			waiting := carried(now, in)["present"]
			r.Network.Waiting = &waiting
		}
		r.Network.Pool = (*status.Pool)(o.poolUse(now, in))
	}

	for _, a := range now.Interface.Addrs {
		r.Interface.Addresses = append(r.Interface.Addresses, status.Address{Local: a.Local, Public: a.Public})
	}
	since, err := o.ready.health.Part(partDatastore)
	r.Datastore.Since, r.Datastore.Connected = since, !since.IsZero() && err == nil
	r.Datastore.Error, r.Kernel.Error = oneline.Text(err), oneline.Text(in.Err)
	maps.Copy(r.Kernel.Objects, in.Counts)
	if s := o.serving.Load(); s != nil && s.prober != nil {
		worst := worstPaths
		if q.AllPaths {
			worst = math.MaxInt
		}
		r.Paths = statusPaths(s.prober.Outcome(worst))
	}
	if in.Cloud != nil {
		r.Network.Cloud = statusCloud(*in.Cloud)
		r.Network.Cloud.Overflow = in.Overflow
	}

	r.Network.Location = in.Location
	for _, shared := range in.Shared {
		r.SharedPublicIPs = append(r.SharedPublicIPs, status.SharedPublicIP{PublicIP: shared.PublicIP, Leases: shared.Keys})
	}
	if q.AllPaths {
		r.Events = []status.Event{}
		return r, nil
	}

	r.Interface.Candidates = o.candidates(ctx)
	for _, p := range in.Peers {
		r.Peers = append(r.Peers, statusPeer(p))
	}
	return r, nil
}

func statusCloud(c cloud.Report) *status.Cloud {
	s := &status.Cloud{LastGood: c.Good, Routes: []status.CloudRoute{}}
	for _, r := range c.Routes {
		s.Routes = append(s.Routes, status.CloudRoute{Table: r.Table, Destination: r.Dst, Target: r.Target, Present: r.Present})
	}
	return s
}

func (o reporter) firewall() (f status.Firewall) {
	if !o.opts.IPMasq && !o.opts.IPTablesForwardRules {
		return f
	}
	if o.serving.Load() != nil {
		f.Kind = string(o.rules.Flavour())
	}
	_, err := o.ready.health.Part(partRules)
	f.Error = oneline.Text(err)
	return f
}

// worstPaths is the number of the worst paths in a report without q.AllPaths.
const worstPaths = 20

func statusPaths(o paths.Outcome) *status.Paths {
	s := &status.Paths{Results: o.Results, Worst: []status.Path{}}
	for _, r := range o.Worst {
		s.Worst = append(s.Worst, status.Path{
			Peer: r.Peer, Subnet: r.Subnet, PublicIP: r.PublicIP, Outcome: status.OutcomeOf(r.Verdict), OneWay: r.OneWay, Checked: r.Checked, Since: r.Since,
		})
	}
	return s
}

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
		Backend: p.Choice.Backend, Waiting: p.Choice.Waiting, PathMTU: p.PathMTUs,
	}

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
