// SPDX-License-Identifier: Apache-2.0

package subnettest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"syscall"
)

// FreeAddr returns a loopback address, as host:port, on which no program listens. A
// server can be stopped and started again on it: the port is below the range from which
// Linux assigns ports to connections and to listeners on port 0
// (net.ipv4.ip_local_port_range), so it stays free in between.
func FreeAddr() (string, error) {
	const first, last = 10000, 32767
	var err error
	for range 100 {
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(first+rand.IntN(last-first+1)))
		if err = tryAddr(addr); err == nil {
			return addr, nil
		}
	}
	return "", fmt.Errorf("no free port on loopback: %w", err)
}

// tryAddr listens on an address for a moment. It prevents forks meanwhile, because a child would
// keep the listener open until it executes its own program.
func tryAddr(addr string) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	return l.Close()
}
