// SPDX-License-Identifier: Apache-2.0

// Package codec converts leases to the keys and values of etcd, in flannel's format, and back.
package codec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/plainjson"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// noIPv4 stands for the IPv4 subnet in the key of a node that has only an IPv6 subnet.
const noIPv4 = "0.0.0.0-0"

// maxValue is the length of the longest value that is read, in bytes. The value of a lease has some
// hundred bytes.
const maxValue = 64 << 10

// FormatKey returns the last component of the key of a lease. subnets has at most one subnet of
// each family, the IPv4 subnet first.
func FormatKey(subnets []netip.Prefix) string {
	var parts []string
	for _, s := range subnets {
		if s.Addr().Is6() && len(parts) == 0 {
			parts = append(parts, noIPv4)
		}
		parts = append(parts, fmt.Sprintf("%s-%d", s.Addr(), s.Bits()))
	}
	return strings.Join(parts, "&")
}

// ParseKey returns the subnets that the last component of a key names, the IPv4 subnet first. It
// masks them. It returns an error if the text is not the key of a lease.
func ParseKey(key string) ([]netip.Prefix, error) {
	v4, v6, dual := strings.Cut(key, "&")
	var subnets []netip.Prefix
	if !dual || v4 != noIPv4 {
		s, err := parseSubnet(prefix.IPv4, v4)
		if err != nil {
			return nil, err
		}
		subnets = append(subnets, s)
	}
	if dual {
		s, err := parseSubnet(prefix.IPv6, v6)
		if err != nil {
			return nil, err
		}
		subnets = append(subnets, s)
	}
	return subnets, nil
}

func parseSubnet(f prefix.Family, text string) (netip.Prefix, error) {
	addr, length, _ := strings.Cut(text, "-")
	a, err := netip.ParseAddr(addr)
	bits, wrong := strconv.ParseUint(length, 10, 8)
	usable := err == nil && prefix.FamilyOf(a) == f && !a.Is4In6() && a.Zone() == "" && strings.ToLower(addr) == addr
	if !usable || wrong != nil || bits == 0 || int(bits) >= f.Bits() {
		return netip.Prefix{}, fmt.Errorf("%q is not a subnet key (want for example 10.5.1.0-24 or 10.5.1.0-24&fd00:0:0:1::-64)", subnet.Shorten(text))
	}
	return netip.PrefixFrom(a, int(bits)).Masked(), nil
}

// wireLease is the value of a key. Addresses stay raw when a value is read, because a null, an
// absent and an empty address mean different things.
type wireLease struct {
	PublicIP      json.RawMessage
	PublicIPv6    json.RawMessage
	BackendType   string          `json:",omitempty"`
	BackendData   json.RawMessage `json:",omitempty"`
	BackendV6Data json.RawMessage `json:",omitempty"`

	// The fields below are only in leases of hosts in a migration. flannel ignores them.
	NextBackendType   string          `json:",omitempty"`
	NextBackendData   json.RawMessage `json:",omitempty"`
	NextBackendV6Data json.RawMessage `json:",omitempty"`
}

// Encode returns the value of the key of a node that publishes c. The value does not contain the
// subnets of c, because the key does.
func Encode(c subnet.Claim) ([]byte, error) {
	w := wireLease{
		PublicIP:    json.RawMessage(`"0.0.0.0"`),
		PublicIPv6:  json.RawMessage(`null`),
		BackendType: c.BackendType, NextBackendType: c.NextType,
	}
	if e, ok := c.Endpoint(prefix.IPv4); ok {
		w.PublicIP = quote(e.PublicIP)
		w.BackendData = e.Data
		w.NextBackendData = e.NextData
	}
	if e, ok := c.Endpoint(prefix.IPv6); ok && e.PublicIP.IsValid() {
		w.PublicIPv6 = quote(e.PublicIP)
		w.BackendV6Data = e.Data
		w.NextBackendV6Data = e.NextData
	}

	value, err := json.Marshal(w)
	if err != nil {
		return nil, fmt.Errorf("encode lease: %w", err)
	}
	return value, nil
}

func quote(a netip.Addr) json.RawMessage { return json.RawMessage(strconv.Quote(a.String())) }

