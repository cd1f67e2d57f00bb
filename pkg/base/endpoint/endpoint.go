// SPDX-License-Identifier: Apache-2.0

// Package endpoint parses endpoints that are given by name.
package endpoint

import (
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Named is an endpoint: a host, by its DNS name or address, and an optional port. The zero Named means that
// there is no endpoint.
type Named struct {
	Host string
	Port uint16 // 0 means that there is none
}

// maxName is the length of the longest DNS name in bytes.
const maxName = 253

var errForm = errors.New("expected NAME or NAME:PORT, such as node7.example.org:51820")

// Parse parses NAME or NAME:PORT. An IPv6 address before a port is in brackets. The text may come from
// another host, so Parse refuses every other form.
func Parse(text string) (Named, error) {
	if len(text) > maxName+len("[]:65535") {
		return Named{}, errForm
	}

	host, port, err := net.SplitHostPort(text)
	if err != nil { // there is no port
		host = text
		port = ""
	} else if port == "" {
		return Named{}, errForm
	}
	n := Named{Host: host}
	if port != "" {
		number, err := strconv.ParseUint(port, 10, 16)
		if err != nil || number == 0 {
			return Named{}, errForm
		}
		n.Port = uint16(number)
	}
	if a, err := netip.ParseAddr(host); err == nil {
		if a.Zone() != "" || a.Is4In6() {
			return Named{}, errForm
		}
		return n, nil
	}
	if !isName(host) {
		return Named{}, errForm
	}
	return n, nil
}

// isName reports whether s is a DNS name of a host. It refuses a name whose last label is a number, because
// that is an IPv4 address with a mistake.
func isName(s string) bool {
	if len(s) > maxName {
		return false
	}

	labels := strings.Split(s, ".")
	for _, l := range labels {
		strange := func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
		}
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' || strings.ContainsFunc(l, strange) {
			return false
		}
	}
	_, err := strconv.ParseUint(labels[len(labels)-1], 0, 64)
	return err != nil
}

// IsZero reports whether there is no endpoint.
func (n Named) IsZero() bool { return n == Named{} }

// String returns the text that Parse accepts.
func (n Named) String() string {
	if n.Port == 0 {
		return n.Host
	}
	return net.JoinHostPort(n.Host, strconv.Itoa(int(n.Port)))
}
