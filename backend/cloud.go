// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/subnet"
)

// CloudBackend is a Backend that lets the routers of a cloud carry the packets of pods. All fields
// are required.
type CloudBackend struct {
	Type  string // in the configuration; leases contain no type, like those of flannel
	Env   Env
	Cloud cloud.Cloud
	Calls *cloud.Calls // of Cloud
}

// LeaseType implements LeaseTyper.
func (*CloudBackend) LeaseType() string { return "" }

// Scope implements Backend.
func (b *CloudBackend) Scope() dataplane.Scope { return b.Env.Scope() }

// Claim implements Backend. A host that begins to use the backend must be able to use the
// cloud first. A host that has a lease of this backend keeps it without a call, because its pods
// are running and its routes may be in place: the keeper reports what is wrong.
func (b *CloudBackend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	claim := b.Env.Claim("", prev)
	leased := slices.ContainsFunc(claim.Endpoints, func(e subnet.Endpoint) bool { return e.Subnet.IsValid() })
	if leased && (len(b.Env.Used) == 0 && prev.BackendType == "" || slices.Contains(b.Env.Used, b.Type)) {
		return claim, nil
	}
	return claim, b.Cloud.Check(ctx)
}

// Start implements Backend.
func (b *CloudBackend) Start(ctx context.Context, own subnet.Lease) (Network, error) {
	reconciler, err := b.Env.Reconciler(ctx, b.Scope())
	if err != nil {
		return nil, err
	}
	n := &cloudNetwork{
		CloudBackend: b, Notifier: NewNotifier(ctx),
		Programmer: &Programmer{Base: b.Env.Base(own), Reconciler: reconciler},
	}
	n.Forward(reconciler.Changed())
	self := cloudHost(&own)
	self.Addresses = append(self.Addresses, b.Env.Locals()...)
	n.keeper = cloud.NewKeeper(cloud.KeeperConfig{
		Cloud: b.Cloud, Own: self, Networks: b.Env.Config.Prefixes(), Resync: b.Env.Resync, Connected: b.Env.Connected, Compared: n.Notify,
	})
	n.Go(n.keeper.Run)
	return n, nil
}

// cloudNetwork implements Network and CloudRouter.
type cloudNetwork struct {
	*CloudBackend
	*Programmer
	*Notifier
	keeper     *cloud.Keeper
	complete   bool // of the last set
	unreadable bool // of the last set
}

// MTU implements Network.
func (n *cloudNetwork) MTU() int { return n.Env.Underlay.MTU }

// Check implements Network. Leases contain no backend data.
func (*cloudNetwork) Check(subnet.Lease) ([]string, error) { return nil, nil }

// firstComparison limits how long a pass waits for the first comparison with the cloud.
const firstComparison = 15 * time.Second

// Sync implements Network. The keeper compares the routes on a goroutine of its own,
// because a call may take long. It causes a further pass after each comparison.
func (n *cloudNetwork) Sync(ctx context.Context, peers Set) (Outcome, error) {
	o, failed := n.Programmer.Sync(ctx, peers)
	if peers.All || len(peers.Changed) > 0 || peers.Complete != n.complete || peers.Unreadable != n.unreadable {
		n.complete, n.unreadable = peers.Complete, peers.Unreadable
		n.keeper.SetPeers(cloud.Peers{Hosts: cloudHosts(peers), Complete: n.complete, Unreadable: n.unreadable})
	}
	ctx, cancel := context.WithTimeout(ctx, firstComparison)
	defer cancel()
	repaired, err := n.keeper.Result(ctx)
	o.Repaired += repaired
	return o, oneline.Join(failed, err)
}

// cloudHosts returns all hosts that have a lease, also those whose lease is refused: their routes
// must stay.
func cloudHosts(peers Set) []cloud.Host {
	var all []cloud.Host
	for _, l := range peers.Leases {
		all = append(all, cloudHost(l))
	}
	if peers.Refused != nil {
		for _, l := range peers.Refused() {
			all = append(all, cloudHost(l))
		}
	}
	return all
}

func cloudHost(l *subnet.Lease) cloud.Host {
	h := cloud.Host{Subnets: l.Subnets()}
	for _, e := range l.Endpoints {
		h.Addresses = append(h.Addresses, e.PublicIP)
	}
	return h
}

// CloudRoutes implements CloudRouter.
func (n *cloudNetwork) CloudRoutes() cloud.Report {
	r := n.keeper.Report()
	r.Calls = n.Calls.Counts()
	return r
}

// Close implements Network.
func (n *cloudNetwork) Close() error {
	n.Notifier.Close()
	return n.Reconciler.Close()
}
