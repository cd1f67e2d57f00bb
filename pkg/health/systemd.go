package health

import (
	"context"
	"fmt"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Notifier tells systemd about the service, by the environment that systemd
// gave it. Without that environment it does nothing.
type Notifier struct{}

// Ready says that the service is up.
func (Notifier) Ready() error { return notify(daemon.SdNotifyReady) }

// Stopping says that the service goes down.
func (Notifier) Stopping() error { return notify(daemon.SdNotifyStopping) }

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
