// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestChanges(t *testing.T) {
	const used = `{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard","PSK":"swordfish","ListenPort":51820}}`
	for _, tc := range []struct {
		name, to string
		want     string
	}{
		{"the same", used, ""},
		{"other spaces, order and case", `{ "backend": {"listenport":51820, "Type":"WireGuard", "PSK":"swordfish"}, "network": "10.5.0.0/16" }`, ""},
		{"defaults written out", `{"EnableIPv4":true,"SubnetLen":24,"Network":"10.5.0.0/16","EnableNFTables":false,"NonMasqueradeCIDRs":[],` +
			`"Backend":{"Type":"wireguard","PSK":"swordfish","ListenPort":51820}}`, ""},
		{"an unknown key", `{"Comment":1,"Network":"10.5.0.0/16","Backend":{"Type":"wireguard","PSK":"swordfish","ListenPort":51820}}`, ""},
		{"keys given several times", `{"Backend":{"Type":"udp"},"Network":"10.5.0.0/16","backend":{"Type":"wireguard","psk":"tuna","LISTENPORT":1,"PSK":"swordfish","ListenPort":51820}}`, ""},
		{"network", strings.Replace(used, "10.5.", "10.6.", 1), "IPv4 network 10.5.0.0/16 -> 10.6.0.0/16"},
		{"subnet length", strings.Replace(used, "{", `{"SubnetLen":25,`, 1), "IPv4 subnets 10.5.1.0/24 to 10.5.255.0/24 -> 10.5.0.128/25 to 10.5.255.128/25"},
		{"subnets that no host can get", strings.Replace(used, "{", `{"SubnetLen":31,`, 1), "IPv4 subnets 10.5.1.0/24 to 10.5.255.0/24 -> no subnets to assign"},
		{"a word", strings.Replace(used, `"PSK"`, `"Mode":"auto","PSK"`, 1), "Backend.Mode default -> auto"},
		{"secret", strings.Replace(used, "swordfish", "tuna", 1), "Backend.PSK"},
		{"secret removed", strings.Replace(used, `"PSK":"swordfish",`, "", 1), "Backend.PSK"},
		{"numbers", strings.Replace(used, `"ListenPort":51820`, `"ListenPort":51821,"PersistentKeepaliveInterval":1000000`, 1),
			"Backend.ListenPort 51820 -> 51821, Backend.PersistentKeepaliveInterval default -> 1000000"},
		{"a key with null", strings.Replace(used, `"PSK"`, `"Mode":null,"PSK"`, 1), ""},
		{"secret added", strings.Replace(used, `"PSK"`, `"Key":"tuna","PSK"`, 1), "Backend.Key"},
		{"a word that may be a secret, because it is long", strings.Replace(used, `"PSK"`, `"Mode":"`+strings.Repeat("x", 1000)+`","PSK"`, 1), "Backend.Mode"},
		{"destinations", strings.Replace(used, "{", `{"NonMasqueradeCIDRs":["192.0.2.0/24","192.0.2.0/25"],`, 1), "NonMasqueradeCIDRs [] -> [192.0.2.0/24 192.0.2.0/25]"},
		{"destinations in another order", strings.Replace(used, "{", `{"NonMasqueradeCIDRs":["192.0.2.0/25","192.0.2.0/24","192.0.2.0/25"],`, 1), "NonMasqueradeCIDRs [] -> [192.0.2.0/24 192.0.2.0/25]"},
		{"a migration", strings.Replace(used, "{", `{"NextBackend":{"Type":"vxlan","VNI":7},`, 1), "NextBackend.Type none -> vxlan, NextBackend.VNI default -> 7"},
		{"another backend", `{"Network":"10.5.0.0/16","EnableNFTables":true}`,
			"EnableNFTables false -> true, Backend.Type wireguard -> udp, Backend.ListenPort 51820 -> default, Backend.PSK"},
		{"another family", `{"EnableIPv6":true,"IPv6Network":"fd00:5::/48",` + used[1:], "IPv6 network none -> fd00:5::/48"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, err := ParseConfig([]byte(used))
			if err != nil {
				t.Fatal(err)
			}
			b, err := ParseConfig([]byte(tc.to))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, strings.Join(Changes(a, b), ", ")); diff != "" {
				t.Error(diff)
			}
		})
	}
}
