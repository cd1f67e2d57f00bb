// SPDX-License-Identifier: Apache-2.0

package network

import (
	"net"
	"slices"

	"github.com/flanneld/flanneld/pkg/underlay"
)

// hardwareOf returns the hardware address of the interface, or "" if it has none.
func hardwareOf(i underlay.Interface) string {
	link, err := net.InterfaceByIndex(i.Index)
	if err != nil {
		return "" // it is gone, and another one will be chosen
	}
	return link.HardwareAddr.String()
}

// hasHardware reports whether an interface of this host has the hardware address addr.
func hasHardware(addr string) bool {
	links, err := net.Interfaces()
	return err == nil && addr != "" &&
		slices.ContainsFunc(links, func(l net.Interface) bool { return l.HardwareAddr.String() == addr })
}
