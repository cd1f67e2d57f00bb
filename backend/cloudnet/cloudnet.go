// SPDX-License-Identifier: Apache-2.0

// Package cloudnet is the backend of all clouds, which differ in their cloud.Cloud.
package cloudnet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/subnet"
)

// Backend is a backend.Backend that lets the routers of a cloud carry the packets of pods. Overflow may be zero. All
// other fields are required.
type Backend struct {
	Type     string // in the configuration; leases contain no type, like those of flannel
	Env      backend.Env
	Cloud    cloud.Cloud
	Calls    *cloud.Calls  // the calls that Cloud makes
	Overflow backend.Inner // the tunnel to peers that the routers of the cloud do not reach
}

// Decode decodes the Backend object of a cloud into the struct that config points to, and returns warnings about
// it. cluster is the field of that struct with the key Cluster; nil if there is none.
func Decode(raw json.RawMessage, config any, cluster *string) (warnings []string, err error) {
	if warnings, err = subnet.DecodeBackend(raw, config); err != nil {
		return nil, err
	}
	name := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	if cluster != nil && *cluster != "" && !name.MatchString(*cluster) {
		return nil, fmt.Errorf("Backend.Cluster is %q: want 1 to 63 characters a-z, 0-9 and - that do not begin or end with -", subnet.Shorten(*cluster))
	}

	// Every host, and every other client of the store, can read the configuration.
	keys, _ := subnet.Keys(raw) // no error, because raw was decoded before; without an object there are no keys
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		lower := strings.ToLower(key)
		if strings.HasPrefix(lower, "accesskey") || strings.Contains(lower, "secret") || strings.Contains(lower, "token") {
			warnings = append(warnings, fmt.Sprintf("key %q may contain a secret, which everything that reads the store can see: remove it, and give the host a role", key))
		}
	}
	return warnings, nil
}

// Keyed is the Backend object of a cloud whose calls are signed with a pair of keys.
type Keyed struct {
	Cluster         string        // name of the cluster, such as "blue", in the descriptions of its routes; hosts of other clusters do not replace or remove these
	AccessKeyID     string        // id of an access key. Every program that can read the store can read the key: if possible, give the instance a role instead
	AccessKeySecret string        // secret of the access key
	Overflow        backend.Inner // tunnel to hosts that the routes of the cloud do not reach
}

// ParseKeyed decodes and validates a Backend object, and returns warnings about it.
func ParseKeyed(raw json.RawMessage) (c Keyed, warnings []string, err error) {
	warnings, err = Decode(raw, &c, &c.Cluster)
	if (c.AccessKeyID == "") != (c.AccessKeySecret == "") {
		warnings = append(warnings, "AccessKeyID and AccessKeySecret need each other: the one that is set is ignored")
	}
	return c, warnings, err
}

// Keys returns the keys in the configuration.
func (c Keyed) Keys() access.Keys {
	return access.Keys{ID: c.AccessKeyID, Secret: c.AccessKeySecret}
}

// Describe implements backend.Backend. Leases have no type.
func (b *Backend) Describe() backend.Description {
	return backend.Description{Scope: b.Env.Scope(), MTU: b.Env.Underlay.MTU, Overflow: b.Overflow}
}

// Claim implements backend.Backend. It returns an error if a host that begins to use this backend cannot
// use the cloud. A host that already has a lease of this backend keeps it without a call of the cloud, because its pods
// are running and its routes may be in place. The keeper then reports what is wrong.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	claim := b.Env.Claim("", prev)
	leased := slices.ContainsFunc(claim.Endpoints, func(e subnet.Endpoint) bool { return e.Subnet.IsValid() })
	if leased && (len(b.Env.Used) == 0 && prev.BackendType == "" || slices.Contains(b.Env.Used, b.Type)) {
		return claim, nil
	}
	return claim, b.Cloud.Check(ctx)
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	p, err := b.Env.Programmer(ctx, b.Env.Scope())
	if err != nil {
		return nil, err
	}
	p.Base = b.Env.Base(own)
	return &network{b, p, b.StartKeeper(own, p.Notifier)}, nil
}

