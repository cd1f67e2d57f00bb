// SPDX-License-Identifier: Apache-2.0

// Package annotation converts leases to the annotations of a Node, in flannel's format, and back.
package annotation

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// ID identifies one of the annotations that are read or written.
type ID int

// The IDs of the annotations. NewKeys has their names. An annotation of IPv6 follows that of IPv4: see In.
const (
	Managed ID = iota
	BackendType
	BackendData
	BackendV6Data
	PublicIP
	PublicIPv6
	NextBackendType // this one and the next two only during a migration
	NextBackendData
	NextBackendV6Data
	// The annotations from here on are read from this host's Node only, and never written.
	PublicIPOverwrite // replaces PublicIP, if an administrator has set it
	PublicIPv6Overwrite
	NodePublicIP // replaces --public-ip, if an administrator has set it
	NodePublicIPv6
	// Count is the number of annotations.
	Count
	// Published is the number of annotations that a node publishes. They have the lowest IDs.
	Published = PublicIPOverwrite
)

// DefaultPrefix is the default of the flag --kube-annotation-prefix, whose value Prefix takes.
const DefaultPrefix = "flannel.alpha.coreos.com"

var prefixForm = regexp.MustCompile(`^(?:[a-z0-9_-]+\.)+[a-z0-9_-]+/(?:[a-z0-9_-]+-)?$`)

// Prefix returns the beginning of the keys of annotations, given the value of the flag:
// "flannel.alpha.coreos.com" gives "flannel.alpha.coreos.com/", and "a.b/c" gives "a.b/c-", as
// flannel does. It returns an error if keys cannot begin like that.
func Prefix(flag string) (string, error) {
	p := flag
	switch strings.Count(p, "/") {
	case 0:
		p += "/"
	case 1:
		if !strings.HasSuffix(p, "/") && !strings.HasSuffix(p, "-") {
			p += "-"
		}
	default:
		return "", errors.New("expected at most one slash")
	}
	if !prefixForm.MatchString(p) {
		return "", fmt.Errorf("expected a DNS name of two parts or more, as %s, or one with /name behind it", DefaultPrefix)
	}
	return p, nil
}

// Keys contains the full keys of the annotations, by ID.
type Keys [Count]string

// NewKeys returns the keys with prefix p, which must be a result of Prefix.
func NewKeys(p string) *Keys {
	k := &Keys{
		Managed: "kube-subnet-manager", BackendType: "backend-type",
		BackendData: "backend-data", BackendV6Data: "backend-v6-data",
		PublicIP: "public-ip", PublicIPv6: "public-ipv6",
		NextBackendType: "next-backend-type", NextBackendData: "next-backend-data", NextBackendV6Data: "next-backend-v6-data",
		PublicIPOverwrite: "public-ip-overwrite", PublicIPv6Overwrite: "public-ipv6-overwrite",
		NodePublicIP: "node-public-ip", NodePublicIPv6: "node-public-ipv6",
	}
	for i, name := range k {
		k[i] = p + name
	}
	return k
}

// In returns the annotation that is for family f what a is for IPv4.
func (a ID) In(f prefix.Family) ID {
	if f == prefix.IPv6 {
		return a + 1
	}
	return a
}

var families = []prefix.Family{prefix.IPv4, prefix.IPv6}

// Note is the value of one annotation. Present tells whether the Node has the annotation, because an
// annotation may have an empty text.
type Note struct {
	Text    string
	Present bool
}

// Notes contains the annotations that a node publishes, by ID.
type Notes [Published]Note

// Encode returns the annotations of a node that publishes c, as flannel writes them. Backend data
// is JSON text, which is null if there is none. With backends other than vxlan, even a node without
// IPv4 has the annotations of the IPv4 data and address, with the values null and 0.0.0.0.
func Encode(c subnet.Claim) Notes {
	var n Notes
	n[Managed] = Note{"true", true}
	n[BackendType] = Note{c.BackendType, true}
	if c.NextType != "" {
		n[NextBackendType] = Note{c.NextType, true}
	}

	for _, f := range families {
		e, ok := c.Endpoint(f)
		switch {
		case ok:
			n[BackendData.In(f)] = Note{cmp.Or(string(e.Data), "null"), true}
			n[PublicIP.In(f)] = Note{e.PublicIP.String(), true}
			if len(e.NextData) > 0 {
				n[NextBackendData.In(f)] = Note{string(e.NextData), true}
			}
		case f == prefix.IPv4 && c.BackendType != "vxlan":
			n[BackendData] = Note{"null", true}
			n[PublicIP] = Note{"0.0.0.0", true}
		}
	}
	return n
}

// maxAnnotation is the length of the longest annotation that is read, in bytes. Real annotations have
// some hundred bytes.
const maxAnnotation = 16 << 10

