// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Kernel is an in-memory implementation of dataplane.Kernel. It is safe for concurrent
// use.
type Kernel struct {
	mu      sync.Mutex
	devices map[string]*device
	routes  table

	monitors []*monitor
	foreign  int // number of calls that made changes of other programs
	silent   int // number of times that routes may have been deleted without an announcement
}

// monitor announces what other programs have changed since the last Drain, but not the steps in between. The
// real kernel announces every step, with the same effect on a cache, and some of the caller's own writes.
// Without them, a cache must be right by what it knows about its own writes.
type monitor struct {
	kernel  *Kernel
	scope   dataplane.Scope
	ready   wait.Signal
	seen    dataplane.State
	foreign int // counters of the kernel at the last Drain
	silent  int
	events  []dataplane.Event // since the last Drain
	lost    bool
}

// device is a link, with the objects that the kernel deletes together with it. Its routes
// are in Kernel.routes.
type device struct {
	dataplane.Link
	addrs  []netip.Prefix
	neighs map[netip.Addr]dataplane.MAC
	fdb    map[dataplane.MAC]dataplane.FDB
}

var _ dataplane.Kernel = (*Kernel)(nil)

// New returns a kernel with the device eth0, which is up and has the addresses 192.168.77.1/24 and
// fd00:77::1/64.
func New() *Kernel {
	k := &Kernel{devices: map[string]*device{}}
	eth0 := k.newDevice(dataplane.Link{Name: "eth0", Kind: "veth", MTU: 1500})
	eth0.addrs = []netip.Prefix{netip.MustParsePrefix("192.168.77.1/24"), netip.MustParsePrefix("fd00:77::1/64")}
	k.up(eth0)
	return k
}

func (k *Kernel) newDevice(l dataplane.Link) *device {
	d := &device{Link: l, neighs: map[netip.Addr]dataplane.MAC{}, fdb: map[dataplane.MAC]dataplane.FDB{}}
	k.devices[l.Name] = d
	return d
}

// Read implements dataplane.Kernel.
func (k *Kernel) Read(ctx context.Context, s dataplane.Scope) (dataplane.State, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return dataplane.NewState(), err
	}
	return k.read(s), nil
}

// read is Read for a caller that holds k.mu.
func (k *Kernel) read(s dataplane.Scope) dataplane.State {
	state := dataplane.NewState()
	for _, name := range s.Devices {
		d, ok := k.devices[name]
		if !ok {
			continue
		}

		link := d.Link
		if !s.TxChecksum {
			link.TxChecksum = dataplane.OffloadAuto
		}

		state.Add(link)
		if len(s.Networks) == 0 {
			continue
		}

		for _, a := range d.addrs {
			if s.InNetworks(prefix.Host(a.Addr())) {
				state.Add(dataplane.Addr{Dev: name, Prefix: a})
			}
		}

		for ip, mac := range d.neighs {
			if s.InNetworks(prefix.Host(ip)) {
				state.Add(dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: name, IP: ip}, MAC: mac})
			}
		}

		for _, f := range d.fdb {
			if f.MAC.IsUnicast() {
				state.Add(f)
			}
		}
	}

	for _, r := range k.routes {
		if len(s.Networks) > 0 && s.Shows(r) && (!s.Connected || r.Protocol == protoKernel) {
			state.Add(r)
		}
	}
	return state
}

// Apply implements dataplane.Kernel.
func (k *Kernel) Apply(ctx context.Context, ops []dataplane.Op) []dataplane.OpError {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer k.announce()
	for _, m := range k.monitors { // the changes of others; the caller's own are not announced
		m.observe()
		defer func() { m.seen = k.read(m.scope) }()
	}
	var failed []dataplane.OpError
	for _, op := range ops {
		err := ctx.Err()
		switch {
		case err != nil:
		case op.Delete:
			k.remove(op.Object)
		case op.Exclusive && k.taken(op.Object):
			err = syscall.EEXIST
		default:
			err = k.put(op.Object)
		}
		if err != nil {
			failed = append(failed, dataplane.OpError{Op: op, Err: err})
		}
	}
	return failed
}

