// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"

	"github.com/flanneld/flanneld/pkg/firewall"
)

// Docker describes the rules of Docker that keep packets of other hosts from the containers behind a bridge.
type Docker struct {
	Bridge   firewall.DockerBridge
	Program  string // iptables or ip6tables
	IPTables firewall.DockerCut
	NFTables firewall.DockerCut
}

// dockers checks whether Docker drops packets from other hosts to its containers in this host's subnet.
func (h Facts) dockers() []Finding {
	var found []Finding
	for _, d := range h.Docker {
		b := d.Bridge
		if d.IPTables.Direct || d.NFTables.Direct {
			found = append(found, serious(
				fmt.Sprintf("Docker drops packets from other hosts to containers in %s before they are routed", b.Subnet),
				`put "allow-direct-routing": true into /etc/docker/daemon.json (Docker 28.2 or later) and restart Docker; see docker.md`,
			))
		}

		unpublished := fmt.Sprintf("Docker drops forwarded packets from other hosts to %s, except to published ports", b.Name)
		if d.IPTables.Forward {
			found = append(found, serious(unpublished,
				fmt.Sprintf("%s -I DOCKER-USER -s %s -d %s -j ACCEPT (the drop-in of docker.md does so at each start)", d.Program, b.Network, b.Subnet),
			))
		}
		if d.NFTables.Forward {
			found = append(found, serious(unpublished,
				`put "bridge-accept-fwmark" into /etc/docker/daemon.json, mark the packets from the network, and restart Docker; see docker.md`,
			))
		}
	}
	return found
}
