// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// Flavour is a kind of firewall.
type Flavour string

// The flavours.
const (
	IPTables Flavour = "iptables"
	NFTables Flavour = "nftables"
	// Auto stands for the flavour that suits the other programs of the host.
	Auto Flavour = "auto"
)

// Choice is the flavour that the rules of a network should use, and the reason for it.
// Flavour may be Auto.
type Choice struct {
	Flavour Flavour
	Reason  string // for the log; ignored if Flavour is Auto, which has reasons of its own
	// Source is text that follows Reason in the log and says where the choice is from. A
	// change of Source alone is not logged.
	Source string
}

// automatic returns the flavour that suits the other programs of the host, and why.
func automatic() (f Flavour, why string) {
	if err := nftables.Available(); err != nil {
		return IPTables, err.Error()
	}
	if !iptables.Default.Present() {
		return NFTables, "no iptables program is installed"
	}
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		if there, err := nftables.HasTable(f, "kube-proxy"); err == nil && there {
			return NFTables, "kube-proxy runs in nftables mode"
		}
	}
	return IPTables, "iptables is installed, and kube-proxy does not run in nftables mode"
}
