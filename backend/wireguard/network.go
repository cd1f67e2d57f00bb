// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/subnet"
)

// network implements backend.Network.
type network struct {
	*Backend
	*backend.Programmer
	*backend.Notifier
	key            wgtypes.Key
	control        control // nil until start
	devices        []*device
	implementation string // kernel or userspace
	secret         secret
	nat            *nat
	failed         bool // the last pass failed, and the next set does not repeat its changes
	now            func() instant
}

// Check implements backend.Network. The identities are the public keys. With one device for both
// families, a lease is unusable if it has two keys, or if it has no address that the device can
// send to.
func (n *network) Check(l subnet.Lease) ([]string, error) {
	var ids []string
	for _, e := range l.Endpoints {
		key, _, err := decodeData(e.Data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Family(), err)
		}
		if id := "public key " + key.String(); !slices.Contains(ids, id) {
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
	defer func() { n.failed = err != nil }()
	if err := n.ensureUserspace(ctx); err != nil {
		return backend.Outcome{}, err
	}
	peers = n.WithResized(peers) // may add keys to Changed; with an empty Changed, syncPeers would read all peers
	o, failed := n.Programmer.Sync(ctx, peers)
	repaired, err := n.syncPeers(ctx, peers)
	o.Repaired += repaired
	o.Again = n.again()
	return o, oneline.Join(failed, err)
}

// again returns the time after which the network needs another pass, because peers wait for the
// preshared key or devices must be read; 0 if neither.
func (n *network) again() (again time.Duration) {
	if n.secret.waiting {
		again = pskCheck
	}
	if n.nat.readBy != 0 {
		left := max(n.nat.readBy-n.now().steady, leastReadPause)
		if again == 0 || left < again {
			again = left
		}
	}
	return again
}

// ensureUserspace starts the devices of this process that do not run, and marks them as new.
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
			d.index = 0
		}
	}
	return nil
}

// syncPeers writes the settings and peers of all devices. It returns the number of repaired peers,
// see countRepairs. If a device cannot be written, syncPeers still writes the other one. If there
// is no preshared key to use, it writes nothing.
func (n *network) syncPeers(ctx context.Context, set backend.Set) (repaired int, err error) {
	psk, err := n.secret.read(ctx, n.config)
	if err != nil {
		return 0, err
	}
	n.nat.noteShared(set, set.All || n.failed) // a failed pass may have ended before it visited its changes
	now := n.now()
	p := pass{set, now, n.nat.readingDue(now.steady)}
	n.nat.share(ctx, p) // before the devices are read, because reading may take long
	waiting, wrote := 0, false
	var errs []error
	for _, d := range n.devices {
		s := settings{key: n.key, port: d.port, psk: psk, rotating: n.secret.rotating, keepalive: time.Duration(n.config.PersistentKeepaliveInterval) * time.Second}
		changed, r, err := n.syncDevice(d, s, p)
		if err != nil {
			errs = append(errs, fmt.Errorf("configure %s: %w", d.name, err))
		}
		wrote = wrote || changed
		repaired += r
		waiting += d.waiting
	}
	if err := oneline.Join(errs...); err != nil {
		return repaired, err
	}
	n.secret.setWaiting(ctx, waiting, set.Complete)
	n.nat.followPeers(p, wrote)
	return repaired, nil
}

// syncDevice makes the settings and peers of a device match the set of the pass. wrote reports
// whether it has changed a peer. repaired is the result of countRepairs, or 0 if the device was not
// read, is new, or may still have peers without a lease. If only the changed leases can need a
// write, syncDevice does not read the device: it trusts what it wrote in the last pass, because
// reading thousands of peers costs far more than changing one.
func (n *network) syncDevice(d *device, s settings, p pass) (wrote bool, repaired int, err error) {
	index, err := n.control.Index(d.name)
	if err != nil {
		return false, 0, err
	}
	set := p.set
	same := index == d.index // otherwise it is another device, without any peers
	full := set.All || n.failed || len(set.Changed) == 0 || s.rotating || !same || set.Complete && !d.unwantedRemoved || p.read
	var change diff
	var next map[string]peer // wanted peers of the leases that may differ, by lease key
	if full {
		if change, next, err = n.diffOfAll(d, s, p, same); err != nil {
			return false, 0, err
		}
		d.waiting = change.waiting()
	} else {
		change, next = n.diffOfChanged(d, s, set)
	}
	cfg, changed := change.config()
	if changed {
		if err := n.control.ConfigureDevice(d.name, cfg); err != nil {
			return false, 0, explainPortInUse(err, s.port)
		}
		if d.userspace != nil {
			d.userspace.initiator.initiate(n.key.PublicKey(), cfg.Peers, !same || !d.unwantedRemoved)
		}
	}
	if full && same && d.unwantedRemoved {
		repaired = countRepairs(cfg, change)
	}
	d.setPeers(index, full, set, next)
	return len(cfg.Peers) > 0, repaired, nil
}

