// SPDX-License-Identifier: Apache-2.0

// Package subnettest contains the conformance suite that every subnet.Manager must pass, and what tests of
// managers need.
package subnettest

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/subnet"
)

// Backing gives the suite access to the store behind the managers.
type Backing interface {
	// SetConfig replaces the configuration. An empty string means no configuration.
	SetConfig(t *testing.T, raw string)
	// Manager returns a new manager, like that of a daemon that starts on the given node.
	// previous are the subnets that the node had before. The backing closes the manager
	// when the test ends.
	Manager(t *testing.T, node int, previous ...netip.Prefix) subnet.Manager
	// Take gives the key of own to another node, whose public address is by.
	Take(t *testing.T, own subnet.Lease, by netip.Addr)
	// Break makes a lease undecodable.
	Break(t *testing.T, key string)
	// Delete removes a lease together with its node.
	Delete(t *testing.T, key string)
	// Withdraw removes the lease of a node that still exists.
	Withdraw(t *testing.T, key string)
	// Allocates reports whether managers choose subnets and leases expire. It is false if another
	// system assigns the subnets, as Kubernetes does.
	Allocates() bool
}

const (
	configV4   = `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`
	configDual = `{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`
	configV6   = `{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`
	patience   = 10 * time.Second
)

// claim returns the claim of node n. It has a public address in each family of config.
func claim(config string, n int) subnet.Claim {
	c := subnet.Claim{BackendType: "vxlan"}
	data := json.RawMessage(fmt.Sprintf(`{"VNI":1,"VtepMAC":"02:00:00:00:00:%02x"}`, n))
	if config != configV6 {
		c.Endpoints = append(c.Endpoints, subnet.Endpoint{PublicIP: netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}), Data: data})
	}
	if config != configV4 {
		a := netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", n))
		c.Endpoints = append(c.Endpoints, subnet.Endpoint{PublicIP: a, Data: data})
	}
	return c
}

// Acquire makes m take or renew its lease with the configuration in the store.
func Acquire(ctx context.Context, m subnet.Manager, c subnet.Claim) (subnet.Lease, error) {
	cfg, err := m.Config(ctx)
	if err != nil {
		return subnet.Lease{}, err
	}
	return m.Acquire(ctx, cfg, c)
}

// Pointers returns pointers to the given leases, without copying them, in the form that
// snapshots use.
func Pointers(leases ...subnet.Lease) []*subnet.Lease {
	all := make([]*subnet.Lease, len(leases))
	for i := range leases {
		all[i] = &leases[i]
	}
	return all
}
