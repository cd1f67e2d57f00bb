// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/flanneld/flanneld/pkg/status"
)

func TestFirewall(t *testing.T) {
	for want, f := range map[string]status.Firewall{
		"no rules asked for": {},
		"nftables":           {Kind: "nftables"},
		"iptables: no lock":  {Kind: "iptables", Error: "no lock"},
		"not up yet":         {Error: "not up yet"},
	} {
		if got := firewall(f); got != want {
			t.Errorf("%+v: %q, want %q", f, got, want)
		}
	}
}
