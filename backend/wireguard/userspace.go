package wireguard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	wgdevice "golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"k8s.io/klog/v2"

	"flanneld/pkg/oneline"
)

// socketDir is where wg(8) and wgctrl look for devices that are not the kernel's.
const socketDir = "/var/run/wireguard"

// userspaceDevice is a WireGuard device in this process, on a TUN device that
// stays when the process ends, with its addresses and routes. It is configured
// like any other, by a socket that wg(8) finds, too.
type userspaceDevice struct {
	name string
	mtu  int

	dev     *wgdevice.Device // nil if it does not run
	socket  net.Listener
	members sync.WaitGroup // which serve the socket
	greeted time.Time      // when it last starts a handshake of itself
}

// handshakePause is the least time between two handshakes that one peer starts
// with another: WireGuard drops what comes faster than every 20 ms, and then
// nothing is sent for 5 s.
const handshakePause = 60 * time.Millisecond

// ensure starts the device unless it runs. fresh says that it did.
func (u *userspaceDevice) ensure(ctx context.Context) (fresh bool, err error) {
	if u.dev != nil {
		select {
		case <-u.dev.Wait(): // somebody has removed the TUN device
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
	t, err := tun.CreateTUN(u.name, u.mtu)
	if err != nil {
		return err
	}
	if err := persist(t.File()); err != nil {
		return oneline.Join(err, t.Close())
	}
	log := klog.FromContext(ctx).WithValues("device", u.name)
	say := func(level int) func(string, ...any) {
		return func(format string, args ...any) { log.V(level).Info(fmt.Sprintf(format, args...)) }
	}
	// Its errors are those of single packets and handshakes.
	u.dev = wgdevice.NewDevice(t, conn.NewStdNetBind(), &wgdevice.Logger{Verbosef: say(6), Errorf: say(4)})
	if u.socket, err = listen(ctx, u.name); err != nil {
		return err
	}
	u.members.Go(u.serve)
	return u.dev.Up()
}

// persist has the TUN device stay when it is closed.
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

// listen takes the socket over from a process that has ended. That no other
// daemon has the device is known by its lock.
func listen(ctx context.Context, name string) (net.Listener, error) {
	if err := os.MkdirAll(socketDir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(socketDir, name+".sock")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return l, os.Chmod(path, 0o600)
}

func (u *userspaceDevice) serve() {
	for {
		c, err := u.socket.Accept()
		if err != nil {
			return
		}
		u.members.Go(func() { u.dev.IpcHandle(c) })
	}
}

// greet starts a handshake with each of the peers that have just been given to a
// device in this process: they may have a session with the one before it. Two hosts
// that get to know each other may do so in the same instant, and handshakes that
// cross fail, with nothing sent for 5 s. So the host with the greater key, own, leaves
// the first turn to the other one, unless they are old: known from before the start.
func (d *device) greet(own wgtypes.Key, c wgtypes.Config, old bool) {
	u := d.userspace
	if u == nil {
		return
	}
	var later []*wgdevice.Peer
	for _, p := range c.Peers {
		peer := u.dev.LookupPeer(wgdevice.NoisePublicKey(p.PublicKey))
		switch {
		case peer == nil || p.UpdateOnly:
		case !old && bytes.Compare(own[:], p.PublicKey[:]) > 0:
			later = append(later, peer)
		default:
			_ = peer.SendHandshakeInitiation(false) // a failed one is tried again with the next packet
		}
	}
	u.greeted = time.Now()
	if len(later) > 0 {
		u.greeted = u.greeted.Add(handshakePause)
		u.greetLater(later)
	}
}

// greetLater greets those that have not done so themselves by then: after an answer
// to a handshake WireGuard does not send one of its own.
func (u *userspaceDevice) greetLater(peers []*wgdevice.Peer) {
	closed := u.dev.Wait()
	u.members.Go(func() {
		select {
		case <-closed:
			return
		case <-time.After(handshakePause):
		}
		for _, p := range peers {
			_ = p.SendHandshakeInitiation(false)
		}
	})
}

// close ends the device. The TUN device stays.
func (u *userspaceDevice) close() error {
	var err error
	if u.socket != nil {
		err = u.socket.Close()
	}
	// The next one, in this process or another, starts with the same.
	<-time.After(time.Until(u.greeted.Add(handshakePause)))
	if u.dev != nil {
		u.dev.Close()
	}
	u.members.Wait()
	u.dev, u.socket = nil, nil
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
