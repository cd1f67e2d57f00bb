// SPDX-License-Identifier: Apache-2.0

package subnettest_test

import (
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// backing adapts a Store to the suite.
type backing struct{ *subnettest.Store }

func (b backing) SetConfig(_ *testing.T, raw string) { b.Store.SetConfig(raw) }
func (b backing) Break(_ *testing.T, key string)     { b.Store.Break(key) }
func (b backing) Delete(_ *testing.T, key string)    { b.Store.Delete(key) }

func (b backing) Withdraw(_ *testing.T, key string) { b.Store.Delete(key) }
func (b backing) Allocates() bool                   { return true }

func (b backing) Manager(_ *testing.T, _ int, previous ...netip.Prefix) subnet.Manager {
	return b.Store.Manager(previous...)
}

func (b backing) Take(_ *testing.T, own subnet.Lease, by netip.Addr) {
	b.Put(subnet.Lease{Key: own.Key, Endpoints: []subnet.Endpoint{{Subnet: own.Endpoints[0].Subnet, PublicIP: by}}})
}

func TestStore(t *testing.T) {
	subnettest.Run(t, func(*testing.T) subnettest.Backing { return backing{subnettest.NewStore()} })
}
