// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/kernel/tunnel"
	"github.com/flanneld/flanneld/pkg/report/health"
)

// Settings contains the options of a single host, in contrast to the configuration that
// all hosts share.
type Settings struct {
	// Check selects the source check. Empty means tunnel.CheckNetwork.
	Check tunnel.SourceCheck
	// Persist makes the device remain when the process ends.
	Persist bool
}

// Host contains the device and the tunnel of this process. They outlive a network: when the network
// is closed, the tunnel continues with its table of peers, and the next network takes the tunnel
// over, so that no packet is lost in between. If the tunnel has other ends than the next network
// needs, only the device and the table are taken over. Like kernel objects, the table belongs to the
// network that uses it now, which makes it match its own peers.
type Host struct {
	settings Settings
	counters tunnel.Counters

	mu           sync.Mutex
	device       *tunnel.Device
	stored       *tunnel.Device // device that systemd keeps, or that it has refused; nil if there is none
	tunnel       *tunnel.Tunnel // on device; nil if there is none
	used         bool           // a network has opened the tunnel and has not left it yet
	askedSystemd bool           // systemd was asked for the device of the last process
	icmpLogged   bool           // the log says that the kernel does not accept ICMP errors from the device
}

// fewCPUs is the number of CPUs up to which a second thread for packets is useless, because the pods
// need the other CPU.
const fewCPUs = 2

// OneThread reports whether one thread is best for the packets of this host. See backend.Entry.
func OneThread() bool { return runtime.NumCPU() <= fewCPUs }

// NewHost returns a Host without a device. The caller closes it.
func NewHost(s Settings) *Host { return &Host{settings: s} }

// Close closes the device. The kernel deletes the device with the routes to it, unless the
// device is persistent or systemd keeps it for the next start.
func (h *Host) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.closeDevice()
}

// CloseUnused closes tunnel and device unless a network uses them.
func (h *Host) CloseUnused() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used {
		return nil
	}
	return h.closeDevice()
}

// FreePorts closes tunnel and device if no network uses them and the tunnel listens on one of
// these UDP ports.
func (h *Host) FreePorts(ports []int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used || h.tunnel == nil || !slices.ContainsFunc(h.tunnel.Local, func(a netip.AddrPort) bool { return slices.Contains(ports, int(a.Port())) }) {
		return nil
	}
	return h.closeDevice()
}

func (h *Host) closeDevice() error {
	if h.device == nil {
		return nil
	}
	err := oneline.Join(h.closeTunnel(), h.device.Close())
	h.device = nil
	return err
}

func (h *Host) closeTunnel() error {
	if h.tunnel == nil {
		return nil
	}
	err := h.tunnel.Close()
	h.tunnel = nil
	return err
}

// openTunnel returns a tunnel between the device with that name and the peers, which may run already
// because an earlier network has left it.
func (h *Host) openTunnel(ctx context.Context, name string, c tunnel.Config) (*tunnel.Tunnel, error) {
	t, err := h.takeTunnel(ctx, name, c)
	if err != nil {
		return nil, err
	}

	h.store(ctx, t.Device) // not while mu is locked, because systemd may not read the message at once
	return t, nil
}

func (h *Host) takeTunnel(ctx context.Context, name string, c tunnel.Config) (*tunnel.Tunnel, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.openDevice(ctx, name); err != nil {
		return nil, err
	}

	c.Device = h.device
	c.Check = h.settings.Check
	c.Counters = &h.counters
	c.Table = tunnel.NewTable()
	if h.tunnel != nil {
		c.Table = h.tunnel.Table
	}
	if h.tunnel == nil || h.tunnel.Err() != nil || !sameEnds(h.tunnel.Config, c) {
		if err := h.closeTunnel(); err != nil {
			return nil, err
		}
		t, err := tunnel.Open(ctx, c)
		if err != nil {
			return nil, err
		}
		h.tunnel = t
	}
	h.used = true
	return h.tunnel, nil
}

func sameEnds(a, b tunnel.Config) bool {
	return a.Device == b.Device && slices.Equal(a.Local, b.Local) && slices.Equal(a.Own, b.Own) && slices.Equal(a.Networks, b.Networks)
}

// leaveTunnel lets the tunnel continue until another network takes it over or the Host closes it.
func (h *Host) leaveTunnel() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used = false
}

// store passes the device to systemd, once.
func (h *Host) store(ctx context.Context, d *tunnel.Device) {
	h.mu.Lock()
	known := h.stored == d
	h.stored = d
	h.mu.Unlock()

	if known {
		return
	}
	if err := keepDevice(ctx, d); err != nil {
		klog.FromContext(ctx).Error(err, "systemd does not keep the device: packets are lost during a restart")
	}
}

// openDevice makes h.device the device with that name, ready to carry packets.
func (h *Host) openDevice(ctx context.Context, name string) error {
	if err := h.attachDevice(ctx, name); err != nil {
		return err
	}
	if err := h.device.Persist(h.settings.Persist); err != nil {
		return oneline.Join(err, h.closeDevice())
	}
	if err := h.device.AcceptOwn(); err != nil && !h.icmpLogged {
		h.icmpLogged = true
		klog.FromContext(ctx).Error(err, "cannot send ICMP errors about IPv4 packets: connections over paths with a smaller MTU may hang")
	}
	return nil
}

// usable returns an error if attachDevice needs a new device and this process cannot create one.
func (h *Host) usable(name string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.has(name) || !h.askedSystemd && slices.Contains(strings.Split(os.Getenv("LISTEN_FDNAMES"), ":"), name) {
		return nil
	}
	return addRemedy(tunnel.Usable())
}

// has reports whether the present device has that name.
func (h *Host) has(name string) bool {
	return h.device != nil && h.device.Name() == name && h.device.Alive()
}

// attachDevice takes the present device, the one that systemd has kept, a persistent one, or a new one.
func (h *Host) attachDevice(ctx context.Context, name string) (err error) {
	if h.has(name) {
		return nil
	}
	_ = h.closeDevice()
	if h.device = h.keptDevice(ctx, name); h.device != nil {
		h.stored = h.device
		return nil
	}
	h.device, err = tunnel.OpenDevice(name)
	return addRemedy(err)
}

// keptDevice returns the device that systemd has kept for the last process, in the first call. systemd
// passes the descriptor as for socket activation (sd_listen_fds(3)).
func (h *Host) keptDevice(ctx context.Context, name string) *tunnel.Device {
	if h.askedSystemd {
		return nil
	}

	h.askedSystemd = true // systemd passes it once
	var found *tunnel.Device
	for _, file := range activation.FilesWithNames()[name] {
		fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		_ = file.Close()
		if err != nil {
			continue
		}
		device, err := tunnel.AdoptDevice(fd)
		if err != nil {
			continue
		}
		if found != nil || device.Name() != name || !device.Alive() {
			_ = device.Close()
			continue
		}
		klog.FromContext(ctx).Info("using the device that systemd has kept", "device", name)
		found = device
	}
	return found
}

// keepDevice passes the device to systemd (FDSTORE of sd_notify(3)), if the unit allows that.
func keepDevice(ctx context.Context, d *tunnel.Device) error {
	raw, err := d.File().SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = health.Notifier{}.Keep(ctx, d.Name(), int(fd)) })
	return oneline.Join(err, cerr)
}

// addRemedy says what helps against an error about opening the device.
func addRemedy(err error) error {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return fmt.Errorf("%w (load the module tun, and in a container map the device in)", err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w (flanneld needs CAP_NET_ADMIN, and in a container or unit access to this device)", err)
	}
	return err
}