// StartKeeper starts a goroutine that keeps the routes of the cloud to this host right, until n is closed.
// The goroutine notifies n when it has a result.
func (b *Backend) StartKeeper(own subnet.Lease, n *backend.Notifier) *RouteKeeper {
	self := hostOf(&own)
	self.Addresses = append(self.Addresses, b.Env.Locals()...)
	r := &RouteKeeper{calls: b.Calls, routes: cloud.NewKeeper(cloud.KeeperConfig{
		Cloud: b.Cloud, Own: self, Networks: b.Env.Config.Prefixes(), Resync: b.Env.Resync, Tunnel: b.Overflow.Type != "",
		Connected: b.Env.Connected, Compared: n.Notify,
	})}
	n.Go(r.routes.Run)
	return r
}

// RouteKeeper is the part of a network that keeps routes in a cloud right (see StartKeeper). It compares the
// routes on a goroutine of its own, because a call of the cloud may take long.
type RouteKeeper struct {
	routes     *cloud.Keeper
	calls      *cloud.Calls
	complete   bool // backend.Set.Complete of the last set
	unreadable bool // backend.Set.Unreadable of the last set
}

// SetPeers tells the keeper the leases of the other hosts. It does nothing if peers names no change
// since the last call.
func (r *RouteKeeper) SetPeers(peers backend.Set) {
	if peers.All || len(peers.Changed) > 0 || peers.Complete != r.complete || peers.Unreadable != r.unreadable {
		r.complete = peers.Complete
		r.unreadable = peers.Unreadable
		r.routes.SetPeers(cloud.Peers{Hosts: hosts(peers), Complete: r.complete, Unreadable: r.unreadable})
	}
}

// Last returns the result of the last comparison without waiting. See cloud.Keeper.Last.
func (r *RouteKeeper) Last() (repaired int, compared bool, err error) { return r.routes.Last() }

// CloudRoutes returns the state of the routes to this host. It may be called at any time.
func (r *RouteKeeper) CloudRoutes() cloud.Report {
	report := r.routes.Report()
	report.Calls = r.calls.Counts()
	return report
}

// network implements backend.Network.
type network struct {
	*Backend
	*backend.Programmer
	*RouteKeeper
}

// firstComparison limits how long a pass waits for the first comparison with the cloud.
const firstComparison = 15 * time.Second

// Sync implements backend.Network. It waits up to firstComparison for the first comparison with the cloud.
// It returns an error if that comparison has not ended by then, or if the routes to this host are
// not in order. The keeper causes a further pass after each comparison.
func (n *network) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	o, failed := n.Programmer.Sync(ctx, peers)
	n.SetPeers(peers)
	ctx, cancel := context.WithTimeout(ctx, firstComparison)
	defer cancel()
	repaired, err := n.routes.Result(ctx)
	o.Repaired += repaired
	if cloud.Kind(err) == "quota" {
		err = fmt.Errorf("%w; or set Backend.Overflow, with which other hosts reach this one by a tunnel", err)
	}
	return o, oneline.Join(failed, err)
}

// Report implements backend.Network.
func (n *network) Report() backend.NetworkReport {
	r := n.Programmer.Report()
	routes := n.CloudRoutes()
	r.Cloud = &routes
	return r
}

// hosts includes the hosts whose lease is refused, marked, because the routes to them must stay.
func hosts(peers backend.Set) []cloud.Host {
	var all []cloud.Host
	for _, l := range peers.Leases {
		all = append(all, hostOf(l))
	}
	if peers.Refused != nil {
		// If one family of a lease is refused, its host is in the list a second time.
		for _, l := range peers.Refused() {
			h := hostOf(l)
			h.Refused = true
			all = append(all, h)
		}
	}
	return all
}

func hostOf(l *subnet.Lease) cloud.Host {
	h := cloud.Host{Subnets: l.Subnets()}
	for _, e := range l.Endpoints {
		h.Addresses = append(h.Addresses, e.PublicIP)
	}
	return h
}
