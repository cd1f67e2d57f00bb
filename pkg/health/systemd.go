package health

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// Notifier tells systemd about the service, by the environment that systemd
// gave it. Without that environment it does nothing.
type Notifier struct{}

// Ready says that the service is up.
func (Notifier) Ready() error { return notify(daemon.SdNotifyReady) }

// Stopping says that the service goes down.
func (Notifier) Stopping() error { return notify(daemon.SdNotifyStopping) }

// Keep has systemd keep the open file fd for the next start of the service,
// under the given name and in place of what it has kept under it, if the unit
// has FileDescriptorStoreMax=. The next start finds it among the files that
// systemd passes on.
func (Notifier) Keep(name string, fd int) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if err := notify("FDSTOREREMOVE=1\nFDNAME=" + name); err != nil {
		return err
	}
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(sock)
		err = unix.Sendmsg(sock, []byte("FDSTORE=1\nFDNAME="+name), unix.UnixRights(fd), &unix.SockaddrUnix{Name: path}, 0)
	}
	if err != nil {
		return fmt.Errorf("give %s to systemd: %w", name, err)
	}
	return nil
}

// Watchdog pings systemd's watchdog, if the unit asks for that, at half its
// interval while s is alive. It blocks until ctx ends; it returns nil then,
// and at once if the unit does not ask. A failed ping does not end it: if
// pings keep failing systemd restarts the service.
func (Notifier) Watchdog(ctx context.Context, s *Status) error {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("read systemd watchdog settings: %w", err)
	}
	if interval == 0 {
		return nil
	}
	tick := time.NewTicker(max(interval/2, time.Millisecond))
	defer tick.Stop()
	for {
		if s.Alive() == nil {
			_ = notify(daemon.SdNotifyWatchdog)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func notify(state string) error {
	if _, err := daemon.SdNotify(false, state); err != nil {
		return fmt.Errorf("notify systemd of %s: %w", state, err)
	}
	return nil
}
