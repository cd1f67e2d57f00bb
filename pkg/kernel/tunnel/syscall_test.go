// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"encoding/binary"
	"errors"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestWriteWithoutRoom checks that writes to a full device wait until there is room, keep
// their order, and end when the device is closed.
func TestWriteWithoutRoom(t *testing.T) {
	device, there := devicePair(t)
	const n = 5000
	wrote := make(chan error, 1)
	b := make([]byte, 1000)
	w := newDeviceWriter(device)
	go func() {
		for i := range uint32(n) {
			binary.BigEndian.PutUint32(b, i)
			if err := w.packet(b); err != nil {
				wrote <- err
				return
			}
		}
		wrote <- nil
	}()
	got := make([]byte, 2000)
	late := time.Now().Add(10 * time.Second)
	for i := uint32(0); i < n; {
		size, err := unix.Read(there, got)
		switch {
		case errors.Is(err, unix.EAGAIN) && time.Now().Before(late):
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(there), Events: unix.POLLIN}}, 100)
			continue
		case err != nil || size != len(b) || binary.BigEndian.Uint32(got) != i:
			t.Fatalf("packet %d: %d bytes (%v), number %d", i, size, err, binary.BigEndian.Uint32(got))
		}
		i++
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}

	err := device.control(func(fd int) (err error) { // until the buffer is full
		for err == nil {
			_, err = unix.Write(fd, b)
		}
		return err
	})
	if !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	tried, full := make(chan struct{}), make(chan error, 1)
	try := sync.OnceFunc(func() { close(tried) })
	o := newFDWriter(device.raw, func(uintptr) unix.Errno {
		try()
		return unix.EAGAIN
	})
	go func() { full <- o.write() }()
	<-tried
	if err := device.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-full:
		if err == nil {
			t.Error("a write to a closed device succeeds")
		}
	case <-time.After(10 * time.Second):
		t.Error("a write still waits for a closed device")
	}
}

// TestWriteError checks that a write returns the kernel's error, and that the next write
// succeeds.
func TestWriteError(t *testing.T) {
	device, there := devicePair(t)
	w := newDeviceWriter(device)
	if err := w.packet(make([]byte, 1<<24)); !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("16 MB at once: %v", err)
	}
	if err := w.packet([]byte("hello")); err != nil {
		t.Error(err)
	}
	if n, err := unix.Read(there, make([]byte, 10)); n != 5 {
		t.Errorf("%d bytes arrived (%v)", n, err)
	}
}
