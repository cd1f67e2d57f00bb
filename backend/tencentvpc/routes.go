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
	Subnets []association `json:"AssociationSet"`
	Routes  []route       `json:"RouteSet"`
}

type association struct {
	Subnet string `json:"SubnetId"`
}

// choose returns the table that a subnet uses: its own one, or else the main table.
func choose(tables []table, subnet string) (t table, ok bool) {
	i := slices.IndexFunc(tables, func(t table) bool { return slices.Contains(t.Subnets, association{subnet}) })
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

// dst returns an invalid prefix if the destination is none.
func (r route) dst() netip.Prefix {
	dst, _ := netip.ParsePrefix(cmp.Or(r.Dst, r.Dst6))
	return dst.Masked()
}

func (r route) disabled() bool { return r.Enabled != nil && !*r.Enabled }

func (r route) state() cloud.State {
	if r.disabled() {
		return cloud.Idle
	}
	return cloud.Carrying // calls take effect before they return
}

// id has only the fields that identify r in calls.
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

// runs includes instances that get packets soon.
func (i instance) runs() bool {
	return !slices.Contains([]string{"STOPPED", "STOPPING", "SHUTDOWN", "TERMINATING", "LAUNCH_FAILED"}, i.State)
}
