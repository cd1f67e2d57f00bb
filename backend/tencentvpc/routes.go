// SPDX-License-Identifier: Apache-2.0

package tencentvpc

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/cloud"
)

// table is a route table as the API describes it.
type table struct {
	ID      string `json:"RouteTableId"`
	Main    bool
	Subnets []struct {
		ID string `json:"SubnetId"`
	} `json:"AssociationSet"`
	Routes []route `json:"RouteSet"`
}

// choose returns the table that a subnet uses: its own one, or else the main table. ok is false if
// there is neither.
func choose(tables []table, subnet string) (t table, ok bool) {
	i := slices.IndexFunc(tables, func(t table) bool {
		return slices.ContainsFunc(t.Subnets, func(s struct {
			ID string `json:"SubnetId"`
		}) bool {
			return s.ID == subnet
		})
	})
	if i < 0 {
		i = slices.IndexFunc(tables, func(t table) bool { return t.Main })
	}
	if i < 0 || tables[i].ID == "" {
		return table{}, false
	}
	return tables[i], true
}

// route is a route of the API. A call that writes a route needs only some of the fields.
type route struct {
	ID          uint64 `json:"RouteId,omitempty"`
	Item        string `json:"RouteItemId,omitempty"`
	Dst         string `json:"DestinationCidrBlock,omitempty"`
	Dst6        string `json:"DestinationIpv6CidrBlock,omitempty"`
	Kind        string `json:"GatewayType,omitempty"`
	Target      string `json:"GatewayId,omitempty"`
	Type        string `json:"RouteType,omitempty"` // USER, or the name of the system that has made the route
	Description string `json:"RouteDescription,omitempty"`
	Enabled     *bool  `json:",omitempty"` // nil means yes
}

const (
	instanceKind = "NORMAL_CVM"
	user         = "USER"
)

// dst returns the destination, or an invalid prefix.
func (r route) dst() netip.Prefix {
	dst, err := netip.ParsePrefix(cmp.Or(r.Dst, r.Dst6))
	if err != nil {
		return netip.Prefix{}
	}
	return dst.Masked()
}

// disabled reports whether r exists, but carries no packets.
func (r route) disabled() bool { return r.Enabled != nil && !*r.Enabled }

// state returns whether r carries packets. The API has no other states: calls take effect before they return.
func (r route) state() cloud.State {
	if r.disabled() {
		return cloud.Idle
	}
	return cloud.Carrying
}

// id returns a route with only the fields that identify r in calls.
func (r route) id() route { return route{ID: r.ID, Item: r.Item} }

// instance is an instance as the API describes it.
type instance struct {
	State   string   `json:"InstanceState"`
	Private []string `json:"PrivateIpAddresses"` // of the primary network interface
	Public  []string `json:"PublicIpAddresses"`
	Place   struct {
		Subnet string `json:"SubnetId"`
	} `json:"VirtualPrivateCloud"`
}

// runs reports whether the instance can get packets now or soon.
func (i instance) runs() bool {
	return !slices.Contains([]string{"STOPPED", "STOPPING", "SHUTDOWN", "TERMINATING", "LAUNCH_FAILED"}, i.State)
}
