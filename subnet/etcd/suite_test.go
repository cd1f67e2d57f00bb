// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// backing gives the suite access to an etcd.
type backing struct{ *fixture }

func (b backing) SetConfig(t *testing.T, raw string) {
	if raw == "" {
		b.delete(t, "config")
		return
	}
	b.put(t, "config", raw)
}

func (b backing) Manager(t *testing.T, _ int, previous ...netip.Prefix) subnet.Manager {
	return b.manager(t, func(c *Config) { c.Previous = previous })
}

func (b backing) Take(t *testing.T, own subnet.Lease, by netip.Addr) {
	b.put(t, "subnets/"+own.Key, fmt.Sprintf(`{"PublicIP":"%s","PublicIPv6":null}`, by), b.grant(t, 60))
}

func (b backing) Break(t *testing.T, key string)    { b.put(t, "subnets/"+key, "{") }
func (b backing) Delete(t *testing.T, key string)   { b.delete(t, "subnets/"+key) }
func (b backing) Withdraw(t *testing.T, key string) { b.Delete(t, key) }
func (b backing) Allocates() bool                   { return true }

func TestSuite(t *testing.T) {
	s := sharedServer(t)
	subnettest.Run(t, func(t *testing.T) subnettest.Backing { return backing{newFixture(t, s)} })
}