// OnLink implements dataplane.Kernel.
func (k *Kernel) OnLink(_ context.Context, dst netip.Addr, external string) (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, d := range k.devices {
		if slices.ContainsFunc(d.addrs, func(a netip.Prefix) bool { return a.Addr() == dst }) {
			return "", nil
		}
	}

	var best dataplane.Route
	for _, r := range k.routes {
		if r.Dst.Contains(dst) && (!best.Dst.IsValid() || r.Dst.Bits() > best.Dst.Bits()) {
			best = r
		}
	}
	if best.Type != dataplane.Unicast || best.Gateway.IsValid() || best.Multipath || !dataplane.IsNetwork(best.Dst) ||
		best.Dev != external && best.Protocol != protoKernel {
		return "", nil
	}
	return best.Dev, nil
}

// announce wakes the monitors. The caller holds k.mu.
func (k *Kernel) announce() {
	for _, m := range k.monitors {
		m.ready.Send()
	}
}

func (k *Kernel) put(o dataplane.Object) error {
	switch o := o.(type) {
	case dataplane.Link:
		return k.putLink(o)
	case dataplane.Addr:
		return k.putAddr(o)
	case dataplane.Neigh:
		return k.putNeigh(o)
	case dataplane.FDB:
		o.Override = false
		return k.putFDB(o)
	case dataplane.Route:
		return k.putRoute(o)
	}
	return errors.ErrUnsupported
}

func (k *Kernel) putLink(want dataplane.Link) error {
	if _, ok := k.devices[want.VXLAN.Underlay]; !ok {
		return fmt.Errorf("underlay device %s: %w", want.VXLAN.Underlay, syscall.ENODEV)
	}

	d, ok := k.devices[want.Name]
	switch {
	case !ok && want.Kind != "vxlan":
		return fmt.Errorf("cannot create a link of type %q", want.Kind)
	case !ok && k.vxlanTaken(want.VXLAN):
		return syscall.EEXIST
	case !ok:
		d = k.newDevice(dataplane.Link{Name: want.Name, TxChecksum: dataplane.OffloadOn})
	case !d.Compatible(want):
		return fmt.Errorf("cannot change the existing %s device into the wanted one", d.Kind)
	case d.MAC != want.MAC: // like NETDEV_CHANGEADDR
		clear(d.neighs)
	}

	up := d.Up
	offload := d.TxChecksum
	d.Link = want
	d.Up = up
	if want.TxChecksum == dataplane.OffloadAuto {
		d.TxChecksum = offload
	}
	if want.Up && !up {
		k.up(d)
	}
	return nil
}

func (k *Kernel) vxlanTaken(v dataplane.VXLAN) bool {
	for _, d := range k.devices {
		if d.Kind == "vxlan" && d.VXLAN.VNI == v.VNI && d.VXLAN.Port == v.Port && d.VXLAN.GBP == v.GBP && d.VXLAN.Local.Is6() == v.Local.Is6() {
			return true
		}
	}
	return false
}

func (k *Kernel) putAddr(a dataplane.Addr) error {
	d, ok := k.devices[a.Dev]
	if !ok {
		return syscall.ENODEV
	}

	// A device has an IPv6 address once, and a put does not change its prefix length.
	if slices.ContainsFunc(d.addrs, func(have netip.Prefix) bool {
		return have == a.Prefix || have.Addr() == a.Prefix.Addr() && have.Addr().Is6()
	}) {
		return nil
	}

	d.addrs = append(d.addrs, a.Prefix)
	k.connect(d, a.Prefix)
	return nil
}

func (k *Kernel) putNeigh(n dataplane.Neigh) error {
	d, ok := k.devices[n.Dev]
	if !ok {
		return syscall.ENODEV
	}
	d.neighs[n.IP] = n.MAC
	return nil
}

func (k *Kernel) putFDB(f dataplane.FDB) error {
	d, ok := k.devices[f.Dev]
	switch {
	case !ok:
		return syscall.ENODEV
	case d.Kind != "vxlan":
		return syscall.EOPNOTSUPP
	case d.VXLAN.Local.Is6() != f.Dst.Is6():
		return syscall.EAFNOSUPPORT
	}
	d.fdb[f.MAC] = f
	return nil
}

