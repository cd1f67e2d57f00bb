// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
)

// Listener is implemented by backends that carry packets in UDP.
type Listener interface {
	// Ports returns the UDP ports of this host that peers send to. It is pure.
	Ports() []int
}

// Ports returns the UDP ports of b that peers send to, or nil if b does not receive UDP.
func Ports(b Backend) []int {
	if l, ok := b.(Listener); ok {
		return l.Ports()
	}
	return nil
}

// SeveralListener is a Backend that consists of several backends.
type SeveralListener interface {
	// PortsByType returns the result of Ports for each of these backends, by the backend's type. It
	// is pure.
	PortsByType() map[string][]int
}

// PortsByType returns the UDP ports of b that peers send to, by the type of the backend that
// receives the packets. configured is the type of b in the configuration.
func PortsByType(b Backend, configured string) map[string][]int {
	if l, ok := b.(SeveralListener); ok {
		return l.PortsByType()
	}
	return map[string][]int{configured: Ports(b)}
}

// SharePort reports whether the kernel lets devices of these two types, as in the result of PortsByType, listen on one
// port. It does so for vxlan if their VNIs differ, and both or neither have GBP: see vxlan_find_sock, which compares
// the flags.
func SharePort(a, b string) bool { return a == b && strings.HasPrefix(a, "vxlan") }

// Checker is a Backend that can find out before Start whether the host has what it needs.
type Checker interface {
	// Usable returns an error if the host lacks something that Start needs, such as a kernel
	// module. It may create and delete a device.
	Usable(ctx context.Context) error
}

// Usable returns an error if b finds out that it cannot start on this host. It returns nil if b is
// not a Checker.
func Usable(ctx context.Context, b Backend) error {
	if c, ok := b.(Checker); ok {
		return c.Usable(ctx)
	}
	return nil
}

// EndpointNamer is a Backend whose peers can send to a host by its name.
type EndpointNamer interface {
	// CheckPublicEndpoint returns an error if peers of this host cannot send to e. It is pure.
	CheckPublicEndpoint(e endpoint.Named) error
}

// CheckPublicEndpoint returns an error if e is not zero, and peers of this host cannot send to e by
// backend b. configured is the type of b in the configuration.
func CheckPublicEndpoint(b Backend, configured string, e endpoint.Named) error {
	if e.IsZero() {
		return nil
	}
	n, ok := b.(EndpointNamer)
	if !ok {
		return fmt.Errorf("the backend %s does not send to names: expected wireguard as Backend.Type", configured)
	}
	return n.CheckPublicEndpoint(e)
}

// FileOwner is a Backend that needs files for itself.
type FileOwner interface {
	// Files returns the paths of these files. No other network of this host may use the same files.
	Files() []string
}

// Files returns the paths of the files that b needs for itself, or nil if it needs none.
func Files(b Backend) []string {
	if o, ok := b.(FileOwner); ok {
		return o.Files()
	}
	return nil
}
