// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net/http"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/health"
	"github.com/flanneld/flanneld/pkg/metrics"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/version"
	"github.com/flanneld/flanneld/subnet"
)

// journalSize is the number of log lines on the status page.
const journalSize = 200

// statusTimeout limits the time that a report waits for the lease loop.
const statusTimeout = 2 * time.Second

// listen opens the local socket and the health port, and makes group serve them until ctx
// ends. The daemon continues without the socket, because it is only for inspection.
func (d *daemon) listen(ctx, members context.Context, group *errgroup.Group) error {
	page, err := status.Handler(d.statusReport)
	if err != nil {
		return err
	}
	d.metrics = metrics.New(d.look)
	mux := http.NewServeMux()
	mux.Handle("/metrics", d.metrics.Handler())
	mux.Handle("/", health.Handler(d.health))
	local := http.NewServeMux()
	local.Handle("/statusz", page)
	local.Handle("/statusz.json", page)
	local.Handle("/", mux)

	if path := d.opts.SocketPath(); path != "" {
		ln, err := status.Listen(ctx, path)
		if err != nil {
			klog.FromContext(ctx).Error(err, "continuing without the status socket: flannelctl status will not work")
		} else {
			group.Go(func() error { return health.Serve(members, ln, local) })
		}
	}
	serve := func(addr string, h http.Handler) error {
		if addr == "" {
			return nil
		}
		ln, err := health.Listen(ctx, addr)
		if err == nil {
			group.Go(func() error { return health.Serve(members, ln, h) })
		}
		return err
	}
	if err := serve(d.opts.HealthzAddr(), onLoopback(local, mux)); err != nil {
		return err
	}
	return serve(d.opts.StatuszAddress, local)
}

// onLoopback passes requests from this host, to a loopback address, to local, and all
// others to others. The host name in the request must be an address too. Otherwise a page
// of another site could read the status through a browser.
func onLoopback(local, others http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		from, err := netip.ParseAddrPort(r.RemoteAddr)
		to, err2 := netip.ParseAddrPort(r.Host)
		if err == nil && err2 == nil && from.Addr().Unmap().IsLoopback() && to.Addr().Unmap().IsLoopback() {
			local.ServeHTTP(w, r)
			return
		}
		others.ServeHTTP(w, r)
	})
}

// inspect returns the state of the present session, if there is one.
func (d *daemon) inspect(ctx context.Context, holdings bool) (lastKnown, backend.Inspection) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	s := d.serving.Load()
	if s == nil {
		return lastKnown{}, backend.Inspection{}
	}
	now := s.now
	last, _ := d.record.get()
	now.Own = last.Own // renewed in the meantime
	in, err := s.inspect(ctx, holdings)
	if s.left.Load() != nil { // reason why the next session does not start
		_, err = d.health.Part(partDatapath)
	}
	if err != nil {
		in.Err = err
	}
	return now, in
}

// look returns the values of the metrics.
func (d *daemon) look(ctx context.Context) metrics.Look {
	now, in := d.inspect(ctx, false)
	ready, _ := d.health.Ready()
	since, away := d.health.Part(partDatastore)
	l := metrics.Look{
		Ready: ready, Backend: now.Config.BackendType, Objects: in.Counts, LastSync: in.LastSync,
		Connected: !since.IsZero() && away == nil, LeaseExpires: now.Own.Expires,
		Peers: map[string]int{"served": 0, "held": 0, "refused": 0},
		Mode:  in.Mode, Dropped: in.Dropped, RestartNeeded: d.config.difference() != "",
	}
	if use := d.poolUse(now, in); use != nil {
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
func (d *daemon) poolUse(now lastKnown, in backend.Inspection) *subnet.Use {
	pools, err := now.Config.Pools()
	if d.opts.KubeSubnetMgr || err != nil || len(pools) == 0 {
		return nil
	}
	leases := []subnet.Lease{now.Own}
	for _, p := range in.Peers {
		if !p.Held { // the store considers its subnet free
			leases = append(leases, p.Lease)
		}
	}
	least := pools[0].Use(leases)
	for _, p := range pools[1:] {
		if u := p.Use(leases); u.Free < least.Free {
			least = u
		}
	}
	return &least
}

// statusReport returns the status for people. Its lists are never nil, so that programs
// can iterate over the JSON.
func (d *daemon) statusReport(ctx context.Context) (status.Report, error) {
	now, in := d.inspect(ctx, true)
	r := status.Report{
		Version: version.String(), PID: os.Getpid(), Started: d.started, Now: time.Now(),
		Network: status.Network{
			BackendType: now.Config.BackendType, Mode: in.Mode, Prefixes: networks(now.Config), SubnetFile: d.opts.SubnetFile,
		},
		Interface: status.Interface{Name: now.Interface.Name, Index: now.Interface.Index, MTU: now.Interface.MTU, Reason: now.Interface.Reason, Addresses: []status.Address{}},
		Lease:     statusLease(now.Own),
		Datastore: status.Datastore{Kind: d.opts.StoreKind()},
		Firewall:  d.statusFirewall(),
		Kernel:    status.Kernel{LastSync: in.LastSync, Objects: map[string]status.Count{}},
		Peers:     []status.Peer{},
		Events:    d.journal.Events(), RestartNeeded: d.config.difference(),
	}
	r.Ready, r.Reasons = d.health.Ready()
	if s := d.serving.Load(); s != nil {
		r.Network.MTU, r.Network.Devices, r.Network.Ports = s.mtu, s.be.Scope().Devices, backend.Ports(s.be)
	}
	if use := d.poolUse(now, in); use != nil {
		r.Network.Pool = (*status.Pool)(use)
	}
	for _, a := range now.Interface.Addrs {
		r.Interface.Addresses = append(r.Interface.Addresses, status.Address{Local: a.Local, Public: a.Public})
	}
	since, err := d.health.Part(partDatastore)
	r.Datastore.Since, r.Datastore.Connected = since, !since.IsZero() && err == nil
	r.Datastore.Error, r.Kernel.Error = oneLine(err), oneLine(in.Err)
	for kind, c := range in.Counts {
		r.Kernel.Objects[kind] = status.Count(c)
	}
	for _, p := range in.Peers {
		r.Peers = append(r.Peers, statusPeer(p))
	}
	return r, nil
}

func (d *daemon) statusFirewall() (f status.Firewall) {
	if !d.opts.IPMasq && !d.opts.IPTablesForwardRules {
		return f
	}
	if s := d.serving.Load(); s != nil {
		f.Kind = s.rules.flavour
	}
	_, err := d.health.Part(partRules)
	f.Error = oneLine(err)
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
	for _, h := range p.Holdings {
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

func oneLine(err error) string {
	if err == nil {
		return ""
	}
	return health.OneLine(err)
}
