// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"testing"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

const (
	configV4   = `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`
	configDual = `{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:10:5::/48","Backend":{"Type":"vxlan"}}`
)

// annotationKey returns the key of the annotation with that name and the default prefix.
func annotationKey(name string) string { return annotation.DefaultPrefix + "/" + name }

func defaultKeys() *annotation.Keys { return annotation.NewKeys(annotation.DefaultPrefix + "/") }

func newDecoder() *wire.Decoder { return wire.NewDecoder(defaultKeys()[:], "") }

// backing gives the suite access to an API server.
type backing struct{ *fixture }

func (b backing) Allocates() bool { return false }

func (b backing) SetConfig(t *testing.T, raw string) {
	if raw == "" {
		_ = os.Remove(b.netConf())
		return
	}
	b.setConfig(t, raw)
}

func nodeName(n int) string { return fmt.Sprintf("node%d", n) }

func cidrs(n int) []string {
	return []string{fmt.Sprintf("10.5.%d.0/24", n), fmt.Sprintf("fd00:10:5:%x::/64", n)}
}

// Manager returns a manager of the Node with that number, and creates the Node if it does not
// exist. Nodes with an even number have the IPv6 podCIDR first.
func (b backing) Manager(t *testing.T, n int, _ ...netip.Prefix) subnet.Manager {
	status, _, err := b.try(http.MethodGet, "/api/v1/nodes/"+nodeName(n), nil)
	if err == nil && status == http.StatusNotFound {
		cs := cidrs(n)
		if n%2 == 0 {
			cs[0], cs[1] = cs[1], cs[0]
		}
		b.addNode(t, nodeName(n), cs...)
	}
	return b.manager(t, nodeName(n))
}

func (b backing) Take(t *testing.T, own subnet.Lease, by netip.Addr) {
	b.deleteNode(t, own.Key)
	b.do(t, http.MethodPost, "/api/v1/nodes", nodeBody(own.Key, map[string]string{
		annotationKey("kube-subnet-manager"): "true", annotationKey("public-ip"): by.String(), annotationKey("backend-type"): "vxlan",
	}, "10.5.66.0/24"))
}

func (b backing) Break(t *testing.T, key string) {
	b.note(t, key, map[string]any{annotationKey("public-ip"): "nonsense"})
}

func (b backing) Delete(t *testing.T, key string) { b.deleteNode(t, key) }

func (b backing) Withdraw(t *testing.T, key string) {
	b.note(t, key, map[string]any{annotationKey("kube-subnet-manager"): nil, annotationKey("public-ip"): nil, annotationKey("backend-data"): nil})
}

func TestSuite(t *testing.T) {
	s := sharedServer(t)
	subnettest.Run(t, func(t *testing.T) subnettest.Backing { return backing{newFixture(t, s)} })
}
