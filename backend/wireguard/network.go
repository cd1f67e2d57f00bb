// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// network implements backend.Network.
type network struct {
	*Backend
	*backend.Programmer
	key            wgtypes.Key
	control        control // nil until start
	devices        []*device
	implementation string // kernel or userspace
	secret         secret
	discovery      *discovery.Discovery
	lookups        *lookups
	look           time.Duration // when to read the devices again, on the steady clock; zero if there is no need
	failed         bool          // the last pass failed, and the next set does not repeat its changes
	republish      bool          // the endpoints that this host shares have changed in this pass
	now            func() discovery.Instant
}

// Check implements backend.Network. The identities are the public keys. With one device for both
// families, a lease is unusable if it has two keys, or if it has no address that the device can
// send to.
func (n *network) Check(l subnet.Lease) ([]string, error) {
	var ids []string
	for _, e := range l.Endpoints {
		d, err := decodeData(e.Data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Family(), err)
		}
		if id := "public key " + d.key.String(); !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	if n.config.Mode == modeSeparate {
		return ids, nil
	}
	if len(ids) > 1 {
		return nil, fmt.Errorf("it has two public keys, want one: Backend.Mode is %q", n.config.Mode)
	}

	for _, t := range n.tunnels() {
		if _, ok := n.peer(t, l); !ok {
			return nil, fmt.Errorf("it has no address that Backend.Mode %q can send to", n.config.Mode)
		}
	}
	return ids, nil
}

// Sync implements backend.Network. If the address, the route or the peers of one device cannot
// be written, Sync still writes the peers of the other device, and then returns the error.
func (n *network) Sync(ctx context.Context, peers backend.Set) (o backend.Outcome, err error) {
	n.republish = false
	defer func() { n.failed = err != nil }()
	if err := n.ensureUserspace(ctx); err != nil {
		return backend.Outcome{}, err
	}
	peers = n.WithResized(peers) // may add keys to Changed; with an empty Changed, syncPeers would read all peers
	o, failed := n.Programmer.Sync(ctx, peers)
	repaired, err := n.syncPeers(ctx, peers)
	o.Repaired += repaired
	o.Again = n.again()
	o.Republish = n.republish
	return o, oneline.Join(failed, err)
}

// again returns the time after which the network needs another pass, or 0.
func (n *network) again() (again time.Duration) {
	if n.secret.waiting { // some peers do not have the new preshared key
		again = pskCheck
	}
	if n.look != 0 { // when the devices must be read
		again = least.Of(again, max(n.look-n.now().Steady, discovery.LeastPause))
	}
	return again
}

// ensureUserspace starts the devices of this process that do not run.
func (n *network) ensureUserspace(ctx context.Context) error {
	for _, d := range n.devices {
		if d.userspace == nil {
			continue
		}
		fresh, err := d.userspace.ensureRunning(ctx)
		if err != nil {
			return fmt.Errorf("run WireGuard device %s: %w", d.name, err)
		}
		if fresh {
			d.index = 0 // it has no peers
		}
	}
	return nil
}

// syncPeers writes the settings and peers of all devices. If one cannot be written, it still writes
// the other one. For repaired see countRepairs.
func (n *network) syncPeers(ctx context.Context, set backend.Set) (repaired int, err error) {
	psk, err := n.secret.read(ctx, n.config)
	if err != nil {
		return 0, err
	}

	now := n.now()
	n.learn(ctx, now.Steady, set)
	p := pass{Set: set, now: now, read: set.All || n.failed || len(set.Changed) == 0 || n.secret.rotating || n.look != 0 && now.Steady >= n.look}
	read := true
	wrote := false
	waiting := 0
	var errs []error
	for i, d := range n.devices {
		s := settings{key: n.key, port: d.port, psk: psk, rotating: n.secret.rotating, keepalive: time.Duration(n.config.PersistentKeepaliveInterval) * time.Second}
		full, changes, r, err := n.syncDevice(i, s, p)
		if err != nil {
			errs = append(errs, fmt.Errorf("configure %s: %w", d.name, err))
		}
		read = read && full
		wrote = wrote || changes
		repaired += r
		waiting += d.waiting
	}

	for host, known := range n.discovery.Lookups() {
		n.lookups.start(host, known)
	}
	if err := oneline.Join(errs...); err != nil {
		return repaired, err
	}

	n.secret.setWaiting(ctx, waiting, set.Complete)
	n.look = n.discovery.Plan(now.Steady, read, wrote, set.Complete)
	return repaired, nil
}

// learn gives the discovery what others have said since the last pass, and publishes what it shares.
func (n *network) learn(ctx context.Context, now time.Duration, set backend.Set) {
	for host, addrs := range n.lookups.take() {
		n.discovery.Answer(now, host, addrs)
	}
	n.discovery.Hear(set.Leases, set.Changed, set.All || n.failed) // a failed pass may have ended before it visited its changes
	if !set.Complete {
		return
	}
	if shared, changed := n.discovery.Publish(now); changed {
		n.published.Store(&shared)
		n.republish = true
		klog.FromContext(ctx).Info("sharing the endpoints of peers behind NAT in this host's lease", "endpoints", len(shared))
	}
}

// pass contains the input of one pass over the devices.
type pass struct {
	backend.Set
	now  discovery.Instant
	read bool // every device has to be read
}

