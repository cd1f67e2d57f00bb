// SPDX-License-Identifier: Apache-2.0

package backend

// Listener is implemented by backends that carry packets in UDP.
type Listener interface {
	// Ports returns the ports of this host that peers send to. It is pure.
	Ports() []int
}

// Ports returns the UDP ports of b that peers send to, or nil if b does not receive UDP.
func Ports(b Backend) []int {
	if l, ok := b.(Listener); ok {
		return l.Ports()
	}
	return nil
}