// diffOfAll reads the device and compares it with all leases. same reports whether it is the device
// of the last pass. The returned map contains the wanted peers by lease key. diffOfAll also updates
// what d knows of its sessions, endpoints, names and trials.
func (n *network) diffOfAll(d *device, s settings, p pass, same bool) (diff, map[string]peer, error) {
	have, err := n.control.Device(d.name)
	if err != nil {
		return diff{}, nil, err
	}
	c := newDiff(s, have)
	c.removeUnwanted, c.ages = p.set.Complete, d.handshakes.ages(p.now, have.Peers)
	if same {
		for _, p := range d.peers {
			c.known[p.key] = p
		}
	}
	next := map[string]peer{}
	for key, l := range p.set.Leases {
		n.addWanted(d, key, *l, next, c.want)
	}
	if p.set.Complete && n.nat.sharer.interval != 0 {
		d.seen.note(p.now.steady, c, n.nat.worthSharing)
	}
	clear(d.named)
	n.nat.noteNames(d, c)
	c.try = d.trials.next(p.now.steady, c, func(p peer) []netip.AddrPort { return n.nat.candidates(d, p) })
	d.read = p.now.steady
	return c, next, nil
}

// diffOfChanged compares the changed leases with the peers that were last written for them. It
// does not read the device. The returned map contains the wanted peers of these leases by lease
// key.
func (n *network) diffOfChanged(d *device, s settings, set backend.Set) (diff, map[string]peer) {
	have := &wgtypes.Device{PrivateKey: s.key, ListenPort: s.port}
	c, next := newDiff(s, have), map[string]peer{}
	c.removeUnwanted, c.fromMemory = true, true
	for _, key := range set.Changed {
		if p, ok := d.peers[key]; ok {
			c.known[p.key] = p
			have.Peers = append(have.Peers, asWritten(p, s))
		}
		if l, ok := set.Leases[key]; ok {
			n.addWanted(d, key, *l, next, c.want)
		}
	}
	n.nat.noteNames(d, c)
	return c, next
}

// addWanted adds the peer for a lease to next, by the lease's key, and to want, by the public key.
// It adds nothing if the device does not serve the lease.
func (n *network) addWanted(d *device, key string, l subnet.Lease, next map[string]peer, want map[wgtypes.Key]peer) {
	if p, ok := n.peer(d.tunnel, l); ok {
		next[key], want[p.key] = p, p
	}
}

// asWritten returns a peer as it was written. Its endpoint may be out of date, because only the
// device knows the present one.
func asWritten(p peer, s settings) wgtypes.Peer {
	return wgtypes.Peer{
		PublicKey: p.key, PresharedKey: s.psk, PersistentKeepaliveInterval: s.keepalive,
		Endpoint: net.UDPAddrFromAddrPort(p.endpoint), AllowedIPs: ipNets(p.allowed),
	}
}

// countRepairs counts the changes in c that undo a change by another program: removals of peers
// that were not wanted before, and peers whose wanted state is the same as before, if c adds or changes them.
// Changes to a new preshared key or to another endpoint do not count.
func countRepairs(c wgtypes.Config, d diff) (count int) {
	for _, p := range c.Peers {
		before, known := d.known[p.PublicKey]
		now, wanted := d.want[p.PublicKey]
		same := wanted && known && before.endpoint == now.endpoint && slices.Equal(before.allowed, now.allowed)
		missing := !p.UpdateOnly // from the device
		rotated := d.rotating && p.PresharedKey != nil
		if p.Remove && !known || same && (missing || p.Endpoint == nil && !rotated) {
			count++
		}
	}
	return count
}

// Objects implements backend.Inspector. It reports what was written, and does not read the devices.
func (n *network) Objects(key string) []backend.ObjectReport {
	var hs []backend.ObjectReport
	for _, d := range n.devices {
		if p, ok := d.peers[key]; ok {
			hs = append(hs, backend.ObjectReport{Object: p.String() + " dev " + d.name, Present: true})
		}
	}
	return hs
}

// Republish implements backend.Publisher.
func (n *network) Republish() <-chan struct{} { return n.nat.republish }

// Published implements backend.Publisher. There is nothing to do after a write.
func (*network) Published(subnet.Claim) {}

// Mode implements backend.DataPath.
func (n *network) Mode() string { return n.implementation }

// Dropped implements backend.DataPath. WireGuard does not count drops.
func (*network) Dropped() map[string]uint64 { return nil }

// Close implements backend.Network. Devices of this process belong to the Host and continue to run
// for the next network.
func (n *network) Close() error {
	n.Notifier.Close()
	errs := []error{n.Reconciler.Close()}
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
