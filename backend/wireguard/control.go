// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"

	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

type control interface {
	Index(device string) (int, error)
	Device(name string) (*wgtypes.Device, error)
	ConfigureDevice(name string, c wgtypes.Config) error
	Close() error
}

// hostControl implements control for this host.
type hostControl struct{ *wgctrl.Client }

// Index implements control.
func (hostControl) Index(device string) (int, error) {
	link, err := net.InterfaceByName(device)
	if err != nil {
		return 0, err
	}
	return link.Index, nil
}

// explainPortInUse names port if err says that another program uses it.
func explainPortInUse(err error, port int) error {
	// A device of this process returns a number, which wgctrl turns into a text.
	inUse := fmt.Sprintf("errno=-%d", int(syscall.EADDRINUSE))
	if strings.HasSuffix(err.Error(), inUse) {
		err = syscall.EADDRINUSE
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("another program listens on UDP port %d (Backend.ListenPort, Backend.ListenPortV6): %w", port, err)
	}
	return err
}
