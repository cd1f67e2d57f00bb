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
	devices map[string]*hostDevice // by name
}

// hostDevice is a device in this process, with the settings of the network that took it last.
type hostDevice struct {
	userspaceDevice
	port  int          // UDP port that the network makes the device listen on
	iface int          // index of the external interface
	local []netip.Addr // addresses of the host from which the device sends
	used  bool         // a network has taken it and has not left it yet
}

// NewHost returns a Host without devices. The caller closes it.
func NewHost() *Host { return &Host{devices: map[string]*hostDevice{}} }

// take returns the device for t, which an earlier network may have left running. The caller starts it.
func (h *Host) take(t tunnel, mtu int, u underlay.Interface) (*userspaceDevice, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var local []netip.Addr
	for _, f := range t.outer {
		if a, ok := u.Family(f); ok {
			local = append(local, a.Local)
		}
	}

	err := h.closeIf(func(d *hostDevice) bool {
		if d.name == t.name {
			// WireGuard remembers for each peer the address from which it sends.
			return d.iface != u.Index || !slices.Equal(d.local, local)
		}
		return !d.used && d.port == t.port
	})
	if err != nil {
		return nil, err
	}

	d := h.devices[t.name]
	if d == nil {
		d = &hostDevice{userspaceDevice: userspaceDevice{name: t.name}}
		h.devices[t.name] = d
	}

	d.mtu = mtu
	d.port = t.port
	d.iface = u.Index
	d.local = local
	d.used = true
	return &d.userspaceDevice, nil
}

// leave lets a device run until another network takes it or the Host closes it.
func (h *Host) leave(u *userspaceDevice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if d := h.devices[u.name]; d != nil && &d.userspaceDevice == u {
		d.used = false
	}
}

// closeNamed closes devices, used or not, that devices of the kernel replace.
func (h *Host) closeNamed(names []string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.closeIf(func(d *hostDevice) bool { return slices.Contains(names, d.name) })
}

// CloseUnused closes the devices that no network uses.
func (h *Host) CloseUnused() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.closeIf(func(d *hostDevice) bool { return !d.used })
}

// FreePorts closes the devices that no network uses and that listen on one of these UDP ports.
func (h *Host) FreePorts(ports []int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.closeIf(func(d *hostDevice) bool { return !d.used && slices.Contains(ports, d.port) })
}

// Close closes all devices. Their TUN devices stay.
func (h *Host) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.closeIf(func(*hostDevice) bool { return true })
}

// The caller holds h.mu.
func (h *Host) closeIf(f func(*hostDevice) bool) error {
	var errs []error
	for name, d := range h.devices {
		if f(d) {
			errs = append(errs, d.close())
			delete(h.devices, name)
		}
	}
	return oneline.Join(errs...)
}