// device is a tunnel with the state that the passes have written to it.
type device struct {
	tunnel
	userspace       *userspaceDevice          // nil if the kernel implements it
	index           int                       // index of the interface; if it changes, the device is a new one, without any peers
	peers           map[string]discovery.Peer // wanted peers, by lease key
	unwantedRemoved bool                      // peers without a lease were removed from this device
	waiting         int                       // number of peers that do not have the present preshared key yet
}

// syncDevice makes the settings and peers of a device match the set of the pass. read reports whether
// it has read the device, and wrote whether it has changed a peer.
func (n *network) syncDevice(number int, s settings, p pass) (read, wrote bool, repaired int, err error) {
	d := n.devices[number]
	index, err := n.control.Index(d.name)
	if err != nil {
		return false, false, 0, err
	}

	// Reading thousands of peers costs far more than changing one. So if only the changed leases can
	// need a write, what the last pass has written counts as what the device has.
	same := index == d.index
	read = p.read || !same || p.Complete && !d.unwantedRemoved
	c := diff{
		have: &wgtypes.Device{PrivateKey: s.key, ListenPort: s.port}, want: discovery.Peers{}, known: discovery.Peers{},
		settings: s, fromMemory: !read, removeUnwanted: p.Complete || !read,
	}
	keys := p.Changed
	if read {
		if c.have, err = n.control.Device(d.name); err != nil {
			return false, false, 0, err
		}
		keys = slices.Collect(maps.Keys(p.Leases))
		if same {
			for _, known := range d.peers {
				c.known[known.Key] = known
			}
		}
	}

	next := map[string]discovery.Peer{} // wanted peers of the leases that may differ
	for _, key := range keys {
		if known, ok := d.peers[key]; ok && !read {
			c.known[known.Key] = known
			c.have.Peers = append(c.have.Peers, asWritten(known, s))
		}
		if l, ok := p.Leases[key]; ok {
			if w, ok := n.peer(d.tunnel, *l); ok {
				next[key] = w
				c.want[w.Key] = w
			}
		}
	}
	if read {
		c.ages, c.try = n.discovery.Observe(p.now, number, c.have.Peers, c.want, p.Complete)
		d.waiting = c.waiting()
	} else {
		n.discovery.Meet(p.now.Steady, c.want)
	}

	cfg, changed := c.config()
	if changed {
		if err := n.control.ConfigureDevice(d.name, cfg); err != nil {
			return read, false, 0, explainPortInUse(err, s.port)
		}
		if d.userspace != nil {
			d.userspace.initiator.initiate(n.key.PublicKey(), cfg.Peers, c.replaced(), !same || !d.unwantedRemoved)
		}
	}
	if read && same && d.unwantedRemoved { // otherwise a difference is not the work of another program
		repaired = countRepairs(cfg, c)
	}

	d.index = index
	if read {
		clear(d.peers)
		d.unwantedRemoved = p.Complete
	}
	for _, key := range keys {
		delete(d.peers, key)
	}
	maps.Copy(d.peers, next)
	return read, len(cfg.Peers) > 0, repaired, nil
}

// asWritten returns a peer as it was written. Only the device knows its present endpoint.
func asWritten(p discovery.Peer, s settings) wgtypes.Peer {
	return wgtypes.Peer{
		PublicKey: p.Key, PresharedKey: s.psk, PersistentKeepaliveInterval: s.keepalive,
		Endpoint: net.UDPAddrFromAddrPort(p.Endpoint), AllowedIPs: ipNets(p.Allowed),
	}
}

// countRepairs counts the changes in c that undo a change by another program: removals of peers that
// this process has not added, and writes of peers that it wants as before.
func countRepairs(c wgtypes.Config, d diff) (count int) {
	for _, p := range c.Peers {
		before, known := d.known[p.PublicKey]
		now, wanted := d.want[p.PublicKey]
		same := wanted && known && before.Endpoint == now.Endpoint && slices.Equal(before.Allowed, now.Allowed)
		missing := !p.UpdateOnly // from the device
		rotated := d.rotating && p.PresharedKey != nil

		// A new preshared key or endpoint is not the work of another program.
		if p.Remove && !known || same && (missing || p.Endpoint == nil && !rotated) {
			count++
		}
	}
	return count
}

// objects implements backend.NetworkReport.Objects. It reports what was written, and does not read the devices.
func (n *network) objects(key string) (all []status.Object) {
	for _, d := range n.devices {
		if p, ok := d.peers[key]; ok {
			all = append(all, status.Object{Text: p.String() + " dev " + d.name, Present: true})
		}
	}
	return all
}

// Report implements backend.Network. WireGuard does not count drops.
func (n *network) Report() backend.NetworkReport {
	r := n.Programmer.Report()
	r.Objects = n.objects
	r.Mode = n.implementation
	return r
}

// Close implements backend.Network. Devices of this process belong to the Host and continue to run
// for the next network.
func (n *network) Close() error {
	errs := []error{n.Programmer.Close()}
	if n.control != nil {
		errs = append(errs, n.control.Close())
	}
	for _, d := range n.devices {
		if d.userspace != nil {
			n.host.leave(d.userspace)
		}
	}
	return oneline.Join(errs...)
}
