// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/kernel/tunnel/internal/packet"
)

// Device is an open TUN device (linux/if_tun.h). Reading it returns packets that the
// kernel routes to it. Unless Persist(true) was called, the kernel deletes the device
// when the last program closes it.
type Device struct {
	file *os.File
	raw  syscall.RawConn // raw connection of file
	name string
	// tcp and udp report which super-packets the kernel exchanges through the device.
	tcp, udp bool
}

// Usable returns an error if this process cannot create TUN devices.
func Usable() error {
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// OpenDevice creates a TUN device, or opens an existing persistent one. It must be called
// on a thread in the network namespace of the device. It returns EBUSY, wrapped, if
// another program has the device open, and EINVAL, wrapped, if the name belongs to a
// device of another kind.
func OpenDevice(name string) (*Device, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}

	flags := uint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	err = attach(fd, name, flags)
	if errors.Is(err, unix.EINVAL) { // a device that was created with several queues accepts only this flag
		err = attach(fd, name, flags|unix.IFF_MULTI_QUEUE)
	}

	if errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("%w: another program has it open", err)
	}
	if errors.Is(err, unix.EINVAL) {
		err = fmt.Errorf("%w: there is a device of that name which is no TUN device", err)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("open TUN device %s: %w", name, err)
	}
	return newDevice(fd)
}

func attach(fd int, name string, flags uint16) error {
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	req.SetUint16(flags)
	return unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
}

// AdoptDevice returns the device whose open descriptor is fd, which another process has
// opened with OpenDevice. The Device owns fd. If AdoptDevice returns an error, it closes fd.
func AdoptDevice(fd int) (*Device, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, oneline.Join(fmt.Errorf("adopt TUN device: %w", err), unix.Close(fd))
	}
	return newDevice(fd)
}

const maxPacket = 65535 // maximum size of an IP packet without jumbogram option

// newDevice wraps fd, and closes it after an error. fd must be attached to its device already: the
// runtime could not wait for it otherwise.
func newDevice(fd int) (*Device, error) {
	d := &Device{file: os.NewFile(uintptr(fd), "/dev/net/tun")}
	var err error
	if d.raw, err = d.file.SyscallConn(); err == nil {
		err = d.prepare(fd)
	}
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("set up TUN device %s: %w", d.name, err), d.file.Close())
	}
	return d, nil
}

func (d *Device) prepare(fd int) error {
	req, err := status(fd)
	if err != nil {
		return err
	}

	d.name = req.Name()
	flags := req.Uint16()
	if flags&unix.IFF_TUN == 0 || flags&unix.IFF_NO_PI == 0 || flags&unix.IFF_VNET_HDR == 0 {
		return errors.New("the device was not opened by flanneld")
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, packet.OffloadLen); err != nil {
		return fmt.Errorf("set header size: %w", err)
	}
	return d.setOffloads(fd)
}

// AcceptOwn makes the kernel accept IPv4 packets from the device whose source is an
// address of this host, such as ICMP errors. It must be called on a thread in the
// device's network namespace. If the kernel's setting cannot be written, AcceptOwn
// returns an error only if the setting is off.
func (d *Device) AcceptOwn() error {
	const sysctls = "/proc/sys/net/ipv4/conf"
	err := os.WriteFile(filepath.Join(sysctls, d.name, "accept_local"), []byte("1"), 0)
	if err == nil {
		return nil
	}
	for _, scope := range []string{d.name, "all"} { // one of them is sufficient
		if value, rerr := os.ReadFile(filepath.Join(sysctls, scope, "accept_local")); rerr == nil && string(value) == "1\n" {
			return nil
		}
	}
	return fmt.Errorf("make %s accept packets from addresses of this host: %w", d.name, err)
}

func (d *Device) setOffloads(fd int) error {
	const (
		checksum = unix.TUN_F_CSUM
		tcp      = unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN
		udp      = unix.TUN_F_USO4 | unix.TUN_F_USO6 // Linux 6.2
	)

	var err error
	for _, offloads := range []int{checksum | tcp | udp, checksum | tcp, 0} { // an older kernel supports fewer
		if err = unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads); err == nil {
			d.tcp = offloads&tcp != 0
			d.udp = offloads&udp != 0
			return nil
		}
	}
	return fmt.Errorf("set offloads: %w", err)
}

// Name returns the device's name.
func (d *Device) Name() string { return d.name }

// File returns the open descriptor. The Device owns it.
func (d *Device) File() *os.File { return d.file }

// Persist sets whether the device remains when no program has it open.
func (d *Device) Persist(on bool) error {
	err := d.control(func(fd int) error { return unix.IoctlSetInt(fd, unix.TUNSETPERSIST, map[bool]int{true: 1}[on]) })
	if err != nil {
		return fmt.Errorf("make TUN device %s persistent (%v): %w", d.name, on, err)
	}
	return nil
}

// Alive reports whether the device still exists under its name. Another program may
// have deleted or renamed it.
func (d *Device) Alive() bool {
	return d.control(func(fd int) error {
		req, err := status(fd)
		if err == nil && req.Name() != d.name {
			return errors.New("renamed")
		}
		return err
	}) == nil
}

// Close closes the device.
func (d *Device) Close() error { return d.file.Close() }

func status(fd int) (*unix.Ifreq, error) {
	req, err := unix.NewIfreq("")
	if err != nil {
		return nil, err
	}
	return req, unix.IoctlIfreq(fd, unix.TUNGETIFF, req)
}

func (d *Device) control(f func(fd int) error) error {
	var err error
	cerr := d.raw.Control(func(fd uintptr) { err = f(int(fd)) })
	return oneline.Join(cerr, err)
}

// deviceWriter writes packets, each with its offload header, to a device.
type deviceWriter struct {
	*fdWriter
	b []byte
}

func newDeviceWriter(d *Device) *deviceWriter {
	w := &deviceWriter{}
	w.fdWriter = newFDWriter(d.raw, func(fd uintptr) unix.Errno {
		_, _, errno := unix.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(w.b))), uintptr(len(w.b)))
		return errno
	})
	return w
}

func (w *deviceWriter) packet(b []byte) error {
	w.b = b
	return w.write()
}
