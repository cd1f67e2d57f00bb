// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
)

func TestConfigChanges(t *testing.T) {
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
		{"network", strings.Replace(used, "10.5.", "10.6.", 1), "IPv4 network 10.5.0.0/16 -> 10.6.0.0/16"},
		{"subnet length", strings.Replace(used, "{", `{"SubnetLen":25,`, 1), "IPv4 subnets 10.5.1.0/24 to 10.5.255.0/24 -> 10.5.0.128/25 to 10.5.255.128/25"},
		{"secret", strings.Replace(used, "swordfish", "tuna", 1), "Backend.PSK"},
		{"secret removed", strings.Replace(used, `"PSK":"swordfish",`, "", 1), "Backend.PSK"},
		{"numbers", strings.Replace(used, `"ListenPort":51820`, `"ListenPort":51821,"PersistentKeepaliveInterval":5`, 1),
			"Backend.ListenPort 51820 -> 51821, Backend.PersistentKeepaliveInterval default -> 5"},
		{"another backend", `{"Network":"10.5.0.0/16","EnableNFTables":true}`,
			"EnableNFTables false -> true, Backend.Type wireguard -> udp, Backend.ListenPort 51820 -> default, Backend.PSK"},
		{"another family", `{"EnableIPv6":true,"IPv6Network":"fd00:5::/48",` + used[1:], "IPv6 network none -> fd00:5::/48"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, _, err := subnet.ParseConfig([]byte(used))
			if err != nil {
				t.Fatal(err)
			}
			b, _, err := subnet.ParseConfig([]byte(tc.to))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, strings.Join(configChanges(a, b), ", ")); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestConfigWatch(t *testing.T) {
	const used = `{"Network":"10.5.0.0/16"}`
	all, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	k := newConfigWatch(func(text []byte) (subnet.Config, error) {
		cfg, _, err := ValidateConfig(text, true, all.Registry)
		return cfg, err
	})
	if k.used, _, err = subnet.ParseConfig([]byte(used)); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ text, want string }{
		{used, ""},
		{"", "there is no configuration any more"},
		{"{", "invalid"},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":99999}}`, "Backend.Port is 99999"},
		{`{"Network":"10.5.0.0/29"}`, "too small"},
		{used, ""},
	} {
		var text []byte
		if step.text != "" {
			text = []byte(step.text)
		}
		k.apply(t.Context(), text)
		if got := k.difference(); !strings.Contains(got, step.want) || (step.want == "") != (got == "") {
			t.Errorf("after %q: %q, want %q", step.text, got, step.want)
		}
		select {
		case <-k.changed:
			t.Fatalf("after %q the daemon would end", step.text)
		default:
		}
	}
	k.apply(t.Context(), []byte(`{"Network":"10.6.0.0/16"}`))
	if err := k.exit(t.Context()); !errors.Is(err, ErrConfigChanged) || !strings.Contains(err.Error(), "10.6.0.0/16") {
		t.Errorf("exit: %v", err)
	}
}
