package subnettest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// FreeAddr returns an address on loopback, as host:port, that nothing listens
// on. A server that is stopped and started again finds it free: the port is
// below those that Linux gives to connections and to listeners that ask for
// any (net.ipv4.ip_local_port_range).
func FreeAddr() (string, error) {
	const first, last = 10000, 32767
	var err error
	for range 100 {
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(first+rand.IntN(last-first+1)))
		var l net.Listener
		if l, err = net.Listen("tcp", addr); err == nil {
			return addr, l.Close()
		}
	}
	return "", fmt.Errorf("no free port on loopback: %w", err)
}
