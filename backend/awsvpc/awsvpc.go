// SPDX-License-Identifier: Apache-2.0

// Package awsvpc lets the routers of an Amazon VPC carry the packets of pods. Each host has a
// route to its subnet in the route tables of the VPC. There is no tunnel.
//
//   - awsvpc.go is the Backend and its Network. config.go is the Backend object of the
//     configuration.
//   - ec2.go implements cloud.Cloud with the calls of EC2, which query.go makes.
//   - connect.go finds the region, the instance and the credentials.
package awsvpc

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/subnet"
)

// Type is the backend's name in the configuration. Its leases contain no type, like those of
// flannel.
const Type = "aws-vpc"

// Backend implements backend.Backend.
type Backend struct {
	env   backend.Env
	cloud cloud.Cloud
	calls *cloud.Calls
}

// New is the backend's factory.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	c, warnings, err := parseConfig(raw)
	if err != nil {
		return nil, nil, err
	}
	b := &Backend{env: env, calls: &cloud.Calls{}}
	v := &vpc{config: c, networks: env.Config.Prefixes(), connect: func(ctx context.Context) (*client, string, error) { return connect(ctx, b.calls) }}
	for _, a := range env.Underlay.Addrs {
		v.addresses = append(v.addresses, a.Local)
	}
	b.cloud = v
	return b, warnings, nil
}

// LeaseType implements backend.LeaseTyper.
func (*Backend) LeaseType() string { return "" }

// Scope implements backend.Backend.
func (b *Backend) Scope() dataplane.Scope { return b.env.Scope() }

// Claim implements backend.Backend. A host that begins to use the backend must be able to use the
// cloud first. A host that has a lease of this backend keeps it without a call, because its pods
// are running and its routes may be in place: the keeper reports what is wrong.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	claim := b.env.Claim("", prev)
	leased := slices.ContainsFunc(claim.Endpoints, func(e subnet.Endpoint) bool { return e.Subnet.IsValid() })
	if leased && (len(b.env.Used) == 0 && prev.BackendType == "" || slices.Contains(b.env.Used, Type)) {
		return claim, nil
	}
	return claim, b.cloud.Check(ctx)
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	reconciler, err := b.env.Reconciler(b.Scope())
	if err != nil {
		return nil, err
	}
	n := &network{
		Backend: b, Notifier: backend.NewNotifier(ctx),
		Programmer: &backend.Programmer{Base: b.env.Base(own), Reconciler: reconciler},
	}
	n.Forward(reconciler.Changed())
	self := host(&own)
	for _, a := range b.env.Underlay.Addrs {
		self.Addresses = append(self.Addresses, a.Local)
	}
	n.keeper = cloud.NewKeeper(cloud.KeeperConfig{
		Cloud: b.cloud, Own: self, Networks: b.env.Config.Prefixes(), Resync: b.env.Resync, Connected: b.env.Connected, Compared: n.Notify,
	})
	n.Go(n.keeper.Run)
	return n, nil
}

// network implements backend.Network.
type network struct {
	*Backend
	*backend.Programmer
	*backend.Notifier
	keeper     *cloud.Keeper
	complete   bool // of the last set
	unreadable bool // of the last set
}

// MTU implements backend.Network.
func (n *network) MTU() int { return n.env.Underlay.MTU }

// Check implements backend.Network. Leases contain no backend data.
func (*network) Check(subnet.Lease) ([]string, error) { return nil, nil }

// firstComparison limits how long a pass waits for the first comparison with the cloud.
const firstComparison = 15 * time.Second

// Sync implements backend.Network. The keeper compares the routes on a goroutine of its own,
// because a call may take long. It causes a further pass after each comparison.
func (n *network) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	o, failed := n.Programmer.Sync(ctx, peers)
	if peers.All || len(peers.Changed) > 0 || peers.Complete != n.complete || peers.Unreadable != n.unreadable {
		n.complete, n.unreadable = peers.Complete, peers.Unreadable
		n.keeper.SetPeers(cloud.Peers{Hosts: hosts(peers), Complete: n.complete, Unreadable: n.unreadable})
	}
	ctx, cancel := context.WithTimeout(ctx, firstComparison)
	defer cancel()
	repaired, err := n.keeper.Result(ctx)
	o.Repaired += repaired
	return o, oneline.Join(failed, err)
}

// hosts returns all hosts that have a lease, also those whose lease is refused: their routes
// must stay.
func hosts(peers backend.Set) []cloud.Host {
	var all []cloud.Host
	for _, l := range peers.Leases {
		all = append(all, host(l))
	}
	if peers.Refused != nil {
		for _, l := range peers.Refused() {
			all = append(all, host(l))
		}
	}
	return all
}

func host(l *subnet.Lease) cloud.Host {
	h := cloud.Host{Subnets: l.Subnets()}
	for _, e := range l.Endpoints {
		h.Addresses = append(h.Addresses, e.PublicIP)
	}
	return h
}

// CloudRoutes implements backend.CloudRouter.
func (n *network) CloudRoutes() cloud.Report {
	r := n.keeper.Report()
	r.Calls = n.calls.Counts()
	return r
}

// Close implements backend.Network.
func (n *network) Close() error {
	n.Notifier.Close()
	return n.Reconciler.Close()
}