// ErrNotManaged means that flannel does not manage a Node, or not yet.
var ErrNotManaged = errors.New("it has no annotation kube-subnet-manager")

// Decode returns the claim that a node publishes, with endpoints on cidrs, the subnets that the API
// gave the node. It returns ErrNotManaged if flannel does not manage the node. A family without a
// subnet or without a public address in n has no endpoint.
//
// If one family can be read and the other cannot, Decode returns both the claim and the reason as
// err. The endpoint of the unreadable family is then that of last, the previous lease. The family
// has no endpoint if last is nil or has another backend or subnet. If no family can be read, or a
// backend type is no name, the claim is empty.
func (k *Keys) Decode(n Notes, cidrs []netip.Prefix, last *subnet.Lease) (c subnet.Claim, err error) {
	if n[Managed].Text != "true" {
		return subnet.Claim{}, ErrNotManaged
	}
	if c.BackendType, err = k.backendType(n, BackendType); err != nil {
		return subnet.Claim{}, err
	}
	if c.NextType, err = k.backendType(n, NextBackendType); err != nil {
		return subnet.Claim{}, err
	}
	readable := false
	for _, f := range families {
		cidr, ok := prefix.OfFamily(cidrs, f)
		if !ok || !n[PublicIP.In(f)].Present {
			continue
		}

		e, wrong := k.endpoint(n, f, cidr)
		if wrong == nil {
			readable = true
		} else {
			err = oneline.Join(err, wrong)
			e, ok = lastGood(last, c.BackendType, f, cidr)
		}
		if ok {
			c.Endpoints = append(c.Endpoints, e)
		}
	}

	switch {
	case readable:
		return c, err
	case err == nil:
		err = fmt.Errorf("no annotation %s or %s for podCIDRs %v", k[PublicIP], k[PublicIPv6], cidrs)
	}
	return subnet.Claim{}, err
}

// endpoint decodes the endpoint of one family on the subnet cidr.
func (k *Keys) endpoint(n Notes, f prefix.Family, cidr netip.Prefix) (subnet.Endpoint, error) {
	e := subnet.Endpoint{Subnet: cidr}
	public := PublicIP.In(f)
	text, err := k.text(n, public)
	if err != nil {
		return e, err
	}
	if e.PublicIP, err = subnet.ParseAddr(f, text); err != nil {
		return e, fmt.Errorf("annotation %s: %w", k[public], err)
	}
	if e.Data, err = k.data(n, BackendData.In(f)); err != nil {
		return e, err
	}
	e.NextData, err = k.data(n, NextBackendData.In(f))
	return e, err
}

// text returns the text of an annotation, empty if the node does not have it, or an error if it is
// too long to be read.
func (k *Keys) text(n Notes, a ID) (string, error) {
	if have := len(n[a].Text); have > maxAnnotation {
		return "", fmt.Errorf("annotation %s has %d bytes (at most %d are read)", k[a], have, maxAnnotation)
	}
	return n[a].Text, nil
}

func (k *Keys) backendType(n Notes, a ID) (string, error) {
	text, err := k.text(n, a)
	if err != nil {
		return "", err
	}
	if err := subnet.CheckType(text); err != nil {
		return "", fmt.Errorf("annotation %s %q: %w", k[a], subnet.Shorten(text), err)
	}
	return text, nil
}

// lastGood returns the endpoint of last that replaces an endpoint that cannot be read. It returns false
// if last has no endpoint of family f, another backend, or another subnet.
func lastGood(last *subnet.Lease, backend string, f prefix.Family, cidr netip.Prefix) (subnet.Endpoint, bool) {
	if last == nil || last.BackendType != backend {
		return subnet.Endpoint{}, false
	}
	e, ok := last.Endpoint(f)
	return e, ok && e.Subnet == cidr
}

// data returns the backend data in an annotation, and nil if there is none.
func (k *Keys) data(n Notes, a ID) (json.RawMessage, error) {
	text, err := k.text(n, a)
	switch {
	case err != nil || text == "" || text == "null":
		return nil, err
	case !json.Valid([]byte(text)):
		return nil, fmt.Errorf("annotation %s: %q is not JSON", k[a], subnet.Shorten(text))
	}
	return json.RawMessage(text), nil
}

// Difference returns the changes that turn have into want, by key: the new text, or nil for an
// annotation that has to be removed.
func (k *Keys) Difference(have, want Notes) map[string]*string {
	changes := map[string]*string{}
	for i := range want {
		switch {
		case want[i].Present && want[i] != have[i]:
			changes[k[i]] = &want[i].Text
		case !want[i].Present && have[i].Present:
			changes[k[i]] = nil
		}
	}
	return changes
}
