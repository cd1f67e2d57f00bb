// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
)

func TestLimits(t *testing.T) {
	l := limit(nil)
	fill := func(source string) (got int) {
		a, _ := netip.ParseAddr(source) // "" is this host
		for range 1000 {
			if l.add(a) {
				got++
			}
		}
		return got
	}
	if got := fill("10.5.1.2"); got != maxOfSource {
		t.Errorf("one address got %d connections, want %d", got, maxOfSource)
	}
	all := maxOfSource
	for i := range 100 {
		all += fill(fmt.Sprintf("10.5.2.%d", i))
	}
	if all != maxOfOthers {
		t.Errorf("other addresses got %d connections, want %d", all, maxOfOthers)
	}
	if got := fill(""); got != maxOfHost {
		t.Errorf("this host got %d connections while others have all of theirs, want %d", got, maxOfHost)
	}

	l.remove(netip.MustParseAddr("10.5.1.2"))
	if got := fill("10.5.1.2"); got != 1 {
		t.Errorf("after the end of one connection the address got %d new ones, want 1", got)
	}
	l.remove(netip.Addr{})
	if got := fill(""); got != 1 {
		t.Errorf("after the end of one connection this host got %d new ones, want 1", got)
	}
}

// TestServeLimitsConnections opens connections that send nothing. The server must close those beyond
// the limit at once, and answer a request after one of the others has ended.
func TestServeLimitsConnections(t *testing.T) {
	url, stop := start(t, Handler(New(0)))
	addr := url[len("http://"):]
	var conns []net.Conn
	for range maxOfHost {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	get := func() string {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		fmt.Fprint(c, "GET /healthz HTTP/1.0\r\n\r\n")
		answer := make([]byte, len("HTTP/1.0 200 OK"))
		n, _ := c.Read(answer)
		return string(answer[:n])
	}
	if got := get(); got != "" {
		t.Errorf("answer to a connection beyond the limit: %q, want none", got)
	}
	conns[0].Close()
	for range 1000 {
		if got := get(); got == "HTTP/1.0 200 OK" {
			if err := stop(); err != nil {
				t.Error(err)
			}
			return
		}
	}
	t.Error("no answer after a connection has ended")
}