// Decode returns the claim in a lease, given the subnets that the key names, and the value of the
// key. It reads only the address families of subnets. If the value has no address of such a family,
// the endpoint gets the unspecified address of the family.
func Decode(subnets []netip.Prefix, value []byte) (c subnet.Claim, err error) {
	if len(value) > maxValue {
		return subnet.Claim{}, fmt.Errorf("value has %d bytes (at most %d are read)", len(value), maxValue)
	}

	w, plain := decodePlain(value)
	if !plain {
		if w, err = decodeAny(value); err != nil {
			return subnet.Claim{}, err
		}
	}

	for _, word := range []string{w.BackendType, w.NextBackendType} {
		if err := subnet.CheckType(word); err != nil {
			return subnet.Claim{}, fmt.Errorf("backend type %q: %w", subnet.Shorten(word), err)
		}
	}

	c = subnet.Claim{BackendType: w.BackendType, NextType: w.NextBackendType, Endpoints: make([]subnet.Endpoint, 0, len(subnets))}
	for _, s := range subnets {
		e := subnet.Endpoint{Subnet: s, Data: w.BackendData, NextData: w.NextBackendData}
		name := "PublicIP"
		public := w.PublicIP
		if e.Family() == prefix.IPv6 {
			name = "PublicIPv6"
			public = w.PublicIPv6
			e.Data = w.BackendV6Data
			e.NextData = w.NextBackendV6Data
		}

		e.Data, e.NextData = detached(e.Data), detached(e.NextData)
		if e.PublicIP, err = decodeAddr(e.Family(), public); err != nil {
			return subnet.Claim{}, fmt.Errorf("%s %w", name, err)
		}
		c.Endpoints = append(c.Endpoints, e)
	}
	return c, nil
}

// detached returns a copy of raw, the backend data in a value. It returns nil if raw is absent or
// null. Without the copy, raw would keep the whole value in memory.
func detached(raw json.RawMessage) json.RawMessage {
	if string(raw) == "null" {
		return nil
	}
	return bytes.Clone(raw)
}

// decodeAny reads a value in any form that JSON has.
func decodeAny(value []byte) (w wireLease, err error) {
	if err := json.Unmarshal(value, &w); err != nil {
		return w, fmt.Errorf("value %q: %w", subnet.Shorten(string(value)), err)
	}
	if value = bytes.TrimSpace(value); value[0] != '{' {
		return w, fmt.Errorf("value %q is not a JSON object", subnet.Shorten(string(value)))
	}
	return w, nil
}

// decodePlain reads a value in the form that flannel writes, at a fraction of the cost of
// decodeAny: a start reads thousands of values. If ok is true, the result is that of decodeAny. ok
// is false for every other form, and the caller must use decodeAny. Raw fields of the result are
// parts of value.
func decodePlain(value []byte) (w wireLease, ok bool) {
	ok = plainjson.Object(value, func(key, value []byte) bool {
		into := &w.BackendData
		word := &w.BackendType
		switch string(key) {
		case "PublicIP":
			into = &w.PublicIP
		case "PublicIPv6":
			into = &w.PublicIPv6
		case "BackendData":
		case "BackendV6Data":
			into = &w.BackendV6Data
		case "NextBackendData":
			into = &w.NextBackendData
		case "NextBackendV6Data":
			into = &w.NextBackendV6Data
		case "BackendType", "NextBackendType":
			if string(key) == "NextBackendType" {
				word = &w.NextBackendType
			}
			text, ok := plainjson.Text(value)
			if !ok || *word != "" {
				return false
			}
			*word = string(text)
			return true
		default: // encoding/json accepts keys in another case, too
			return false
		}
		if *into != nil { // encoding/json uses the last one of several equal keys
			return false
		}
		*into = value
		return true
	})
	return w, ok
}

// decodeAddr returns the address of family f that raw contains. It returns the unspecified address
// if raw is absent or, with IPv6, null.
func decodeAddr(f prefix.Family, raw json.RawMessage) (netip.Addr, error) {
	switch {
	case raw == nil && f == prefix.IPv4:
		return netip.IPv4Unspecified(), nil
	case f == prefix.IPv6 && (raw == nil || string(raw) == "null"):
		return netip.IPv6Unspecified(), nil
	}
	text, ok := decodeText(raw)
	if !ok {
		return netip.Addr{}, fmt.Errorf("is %s, want an %s address", subnet.Shorten(string(raw)), f)
	}
	return subnet.ParseAddr(f, text)
}

// decodeText returns the string that raw contains, and false if raw is no JSON string. It declares
// the variable for encoding/json after the plain case, so that the variable is allocated only if it
// is needed.
func decodeText(raw json.RawMessage) (string, bool) {
	if plain, ok := plainjson.Text(raw); ok {
		return string(plain), true
	}
	var s string
	err := json.Unmarshal(raw, &s)
	return s, err == nil && raw[0] == '"'
}