func (k *Kernel) putRoute(r dataplane.Route) error {
	if err := k.usable(r); err != nil {
		return err
	}
	k.routes.replace(r)
	return nil
}

// taken reports whether o is a route, and a route with its destination, metric and TOS
// exists.
func (k *Kernel) taken(o dataplane.Object) bool {
	r, ok := o.(dataplane.Route)
	return ok && slices.ContainsFunc(k.routes, func(have dataplane.Route) bool { return sameKey(have, r) })
}

// usable returns the error with which the kernel refuses r, or nil if it accepts r.
func (k *Kernel) usable(r dataplane.Route) error {
	if r.Dev == "" {
		return nil
	}

	d, ok := k.devices[r.Dev]
	if !ok {
		return syscall.ENODEV
	}
	if r.Gateway.IsValid() && !r.OnLink && !k.routes.reaches(r.Dev, r.Gateway) {
		if r.Dst.Addr().Is4() {
			return syscall.ENETUNREACH
		}
		return syscall.EHOSTUNREACH
	}
	if !d.Up {
		return syscall.ENETDOWN
	}
	return nil
}

// remove removes o if it exists.
func (k *Kernel) remove(o dataplane.Object) {
	switch o := o.(type) {
	case dataplane.Link:
		k.removeLink(o.Name)
	case dataplane.Addr:
		k.removeAddr(o)
	case dataplane.Neigh:
		if d, ok := k.devices[o.Dev]; ok {
			delete(d.neighs, o.IP)
		}

	case dataplane.FDB:
		if d, ok := k.devices[o.Dev]; ok {
			delete(d.fdb, o.MAC)
		}
	case dataplane.Route:
		k.routes.remove(o)
	}
}

// removeLink removes a device, the objects on it and the vxlan devices above it.
func (k *Kernel) removeLink(name string) {
	delete(k.devices, name)
	k.routes.removeDev(name)
	k.silent++
	for _, d := range k.devices {
		if d.Kind == "vxlan" && d.VXLAN.Underlay == name {
			k.removeLink(d.Name)
		}
	}
}

func (k *Kernel) removeAddr(a dataplane.Addr) {
	d, ok := k.devices[a.Dev]
	if !ok || !slices.Contains(d.addrs, a.Prefix) {
		return
	}
	d.addrs = slices.DeleteFunc(d.addrs, func(p netip.Prefix) bool { return p == a.Prefix })
	k.silent++
	if !slices.ContainsFunc(d.addrs, func(p netip.Prefix) bool { return p.Masked() == a.Prefix.Masked() }) {
		k.routes.remove(connected(d.Name, a.Prefix))
	}
}

// connected returns the route that the kernel creates for an address.
func connected(dev string, p netip.Prefix) dataplane.Route {
	r := dataplane.Route{RouteKey: dataplane.RouteKey{Dst: p.Masked(), Type: dataplane.Unicast}, Dev: dev, Protocol: protoKernel}
	if p.Addr().Is6() {
		r.Priority = 256
	}
	return r
}

// connect creates the connected route for p, if the kernel would create one.
func (k *Kernel) connect(d *device, p netip.Prefix) {
	if r := connected(d.Name, p); d.Up && (p.Addr().Is6() || !p.IsSingleIP()) && !slices.Contains(k.routes, r) {
		k.routes.insert(r)
	}
}

func (k *Kernel) up(d *device) {
	d.Up = true
	for _, a := range d.addrs {
		k.connect(d, a)
	}
}

// down sets a device down. It deletes its routes, neighbours and IPv6 addresses. The FDB
// stays.
func (k *Kernel) down(d *device) {
	d.Up = false
	k.routes.removeDev(d.Name)
	k.silent++
	clear(d.neighs)
	d.addrs = slices.DeleteFunc(d.addrs, func(p netip.Prefix) bool { return p.Addr().Is6() })
}
