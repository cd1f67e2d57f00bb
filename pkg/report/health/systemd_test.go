// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// listenNotify listens like systemd. next returns the next message, or an error if there is
// none within wait.
func listenNotify(t *testing.T) (next func(wait time.Duration) (string, error)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return func(wait time.Duration) (string, error) {
		if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return "", err
		}
		buf := make([]byte, 256)
		n, err := conn.Read(buf)
		return string(buf[:n]), err
	}
}

func TestNotify(t *testing.T) {
	next := listenNotify(t)
	for _, tt := range []struct {
		send func(context.Context) error
		want string
	}{
		{Notifier{}.Ready, "READY=1"},
		{Notifier{}.Stopping, "STOPPING=1"},
	} {
		if err := tt.send(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got, err := next(5 * time.Second); got != tt.want {
			t.Errorf("systemd got %q (%v), want %q", got, err, tt.want)
		}
	}
}

// TestDeafSupervisor sends messages that the supervisor never reads, until its queue is full. Each
// must then return after its deadline, except READY=1, which must arrive when there is room again.
func TestDeafSupervisor(t *testing.T) {
	next := listenNotify(t)
	sent := 0
	for ; ; sent++ {
		if err := (Notifier{}).Stopping(t.Context()); errors.Is(err, os.ErrDeadlineExceeded) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := (Notifier{}).Keep(t.Context(), "device", 0); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Keep() = %v, want the end of its deadline", err)
	}
	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (Notifier{}).Ready(stopped); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Ready() = %v after the end of its context", err)
	}

	done := make(chan error, 1)
	go func() { done <- Notifier{}.Ready(t.Context()) }()
	for range sent {
		if got, err := next(5 * time.Second); got != "STOPPING=1" {
			t.Fatalf("the supervisor got %q (%v), want STOPPING=1", got, err)
		}
	}
	if got, err := next(5 * time.Second); got != "READY=1" {
		t.Errorf("the supervisor got %q (%v), want READY=1", got, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestNotifyWithoutSystemd(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	t.Setenv("WATCHDOG_USEC", "")
	if err := (Notifier{}).Ready(t.Context()); err != nil {
		t.Error(err)
	}
	if err := (Notifier{}).Watchdog(t.Context(), New(0)); err != nil {
		t.Error(err)
	}
}

func TestNotifyFailureIsNamed(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", filepath.Join(t.TempDir(), "missing"))
	if err := (Notifier{}).Ready(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Ready() = %v, want an error that says the socket is missing", err)
	}
}

func TestWatchdog(t *testing.T) {
	next := listenNotify(t)
	const interval = 400 * time.Millisecond
	t.Setenv("WATCHDOG_USEC", strconv.FormatInt(interval.Microseconds(), 10))
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))

	s := New(time.Nanosecond) // every beat is too old at once
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Notifier{}.Watchdog(ctx, s) }()

	for range 2 { // alive before the first beat
		if got, err := next(10 * interval); got != "WATCHDOG=1" {
			t.Fatalf("systemd got %q (%v), want WATCHDOG=1", got, err)
		}
	}
	s.Beat()
	_, _ = next(interval) // a ping may already be on its way
	if got, err := next(2 * interval); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("systemd got %q (%v) from a stuck daemon, want silence", got, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestWatchdogOfAnotherProcess(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "1000000")
	t.Setenv("WATCHDOG_PID", "1")
	if err := (Notifier{}).Watchdog(t.Context(), New(0)); err != nil {
		t.Error(err)
	}
}

func TestWatchdogBadSetting(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "soon")
	if err := (Notifier{}).Watchdog(t.Context(), New(0)); err == nil {
		t.Error("a malformed WATCHDOG_USEC is accepted")
	}
}
