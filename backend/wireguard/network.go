package wireguard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"flanneld/backend"
	"flanneld/pkg/oneline"
	"flanneld/subnet"
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
	failed         bool // the last pass: nobody tells again of its changes
	now            func() instant

	changed chan struct{}
	stop    chan struct{}
	running sync.WaitGroup
}

// control is how devices are looked at and written.
type control interface {
	// Index returns the number of a device.
	Index(device string) (int, error)
	Device(name string) (*wgtypes.Device, error)
	ConfigureDevice(name string, c wgtypes.Config) error
	Close() error
}

// hostControl is that of this host.
type hostControl struct{ *wgctrl.Client }

// Index implements control.
func (hostControl) Index(device string) (int, error) {
	link, err := net.InterfaceByName(device)
	if err != nil {
		return 0, err
	}
	return link.Index, nil
}

// device is a tunnel as it was seen and written last.
type device struct {
	tunnel
	userspace *userspaceDevice // nil if it is the kernel's
	index     int              // another one is another device, without any peers
	peers     map[string]peer  // as they were wanted, by lease key
	swept     bool             // others are gone
	waiting   int              // peers that have another preshared key still

	handshakes handshakes
}

// Sync implements backend.Network. What cannot be made of one device, or of its
// address and route, keeps no peer of the other from its place.
func (n *network) Sync(ctx context.Context, peers backend.Set) (o backend.Outcome, err error) {
	defer func() { n.failed = err != nil }()
	if err := n.revive(ctx); err != nil {
		return backend.Outcome{}, err
	}
	o, failed := n.Programmer.Sync(ctx, peers)
	repaired, err := n.syncPeers(ctx, peers)
	o.Repaired += repaired
	if n.secret.waiting {
		o.Again = pskCheck
	}
	return o, oneline.Join(failed, err)
}

// revive starts the devices of this process that are not there, or have ended.
func (n *network) revive(ctx context.Context) error {
	for _, d := range n.devices {
		if d.userspace == nil {
			continue
		}
		fresh, err := d.userspace.ensure(ctx)
		if err != nil {
			return fmt.Errorf("run WireGuard device %s: %w", d.name, err)
		}
		if fresh {
			d.index = 0
		}
	}
	return nil
}

// syncPeers gives the devices their settings and peers, and returns how many
// of these somebody else had changed.
func (n *network) syncPeers(ctx context.Context, set backend.Set) (repaired int, err error) {
	psk, err := n.secret.read(ctx, n.config)
	if err != nil {
		return 0, err
	}
	waiting := 0
	var errs []error
	for _, d := range n.devices {
		s := settings{key: n.key, port: d.port, psk: psk, rotating: n.secret.rotating, keepalive: time.Duration(n.config.PersistentKeepaliveInterval) * time.Second}
		r, err := n.syncDevice(d, s, set)
		if err != nil {
			errs = append(errs, fmt.Errorf("configure %s: %w", d.name, err))
		}
		repaired += r
		waiting += d.waiting
	}
	if err := oneline.Join(errs...); err != nil {
		return repaired, err
	}
	n.secret.settle(ctx, waiting, set.Complete)
	return repaired, nil
}

