// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	wgdevice "golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// socketDir is the folder in which wg(8) and wgctrl search for devices in user space (the
// cross-platform userspace interface of WireGuard).
const socketDir = "/var/run/wireguard"

// tunDevice is the device file for creating TUN devices.
const tunDevice = "/dev/net/tun"

func accessError(err error) error {
	return fmt.Errorf("run WireGuard in user space: %w (it needs access to %s, and to write in %s: "+
		"with systemd install flanneld-wireguard.conf, in Kubernetes set flannel.privileged)", err, tunDevice, socketDir)
}

func checkAccess(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return accessError(err)
	}
	return f.Close()
}

// userspaceDevice is a WireGuard device in this process. Its TUN device, with addresses and routes,
// stays when the process ends. The device is configured through a socket, which wg(8) also finds.
type userspaceDevice struct {
	name  string
	mtu   int
	port  int          // UDP port that the network makes the device listen on
	iface int          // index of the external interface
	local []netip.Addr // addresses of the host from which the device sends
	used  bool         // a network has taken it from the Host, and has not left it yet

	dev        *wgdevice.Device // nil while it does not run
	packets    *reader          // of dev
	initiator  *initiator
	socket     net.Listener
	disconnect context.CancelFunc // disconnects the socket's clients
	clients    sync.WaitGroup     // goroutines that serve the clients
}

// ensureRunning reports with fresh whether it has started the device.
func (u *userspaceDevice) ensureRunning(ctx context.Context) (fresh bool, err error) {
	if u.dev != nil {
		select {
		case <-u.dev.Wait():
			klog.FromContext(ctx).Error(u.packets.ended(), "WireGuard in user space has ended, starting it again: packets are lost meanwhile", "device", u.name)
			if err := u.close(); err != nil {
				return false, err
			}
		default:
			return false, nil
		}
	}
	if err := u.start(ctx); err != nil {
		return false, oneline.Join(err, u.close())
	}
	return true, nil
}

func (u *userspaceDevice) start(ctx context.Context) error {
	if err := checkAccess(tunDevice); err != nil {
		return err
	}
	t, err := tun.CreateTUN(u.name, u.mtu)
	if err != nil {
		return err
	}
	if err := persist(t.File()); err != nil {
		return oneline.Join(err, t.Close())
	}

	log := klog.FromContext(ctx).WithValues("device", u.name)
	logf := func(level int) func(string, ...any) {
		return func(format string, args ...any) { log.V(level).Info(fmt.Sprintf(format, args...)) }
	}

	// The errors of wireguard-go concern single packets and handshakes, so they are logged as details.
	u.packets = &reader{Device: t}
	u.dev = wgdevice.NewDevice(u.packets, conn.NewStdNetBind(), &wgdevice.Logger{Verbosef: logf(6), Errorf: logf(4)})
	u.initiator = newInitiator(ctx, u.dev)
	if u.socket, err = listen(ctx, socketDir, u.name); err != nil {
		return err
	}
	u.serve(ctx)
	return u.dev.Up()
}

// persist makes the TUN device stay when it is closed.
func persist(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var ioctlErr error
	err = raw.Control(func(fd uintptr) { ioctlErr = unix.IoctlSetInt(int(fd), unix.TUNSETPERSIST, 1) })
	if err := oneline.Join(err, ioctlErr); err != nil {
		return fmt.Errorf("make TUN device persistent: %w", err)
	}
	return nil
}

// listen opens the control socket of a device in the folder dir.
func listen(ctx context.Context, dir, name string) (net.Listener, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, accessError(err)
	}

	// The caller has the daemon's lock, so a socket that is there belongs to a process that has ended.
	path := socketPath(dir, name)
	if err := socketLeftover(path).Remove(ctx); err != nil {
		return nil, accessError(err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, accessError(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, oneline.Join(err, l.Close())
	}
	return l, nil
}

// serve serves clients of the socket, which read and change the device's configuration, until close.
func (u *userspaceDevice) serve(ctx context.Context) {
	ctx, u.disconnect = context.WithCancel(context.WithoutCancel(ctx))
	u.clients.Go(func() {
		for {
			c, err := u.socket.Accept()
			if err != nil {
				return
			}
			u.clients.Go(func() {
				defer context.AfterFunc(ctx, func() { _ = c.Close() })()
				u.dev.IpcHandle(c) // until the client or ctx closes c
			})
		}
	})
}

// close returns when another device may take the place of this one. The TUN device stays.
func (u *userspaceDevice) close() error {
	var err error
	if u.socket != nil {
		err = u.socket.Close()
		u.disconnect() // otherwise a client with an unfinished request keeps the device's lock
	}
	if u.dev != nil {
		u.initiator.close()
		u.dev.Close()
	}

	u.clients.Wait()
	u.dev = nil
	u.packets = nil
	u.socket = nil
	u.initiator = nil
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
