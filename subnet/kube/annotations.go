// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/wire"
)

// annotation is one of the annotations that are read or written, below the
// prefix.
type annotation int

const (
	managed annotation = iota
	backendType
	backendData
	backendV6Data
	publicIP
	publicIPv6
	nextBackendType // these three only during a migration
	nextBackendData
	nextBackendV6Data
	// The rest is read from the own Node only, and never written.
	publicIPOverwrite
	publicIPv6Overwrite
	nodePublicIP
	nodePublicIPv6
	numAnnotations
	numPublished = publicIPOverwrite
)

// DefaultAnnotationPrefix is the default of the flag that AnnotationPrefix takes.
const DefaultAnnotationPrefix = "flannel.alpha.coreos.com"

var prefixForm = regexp.MustCompile(`^(?:[a-z0-9_-]+\.)+[a-z0-9_-]+/(?:[a-z0-9_-]+-)?$`)

// AnnotationPrefix returns the beginning of the keys of annotations, given the flag:
// "flannel.alpha.coreos.com" gives "flannel.alpha.coreos.com/", and "a.b/c"
// gives "a.b/c-", as flannel does.
func AnnotationPrefix(flag string) (string, error) {
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
		return "", fmt.Errorf("expected a DNS name of two parts or more, as %s, or one with /name behind it", DefaultAnnotationPrefix)
	}
	return p, nil
}

// keys are the full keys of the annotations.
type keys [numAnnotations]string

// newKeys returns the keys with prefix p, which must be a result of AnnotationPrefix.
func newKeys(p string) *keys {
	k := &keys{
		managed: "kube-subnet-manager", backendType: "backend-type",
		backendData: "backend-data", backendV6Data: "backend-v6-data",
		publicIP: "public-ip", publicIPv6: "public-ipv6",
		nextBackendType: "next-backend-type", nextBackendData: "next-backend-data", nextBackendV6Data: "next-backend-v6-data",
		publicIPOverwrite: "public-ip-overwrite", publicIPv6Overwrite: "public-ipv6-overwrite",
		nodePublicIP: "node-public-ip", nodePublicIPv6: "node-public-ipv6",
	}
	for i, name := range k {
		k[i] = p + name
	}
	return k
}

// newDecoder returns a decoder of Nodes that keeps these annotations, by their number.
func (k *keys) newDecoder() *wire.Decoder { return wire.NewDecoder(k[:]) }

// annotationsOf are the annotations that belong to one family.
var annotationsOf = map[prefix.Family]struct{ data, nextData, public, overwrite, node annotation }{
	prefix.IPv4: {backendData, nextBackendData, publicIP, publicIPOverwrite, nodePublicIP},
	prefix.IPv6: {backendV6Data, nextBackendV6Data, publicIPv6, publicIPv6Overwrite, nodePublicIPv6},
}

var families = []prefix.Family{prefix.IPv4, prefix.IPv6}

// note is the value of one annotation, if the Node has it.
type note struct {
	text    string
	present bool
}

// notes are the annotations that a node publishes.
type notes [numPublished]note

// encode returns the annotations of a node that publishes c, as flannel writes them: data as JSON
// text, which is null if there is none. Backends other than vxlan have the IPv4 pair even on a node
// without IPv4.
func encode(c subnet.Claim) notes {
	var n notes
	n[managed] = note{"true", true}
	n[backendType] = note{c.BackendType, true}
	if c.NextType != "" {
		n[nextBackendType] = note{c.NextType, true}
	}
	for _, f := range families {
		of := annotationsOf[f]
		e, ok := c.Endpoint(f)
		switch {
		case ok:
			n[of.data], n[of.public] = note{dataText(e.Data), true}, note{e.PublicIP.String(), true}
			if len(e.NextData) > 0 {
				n[of.nextData] = note{string(e.NextData), true}
			}
		case f == prefix.IPv4 && c.BackendType != "vxlan":
			n[of.data], n[of.public] = note{"null", true}, note{"0.0.0.0", true}
		}
	}
	return n
}

func dataText(data json.RawMessage) string {
	if len(data) == 0 {
		return "null"
	}
	return string(data)
}

// maxAnnotation is the length of the longest annotation that is read, in bytes. Real ones have some
// hundred.
const maxAnnotation = 16 << 10

// errNotManaged means that flannel does not manage a Node, or not yet.
var errNotManaged = errors.New("it has no annotation kube-subnet-manager")

