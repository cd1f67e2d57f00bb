// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// ethtoolValue is a struct ethtool_value.
type ethtoolValue struct{ cmd, data uint32 }

// ethtool runs a command on a device in the network namespace of the rtnetlink socket.
func (k *Kernel) ethtool(dev string, cmd, data uint32) (uint32, error) {
	value := ethtoolValue{cmd, data}
	var request struct { // struct ifreq
		name  [unix.IFNAMSIZ]byte
		value *ethtoolValue
		_     [16]byte
	}
	if len(dev) >= len(request.name) {
		return 0, unix.ENODEV
	}

	copy(request.name[:], dev)
	request.value = &value
	k.sock.mu.Lock()
	defer k.sock.mu.Unlock()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(k.sock.fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return 0, errno
	}
	return value.data, nil
}

func (k *Kernel) readTxChecksum(dev string) (dataplane.Offload, error) {
	on, err := k.ethtool(dev, unix.ETHTOOL_GTXCSUM, 0)
	if err != nil {
		return 0, fmt.Errorf("read checksum offload of %s: %w", dev, err)
	}
	if on == 0 {
		return dataplane.OffloadOff, nil
	}
	return dataplane.OffloadOn, nil
}

func (k *Kernel) setTxChecksum(dev string, want dataplane.Offload) error {
	if want == dataplane.OffloadAuto {
		return nil
	}
	var on uint32
	if want == dataplane.OffloadOn {
		on = 1
	}
	if _, err := k.ethtool(dev, unix.ETHTOOL_STXCSUM, on); err != nil {
		return fmt.Errorf("set checksum offload: %w", err)
	}
	return nil
}
