// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
)

// Host contains the WireGuard devices that run in this process. They outlive a network: when a
// network is closed, its devices continue with their peers, and the next network takes the devices
// over. So no packet is lost in between.
type Host struct {
	mu      sync.Mutex
	devices map[string]*userspaceDevice // by name
}

// NewHost returns a Host without devices. The caller closes it.
func NewHost() *Host { return &Host{devices: map[string]*userspaceDevice{}} }

// has reports whether a network uses the device that take returns.
func (h *Host) has(t tunnel, u underlay.Interface) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.devices[t.name]
	return d != nil && d.used && d.sendsFrom(u, t.locals(u))
}

// locals returns the addresses of this host from which the device of t sends on u.
func (t tunnel) locals(u underlay.Interface) (all []netip.Addr) {
	for _, f := range t.outer {
		if a, ok := u.Family(f); ok {
			all = append(all, a.Local)
		}
	}
	return all
}

func (u *userspaceDevice) sendsFrom(i underlay.Interface, local []netip.Addr) bool {
	return u.iface == i.Index && slices.Equal(u.local, local)
}

// take returns the device for t, which an earlier network may have left running. The caller starts it.
func (h *Host) take(t tunnel, mtu int, u underlay.Interface) (*userspaceDevice, error) {
	local := t.locals(u)
	err := h.closeIf(func(d *userspaceDevice) bool {
		if d.name == t.name {
			return !d.sendsFrom(u, local) // WireGuard remembers for each peer the address from which it sends
		}
		return !d.used && d.port == t.port
	})
	if err != nil {
		return nil, err
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.devices[t.name]
	if d == nil {
		d = &userspaceDevice{name: t.name, iface: u.Index, local: local}
		h.devices[t.name] = d
	}
	d.mtu = mtu
	d.port = t.port
	d.used = true
	return d, nil
}

// leave lets a device run until another network takes it or the Host closes it.
func (h *Host) leave(d *userspaceDevice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	d.used = false
}

// closeNamed closes devices, used or not, that devices of the kernel replace.
func (h *Host) closeNamed(names []string) error {
	return h.closeIf(func(d *userspaceDevice) bool { return slices.Contains(names, d.name) })
}

// CloseUnused closes the devices that no network uses.
func (h *Host) CloseUnused() error {
	return h.closeIf(func(d *userspaceDevice) bool { return !d.used })
}

// FreePorts closes the devices that no network uses and that listen on one of these UDP ports.
func (h *Host) FreePorts(ports []int) error {
	return h.closeIf(func(d *userspaceDevice) bool { return !d.used && slices.Contains(ports, d.port) })
}

// Close closes all devices. Their TUN devices stay.
func (h *Host) Close() error { return h.closeIf(func(*userspaceDevice) bool { return true }) }

func (h *Host) closeIf(f func(*userspaceDevice) bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for name, d := range h.devices {
		if f(d) {
			errs = append(errs, d.close())
			delete(h.devices, name)
		}
	}
	return oneline.Join(errs...)
}
