// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"strings"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

type spec struct {
	name, comment  string
	kind           string
	hook, priority uint32
}

// Priorities of base chains.
const (
	srcnat = 100
	filter = 0
	mangle = 1<<32 - 150 // the kernel reads it as the signed number -150
)

var specs = [...]spec{
	firewall.Postrouting:  {"postrtg", "chain to manage traffic masquerading by flannel", "nat", unix.NF_INET_POST_ROUTING, srcnat},
	firewall.Forward:      {"forward", "chain to accept flannel traffic", "filter", unix.NF_INET_FORWARD, filter},
	firewall.GuardForward: {"guard-forward", "chain to keep pods from the tunnels of other hosts", "filter", unix.NF_INET_FORWARD, mangle},
	firewall.GuardInput:   {"guard-input", "chain to keep pods from the tunnel of this host", "filter", unix.NF_INET_LOCAL_IN, mangle},
}

func tableName(f prefix.Family) string { return "flannel-" + strings.ToLower(f.String()) }
