// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// sendTimeout limits how long a notification may take. A supervisor that does not read its socket
// lets sends block as soon as the kernel's queue is full, by default after 11 messages
// (net.unix.max_dgram_qlen).
const sendTimeout = time.Second

// Notifier sends notifications to systemd, or to another supervisor with the same protocol. It finds
// it by the environment variables that systemd has set, and does nothing without them. Each method
// also returns when ctx ends.
type Notifier struct{}

// Ready reports that the service has started. It repeats that until the supervisor takes the
// message, because systemd ends a service that has not reported it in time.
func (Notifier) Ready(ctx context.Context) error {
	for {
		err := notify(ctx, daemon.SdNotifyReady)
		if !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil {
			return err
		}
	}
}

// Stopping reports that the service is stopping.
func (Notifier) Stopping(ctx context.Context) error { return notify(ctx, daemon.SdNotifyStopping) }

// Keep asks systemd to keep the open file fd until the next start of the service, under
// the given name. It replaces the file that systemd keeps under that name. The next start
// finds the file among those that systemd passes to it. The unit must set
// FileDescriptorStoreMax=.
func (Notifier) Keep(ctx context.Context, name string, fd int) error {
	if err := notify(ctx, "FDSTOREREMOVE=1\nFDNAME="+name); err != nil {
		return err
	}
	return notify(ctx, "FDSTORE=1\nFDNAME="+name, fd)
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
			_ = notify(ctx, daemon.SdNotifyWatchdog)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// notify sends a message with open files to the supervisor.
func notify(ctx context.Context, state string, files ...int) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}

	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	if err := send(ctx, path, []byte(state), files); err != nil {
		return fmt.Errorf("notify systemd of %q: %w", state, err)
	}
	return nil
}

// send sends a message to the Unix socket at path. When ctx ends before, the error wraps
// os.ErrDeadlineExceeded.
func send(ctx context.Context, path string, message []byte, files []int) error {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()

	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}

	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}

	var failed error
	err = raw.Write(func(fd uintptr) bool {
		failed = unix.Sendmsg(int(fd), message, rights, nil, 0)
		return !errors.Is(failed, unix.EAGAIN)
	})
	return cmp.Or(err, failed)
}
