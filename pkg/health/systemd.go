// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// Notifier sends notifications to systemd. It finds systemd by the environment variables
// that systemd has set, and does nothing without them.
type Notifier struct{}

// Ready reports that the service has started.
func (Notifier) Ready() error { return notify(daemon.SdNotifyReady) }

// Stopping reports that the service is stopping.
func (Notifier) Stopping() error { return notify(daemon.SdNotifyStopping) }

// Keep asks systemd to keep the open file fd until the next start of the service, under
// the given name. It replaces the file that systemd keeps under that name. The next start
// finds the file among those that systemd passes to it. The unit must set
// FileDescriptorStoreMax=.
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

// Watchdog pings systemd's watchdog at half its interval while s is alive, until ctx
// ends. It returns nil at that point, or at once if the unit sets no watchdog. It returns
// an error if the interval that systemd has set cannot be read. It ignores a failed ping:
// if pings keep failing, systemd restarts the service.
func (Notifier) Watchdog(ctx context.Context, s Source) error {
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
