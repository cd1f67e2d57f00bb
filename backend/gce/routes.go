// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"path"
	"strconv"
	"strings"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

// defaultPriority is the priority of a route that replaces none. Lower numbers are preferred.
const defaultPriority = 1000

// route is a route of the Compute API. A call that writes a route needs only some of the fields.
type route struct {
	Name        string    `json:"name"`
	Description string    `json:"description"`
	Network     string    `json:"network"` // URL
	DestRange   string    `json:"destRange"`
	Priority    int       `json:"priority"`
	Instance    string    `json:"nextHopInstance,omitempty"` // URL
	Tags        []string  `json:"tags,omitempty"`            // of the instances for which the route counts; none means all
	Type        string    `json:"routeType,omitempty"`       // STATIC, SUBNET, BGP or TRANSIT
	IP          string    `json:"nextHopIp,omitempty"`
	Gateway     string    `json:"nextHopGateway,omitempty"`
	LocalNet    string    `json:"nextHopNetwork,omitempty"`
	Peering     string    `json:"nextHopPeering,omitempty"`
	Balancer    string    `json:"nextHopIlb,omitempty"`
	VPN         string    `json:"nextHopVpnTunnel,omitempty"`
	Hub         string    `json:"nextHopHub,omitempty"`
	Status      string    `json:"routeStatus,omitempty"`
	Warnings    []warning `json:"warnings,omitempty"`
}

// warning is what the Compute API says about a route that gets no packets.
type warning struct {
	Code string `json:"code"`
}

// target names an instance by its zone and name.
func (r route) target() string {
	if r.Instance != "" {
		return targetOf(path.Base(path.Dir(path.Dir(r.Instance))), path.Base(r.Instance))
	}
	if r.LocalNet != "" {
		return cloud.LocalTarget
	}
	return path.Base(cmp.Or(r.IP, r.Gateway, r.Peering, r.Balancer, r.VPN, r.Hub, "an unknown target"))
}

func targetOf(zone, instance string) string { return zone + "/" + instance }

// static reports whether a call of the API has made the route.
func (r route) static() bool {
	return r.Type == "STATIC" || r.Type == "" && r.LocalNet == "" && r.Peering == "" && r.Hub == ""
}

// statuses are the values of routeStatus. A static route has none.
func statuses() map[string]cloud.State {
	return map[string]cloud.State{
		"": cloud.Carrying, "ACTIVE": cloud.Carrying, "PENDING": cloud.Changing, "INACTIVE": cloud.Idle, "DROPPED": cloud.Idle,
	}
}

// nextHops are the warnings about the next hop of a route. Other warnings are not about packets.
func nextHops() map[string]cloud.State {
	return map[string]cloud.State{
		"NEXT_HOP_INSTANCE_NOT_FOUND":             cloud.Gone,
		"NEXT_HOP_INSTANCE_NOT_ON_NETWORK":        cloud.Idle,
		"NEXT_HOP_INSTANCE_HAS_NO_IPV6_INTERFACE": cloud.Idle,
		"NEXT_HOP_ADDRESS_NOT_ASSIGNED":           cloud.Idle,
		"NEXT_HOP_NOT_RUNNING":                    cloud.Idle,
		"NEXT_HOP_CANNOT_IP_FORWARD":              cloud.Carrying, // the flanneld there reports it
	}
}

func (r route) state() cloud.State {
	s := statuses()[r.Status]
	for _, w := range r.Warnings {
		s = max(s, nextHops()[w.Code])
	}
	return s
}

// dst returns an invalid prefix if the destination is none.
func (r route) dst() netip.Prefix {
	dst, _ := netip.ParsePrefix(r.DestRange)
	return dst.Masked()
}

func (r route) belongsTo(cluster string) bool {
	if r.Description == "" { // as routes of flannel, which are known by their names
		return r.Name == flannelName(r.dst())
	}
	by, marked := cloud.MarkedBy(r.Description)
	return marked && by == cluster
}

func flannelName(dst netip.Prefix) string {
	return "flannel-" + strings.NewReplacer(".", "-", ":", "-", "/", "-").Replace(dst.String())
}

func (r route) name(cluster string) string {
	// Names are unique in a project, so this one depends on all that may differ between two routes to
	// one destination.
	sum := sha256.Sum256([]byte(strings.Join([]string{r.Network, cluster, r.Instance, strconv.Itoa(r.Priority)}, " ")))
	return flannelName(r.dst()) + "-" + hex.EncodeToString(sum[:4])
}

// written has only the fields that flanneld writes.
func (r route) written() route {
	return route{Name: r.Name, Description: r.Description, Network: r.Network, DestRange: r.DestRange, Priority: r.Priority, Instance: r.Instance}
}

// convert returns r as a route of table. own is the target of routes to this host.
func (r route) convert(table, cluster, own string) cloud.Route {
	c := cloud.Route{Table: table, Dst: r.dst(), Target: r.target(), ByCall: r.static()}
	if c.Target != own { // a new route to this host would get the same warning
		c.State = r.state()
	}

	switch {
	case len(r.Tags) > 0:
		c.Foreign = "which counts only for some instances"
	case c.Target == own || r.belongsTo(cluster):
	case r.Instance == "":
		c.Foreign = "which leads to no instance"
	default:
		c.Foreign = cmp.Or(cloud.ForeignMark(r.Description, cluster), fmt.Sprintf("whose description %q is not of this cluster", access.Clean(r.Description)))
	}
	return c
}
