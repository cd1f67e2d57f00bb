// SPDX-License-Identifier: Apache-2.0

package alivpc

import (
	"net/netip"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

// entry is a route as the API describes it.
type entry struct {
	Dst    string `json:"DestinationCidrBlock"` // or the id of a list of prefixes
	Type   string // Custom, System, or the type of the gateway that has learned the route
	Status string
	// Description contains the mark of a cluster if flanneld has made the route.
	Description string
	// Origin tells who has made a custom route, and Service who manages it. For the route of a
	// user, Origin is empty or CustomCreate, and Service is empty.
	Origin  string
	Service string `json:"ServiceType"` // TR is a transit router
	Hops    struct {
		All []hop `json:"NextHop"`
	} `json:"NextHops"`
}

type hop struct {
	Kind string `json:"NextHopType"`
	ID   string `json:"NextHopId"`
}

const (
	instanceHop = "Instance"
	custom      = "Custom"
	byUser      = "CustomCreate"
	system      = "System"
)

func state(status string) cloud.State {
	if status == "Available" {
		return cloud.Carrying
	}
	return cloud.Changing // Pending, Modifying or Deleting: calls return before the route is Available
}

func toInstance(kind string) bool { return kind == instanceHop || kind == "NetworkInterface" }

// instance is an instance as the API describes it.
type instance struct {
	ID         string `json:"InstanceId"`
	Status     string
	Attributes struct {
		Private addressList `json:"PrivateIpAddress"`
		VSwitch string      `json:"VSwitchId"` // of the primary network interface
	} `json:"VpcAttributes"`
	Public addressList `json:"PublicIpAddress"`
	EIP    struct {
		Address string `json:"IpAddress"`
	} `json:"EipAddress"`
	Interfaces struct {
		All []struct {
			Type string // Primary, Secondary or Trunk
			IPv4 struct {
				All []struct {
					Address string `json:"PrivateIpAddress"`
				} `json:"PrivateIpSet"`
			} `json:"PrivateIpSets"`
			IPv6 struct {
				All []struct {
					Address string `json:"Ipv6Address"`
				} `json:"Ipv6Set"`
			} `json:"Ipv6Sets"`
		} `json:"NetworkInterface"`
	} `json:"NetworkInterfaces"`
}

type addressList struct {
	All []string `json:"IpAddress"`
}

// runs includes instances that get packets soon.
func (i instance) runs() bool { return i.Status != "Stopped" && i.Status != "Stopping" }

func (i instance) primary() []netip.Addr {
	texts := append([]string{i.EIP.Address}, i.Attributes.Private.All...)
	texts = append(texts, i.Public.All...)
	for _, n := range i.Interfaces.All {
		if n.Type != "Primary" { // routes to an instance lead to the primary one
			continue
		}
		for _, a := range n.IPv4.All {
			texts = append(texts, a.Address)
		}
		for _, a := range n.IPv6.All {
			texts = append(texts, a.Address)
		}
	}
	return access.Addresses(texts...)
}