func (n *network) syncDevice(d *device, s settings, set backend.Set) (repaired int, err error) {
	index, err := n.control.Index(d.name)
	if err != nil {
		return 0, err
	}
	whole := set.All || n.failed || len(set.Changed) == 0 || s.rotating || index != d.index || set.Complete && !d.swept
	change := diff{settings: s, want: map[wgtypes.Key]peer{}, known: map[wgtypes.Key]peer{}}
	next := map[string]peer{} // of the leases that may differ
	if whole {
		if change.have, err = n.control.Device(d.name); err != nil {
			return 0, err
		}
		change.sweep, change.ages = set.Complete, d.handshakes.look(n.now(), change.have.Peers)
		if index == d.index {
			for _, p := range d.peers {
				change.known[p.key] = p
			}
		}
		for key, l := range set.Leases {
			n.want(d, key, *l, next, change.want)
		}
		d.waiting = change.waiting()
	} else {
		change.have, change.sweep, change.remembered = &wgtypes.Device{PrivateKey: s.key, ListenPort: s.port}, true, true
		for _, key := range set.Changed {
			if p, ok := d.peers[key]; ok {
				change.known[p.key] = p
				change.have.Peers = append(change.have.Peers, asKept(p, s))
			}
			if l, ok := set.Leases[key]; ok {
				n.want(d, key, *l, next, change.want)
			}
		}
	}
	cfg, changed := change.config()
	if changed {
		if err := n.control.ConfigureDevice(d.name, cfg); err != nil {
			return 0, explain(err, s.port)
		}
		if d.userspace != nil {
			d.userspace.greeter.greet(n.key.PublicKey(), cfg.Peers)
		}
	}
	if whole && index == d.index && d.swept {
		repaired = foreign(cfg, change)
	}
	d.record(index, whole, set, next)
	return repaired, nil
}

func (n *network) want(d *device, key string, l subnet.Lease, next map[string]peer, want map[wgtypes.Key]peer) {
	if p, ok := n.peer(d.tunnel, l); ok {
		next[key], want[p.key] = p, p
	}
}

// asKept is a peer as it was written. Where it is now only the device knows.
func asKept(p peer, s settings) wgtypes.Peer {
	return wgtypes.Peer{
		PublicKey: p.key, PresharedKey: s.psk, PersistentKeepaliveInterval: s.keepalive,
		Endpoint: net.UDPAddrFromAddrPort(p.endpoint), AllowedIPs: ipNets(p.allowed),
	}
}

// record notes what the device has now.
func (d *device) record(index int, whole bool, set backend.Set, next map[string]peer) {
	d.index = index
	if whole {
		d.peers, d.swept = next, set.Complete
		return
	}
	for _, key := range set.Changed {
		delete(d.peers, key)
		if p, ok := next[key]; ok {
			d.peers[key] = p
		}
	}
}

// foreign counts the changes that put right what somebody else has done: those to
// peers that were wanted before as they are now.
func foreign(c wgtypes.Config, d diff) (count int) {
	for _, p := range c.Peers {
		before, known := d.known[p.PublicKey]
		now, wanted := d.want[p.PublicKey]
		same := wanted && known && before.endpoint == now.endpoint && slices.Equal(before.allowed, now.allowed) && p.Endpoint == nil
		rotated := d.rotating && p.PresharedKey != nil
		if p.Remove && !known || same && !rotated {
			count++
		}
	}
	return count
}

// explain says what an error of a device means.
func explain(err error, port int) error {
	// A device of this process answers with a number, of which wgctrl makes a text.
	inUse := fmt.Sprintf("errno=-%d", int(syscall.EADDRINUSE))
	if errors.Is(err, syscall.EADDRINUSE) || strings.HasSuffix(err.Error(), inUse) {
		return fmt.Errorf("another program listens on UDP port %d (Backend.ListenPort, Backend.ListenPortV6): %w", port, err)
	}
	return err
}

// Holdings implements backend.Inspector.
func (n *network) Holdings(key string) []backend.Holding {
	var hs []backend.Holding
	for _, d := range n.devices {
		if p, ok := d.peers[key]; ok {
			hs = append(hs, backend.Holding{Object: p.String() + " dev " + d.name, Present: true})
		}
	}
	return hs
}

// Changed implements backend.Network.
func (n *network) Changed() <-chan struct{} { return n.changed }

// Mode implements backend.Carrier.
func (n *network) Mode() string { return n.implementation }

// Dropped implements backend.Carrier: nobody counts.
func (*network) Dropped() map[string]uint64 { return nil }

// Close implements backend.Network.
func (n *network) Close() error {
	close(n.stop)
	errs := []error{n.Reconciler.Close()}
	if n.control != nil {
		errs = append(errs, n.control.Close())
	}
	for _, d := range n.devices {
		if d.userspace != nil {
			errs = append(errs, d.userspace.close())
		}
	}
	n.running.Wait()
	return oneline.Join(errs...)
}