// decode returns the claim that a node publishes, with endpoints on the subnets that the API gave it. A family
// without a subnet or without annotations has no endpoint. A family that cannot be read has the
// endpoint of last, the previous lease, unless that had another backend or subnet. err is the reason
// then. If no family can be read, there are no endpoints.
func (k *keys) decode(n notes, cidrs []netip.Prefix, last *subnet.Lease) (c subnet.Claim, err error) {
	if n[managed].text != "true" {
		return subnet.Claim{}, errNotManaged
	}
	if c.BackendType, err = k.text(n, backendType); err != nil {
		return subnet.Claim{}, err
	}
	if c.NextType, err = k.text(n, nextBackendType); err != nil {
		return subnet.Claim{}, err
	}
	readable := false
	for _, f := range families {
		cidr, ok := ofFamily(cidrs, f)
		if !ok || !n[annotationsOf[f].public].present {
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
		err = fmt.Errorf("no annotation %s or %s for podCIDRs %v", k[publicIP], k[publicIPv6], cidrs)
	}
	return subnet.Claim{}, err
}

// endpoint decodes one family.
func (k *keys) endpoint(n notes, f prefix.Family, cidr netip.Prefix) (subnet.Endpoint, error) {
	e, of := subnet.Endpoint{Subnet: cidr}, annotationsOf[f]
	text, err := k.text(n, of.public)
	if err != nil {
		return e, err
	}
	if e.PublicIP, err = subnet.ParseAddr(f, text); err != nil {
		return e, fmt.Errorf("annotation %s: %w", k[of.public], err)
	}
	if text, err = k.text(n, of.data); err != nil {
		return e, err
	}
	if e.Data, err = parseData(text); err != nil {
		return e, fmt.Errorf("annotation %s: %w", k[of.data], err)
	}
	if text, err = k.text(n, of.nextData); err != nil {
		return e, err
	}
	if e.NextData, err = parseData(text); err != nil {
		return e, fmt.Errorf("annotation %s: %w", k[of.nextData], err)
	}
	return e, nil
}

// text returns an annotation, unless it is too long to be read.
func (k *keys) text(n notes, a annotation) (string, error) {
	if have := len(n[a].text); have > maxAnnotation {
		return "", fmt.Errorf("annotation %s has %d bytes (at most %d are read)", k[a], have, maxAnnotation)
	}
	return n[a].text, nil
}

// lastGood returns the endpoint of last that replaces one that cannot be read.
func lastGood(last *subnet.Lease, backend string, f prefix.Family, cidr netip.Prefix) (subnet.Endpoint, bool) {
	if last == nil || last.BackendType != backend {
		return subnet.Endpoint{}, false
	}
	e, ok := last.Endpoint(f)
	return e, ok && e.Subnet == cidr
}

func ofFamily(cidrs []netip.Prefix, f prefix.Family) (netip.Prefix, bool) {
	for _, p := range cidrs {
		if prefix.FamilyOf(p.Addr()) == f {
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// parsePublic parses an address that an administrator gives this node, which has the subnet own, or
// none yet. It refuses addresses that peers refuse: those that no host or that a pod can have.
func parsePublic(f prefix.Family, own netip.Prefix, text string) (netip.Addr, error) {
	a, err := subnet.ParseAddr(f, text)
	switch {
	case err != nil:
		return a, err
	case !subnet.IsHost(a):
		return a, fmt.Errorf("%q is not an %s address that peers can reach", text, f)
	case own.Contains(a):
		return a, fmt.Errorf("%q lies in the node's own subnet %s", text, own)
	}
	return a, nil
}

// parseData returns nil if there is no data.
func parseData(text string) (json.RawMessage, error) {
	if text == "" || text == "null" {
		return nil, nil
	}
	if !json.Valid([]byte(text)) {
		return nil, fmt.Errorf("%q is not JSON", subnet.Shorten(text))
	}
	return json.RawMessage(text), nil
}

// errNoPodCIDR means that the API has not given the Node its subnets yet.
var errNoPodCIDR = errors.New("no podCIDR assigned yet")

// podCIDRs returns the podCIDRs of a Node that was read in full, IPv4 first: one for each family
// that it has. It returns errNoPodCIDR if it has none yet.
func podCIDRs(n *wire.Node) ([]netip.Prefix, error) {
	texts := n.PodCIDRs[:min(n.NumPodCIDRs, len(n.PodCIDRs))]
	switch {
	case n.NumPodCIDRs > len(n.PodCIDRs):
		return nil, fmt.Errorf("it has %d podCIDRs, want one for each family", n.NumPodCIDRs)
	case len(texts) == 0 && len(n.PodCIDR) == 0:
		return nil, errNoPodCIDR
	case len(texts) == 0:
		texts = [][]byte{n.PodCIDR}
	}
	var found [2]netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(string(text))
		if err != nil || p.Addr().Is4In6() || p.Bits() == 0 {
			return nil, fmt.Errorf("podCIDR %q is not a subnet", subnet.Shorten(string(text)))
		}
		i := 0
		if p.Addr().Is6() {
			i = 1
		}
		if found[i].IsValid() {
			return nil, fmt.Errorf("it has two podCIDRs of one family, %s and %s", found[i], p)
		}
		found[i] = p.Masked()
	}
	var out []netip.Prefix
	for _, p := range found {
		if p.IsValid() {
			out = append(out, p)
		}
	}
	return out, nil
}
