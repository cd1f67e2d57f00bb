// SPDX-License-Identifier: Apache-2.0

package subnet_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/subnet"
)

var netipComparer = cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})

func TestParseConfig(t *testing.T) {
	v4 := []subnet.Network{{Prefix: netip.MustParsePrefix("10.5.0.0/16")}}
	v6 := []subnet.Network{{Prefix: netip.MustParsePrefix("fd00:10:5::/48")}}
	for _, tc := range []struct {
		name, raw string
		want      subnet.Config
	}{
		{
			name: "as recorded from a vxlan cluster",
			raw:  `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`,
			want: subnet.Config{Networks: v4, BackendType: "vxlan", Backend: json.RawMessage(`{"Type":"vxlan"}`)},
		},
		{
			name: "no backend means udp",
			raw:  `{"Network":"10.5.0.0/16"}`,
			want: subnet.Config{Networks: v4, BackendType: "udp"},
		},
		{
			name: "dual stack",
			raw:  `{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:10:5::/48","EnableNFTables":true}`,
			want: subnet.Config{Networks: append(v4[:1:1], v6...), NFTables: true, BackendType: "udp"},
		},
		{
			name: "destinations that are not masqueraded",
			raw:  `{"Network":"10.5.0.0/16","NonMasqueradeCIDRs":["192.168.7.1/16","2001:db8::/32"]}`,
			want: subnet.Config{Networks: v4, BackendType: "udp", NonMasquerade: []netip.Prefix{
				netip.MustParsePrefix("192.168.0.0/16"), netip.MustParsePrefix("2001:db8::/32"),
			}},
		},
		{
			name: "IPv6 alone",
			raw:  `{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:10:5::/48","IPv6SubnetMin":null,"IPv6SubnetMax":null}`,
			want: subnet.Config{Networks: v6, BackendType: "udp"},
		},
		{
			name: "keys in any case, host part of the network dropped",
			raw:  `{"network":"10.5.0.5/16","SUBNETLEN":25,"subnetMin":"10.5.1.0","SubnetMAX":"10.5.9.0","backend":{"type":"Host-GW"}}`,
			want: subnet.Config{
				Networks: []subnet.Network{{
					Prefix: netip.MustParsePrefix("10.5.0.0/16"), SubnetLen: 25,
					Min: netip.MustParseAddr("10.5.1.0"), Max: netip.MustParseAddr("10.5.9.0"),
				}},
				BackendType: "host-gw",
				Backend:     json.RawMessage(`{"type":"Host-GW"}`),
			},
		},
		{
			name: "unspecified limits count as not given",
			raw:  `{"Network":"10.5.0.0/16","SubnetMin":"0.0.0.0","SubnetMax":"0.0.0.0","EnableIPv4":null}`,
			want: subnet.Config{Networks: v4, BackendType: "udp"},
		},
		{
			name: "a backend without a type has an empty one",
			raw:  `{"Network":"10.5.0.0/16","Backend":null}`,
			want: subnet.Config{Networks: v4, Backend: json.RawMessage(`null`)},
		},
		{
			name: "unknown keys are one warning each, those of the backend are left to it",
			raw:  `{"Netwrok":"10.6.0.0/16","Network":"10.5.0.0/16","subnet_len":24,"Backend":{"Type":"vxlan","Prot":1}}`,
			want: subnet.Config{
				Networks: v4, BackendType: "vxlan", Backend: json.RawMessage(`{"Type":"vxlan","Prot":1}`),
				Warnings: []string{
					`unknown key "Netwrok" is ignored, the nearest known key is "Network"`,
					`unknown key "subnet_len" is ignored, the nearest known key is "SubnetLen"`,
				},
			},
		},
		{
			name: "of a key that is given several times the last one counts",
			raw:  `{"Network":"10.6.0.0/16","Backend":{"Type":"udp"},"Network":"10.5.0.0/16","backend":{"Type":"vxlan"}}`,
			want: subnet.Config{
				Networks: v4, BackendType: "vxlan", Backend: json.RawMessage(`{"Type":"vxlan"}`),
				Warnings: []string{
					`key "Network" is given more than once: the last one counts`,
					`keys "Backend" and "backend" are the same: the last one, "backend", counts`,
				},
			},
		},
		{
			name: "a network of a family that is not enabled does not matter",
			raw:  `{"EnableIPv4":false,"Network":"127.0.0.0/8","EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`,
			want: subnet.Config{Networks: v6, BackendType: "udp"},
		},
		{
			name: "a next backend that is null is none",
			raw:  `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"},"NextBackend":null}`,
			want: subnet.Config{Networks: v4, BackendType: "vxlan", Backend: json.RawMessage(`{"Type":"vxlan"}`)},
		},
		{
			name: "IPv6 alone in k3s",
			raw:  `{"Network":"0.0.0.0/0","EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:10:5::/48"}`,
			want: subnet.Config{Networks: v6, BackendType: "udp"},
		},
		{
			name: "what IPv6 looks like with the last four bytes alone",
			raw:  `{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"::10.5.0.0/112"}`,
			want: subnet.Config{
				Networks:    []subnet.Network{{Prefix: netip.MustParsePrefix("::a05:0/112")}},
				BackendType: "udp",
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := subnet.ParseConfig([]byte(tc.raw))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, netipComparer); diff != "" {
				t.Errorf("config differs (-want +got):\n%s", diff)
			}
		})
	}
}

// TestWarningsAreLimited parses an object with thousands of unknown keys.
func TestWarningsAreLimited(t *testing.T) {
	var raw strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&raw, `"unknown%d":1,`, i)
	}
	cfg, err := subnet.ParseConfig([]byte("{" + raw.String() + `"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	long, err := subnet.ParseConfig([]byte(`{"` + strings.Repeat("x", 1000) + `":1,"Network":"10.5.0.0/16"}`))
	if err != nil || len(long.Warnings) != 1 || len(long.Warnings[0]) > 200 {
		t.Errorf("%q, error %v, want one short warning", long.Warnings, err)
	}
	if last := cfg.Warnings[len(cfg.Warnings)-1]; len(cfg.Warnings) > 10 || last != "19992 more keys are ignored or given more than once" {
		t.Errorf("%d warnings, the last one is %q", len(cfg.Warnings), last)
	}
}

func TestParseConfigRefuses(t *testing.T) {
	for _, tc := range []struct{ raw, want string }{
		{``, "want a JSON object, have nothing"},
		{`null`, "want a JSON object, have null"},
		{`[]`, "want a JSON object, have a JSON array"},
		{`{"Network":"10.5.0.0/16"`, "byte 24: unexpected end of JSON input"},
		{`{"Network":"10.5.0.0/16"} x`, "byte 27: invalid character 'x' after top-level value"},
		{`{"Network":"10.5.0.0/16"}{}`, "after top-level value"},
		{`{}`, "please define a correct Network parameter"},
		{`{"Network":"0.0.0.0/0"}`, "please define a correct Network parameter"},
		{`{"EnableIPv6":true,"IPv6Network":"fd00::/48"}`,
			"please define a correct Network parameter, or set EnableIPv4 to false for IPv6 alone"},
		{`{"Network":"10.5.0.0/16","EnableIPv6":true}`, "please define a correct IPv6Network parameter"},
		{`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"::/0"}`, "please define a correct IPv6Network parameter"},
		{`{"EnableIPv4":false,"Network":"10.5.0.0/16"}`, "no address family is enabled"},
		{`{"Network":"fd00::/48"}`, `Network: invalid IPv4 CIDR format: "fd00::/48"`},
		{`{"Network":""}`, `Network: invalid IPv4 CIDR format: ""`},
		{`{"Network":"10.5.0.0/16","NonMasqueradeCIDRs":["192.168.0.0"]}`, `NonMasqueradeCIDRs: "192.168.0.0" is not a CIDR (want for example "10.5.0.0/16")`},
		{`{"Network":"10.5.0.0/16","NonMasqueradeCIDRs":["::ffff:192.168.0.0/112"]}`, `NonMasqueradeCIDRs: "::ffff:192.168.0.0/112" is not a CIDR`},
		{`{"Network":"10.5.0.0/16","NonMasqueradeCIDRs":"192.168.0.0/16"}`, `NonMasqueradeCIDRs: want a list of strings, have string`},
		{`{"Network":"10.5.0.0"}`, `Network: invalid IPv4 CIDR format: "10.5.0.0" (want for example "10.5.0.0/16")`},
		{`{"Network":null}`, "Network: want a string, have null"},
		{`{"Network":7}`, "Network: want a string, have 7"},
		{`{"Network":"10.5.0.0/16","SubnetMin":null}`, "SubnetMin: want a string, have null"},
		{`{"Network":"10.5.0.0/16","SubnetMin":"fd00::1"}`, `SubnetMin: "fd00::1" is not an IPv4 address`},
		{`{"Network":"10.5.0.0/16","SubnetMax":""}`, `SubnetMax: "" is not an IPv4 address`},
		{`{"Network":"10.5.0.0/16","SubnetLen":"24"}`, "SubnetLen: want a whole number from 0 to 65535, have string"},
		{`{"Network":"10.5.0.0/16","SubnetLen":-1}`, "SubnetLen: want a whole number from 0 to 65535, have number -1"},
		{`{"Network":"10.5.0.0/16","EnableIPv6":"true"}`, "EnableIPv6: want true or false, have string"},
		{`{"Network":"10.5.0.0/16","IPv6Network":"10.6.0.0/16"}`, `IPv6Network: invalid IPv6 CIDR format: "10.6.0.0/16"`},
		{`{"Network":"10.5.0.0/16","IPv6Network":"fd00"}`, `IPv6Network: invalid IPv6 CIDR format: "fd00"`},
		{`{"Network":"10.5.0.0/16","IPv6Network":"::ffff:10.6.0.0/112"}`, "IPv6Network: invalid IPv6 CIDR format"},
		{`{"Network":"10.5.0.0/16","IPv6SubnetMin":"10.6.0.0"}`, `IPv6SubnetMin: "10.6.0.0" is not an IPv6 address`},
		{`{"Network":"10.5.0.0/16","IPv6SubnetMin":"fd00"}`, `IPv6SubnetMin: "fd00" is not an IPv6 address`},
		{`{"Network":"10.5.0.0/16","IPv6SubnetMax":"fe80::1%eth0"}`, "is not an IPv6 address"},
		{`{"Network":"127.5.0.0/16"}`, `Network: 127.5.0.0/16 is loopback and reaches no other host: want another range, for example "10.5.0.0/16"`},
		{`{"Network":"169.254.0.0/16"}`, "Network: 169.254.0.0/16 is link-local"},
		{`{"Network":"239.1.0.0/16"}`, "Network: 239.1.0.0/16 is multicast"},
		{`{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fe80:1::/48"}`, `IPv6Network: fe80:1::/48 is link-local and reaches no other host: want another range, for example "fd00:10:5::/48"`},
		{`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"ff05::/48"}`, "IPv6Network: ff05::/48 is multicast"},
		{`{"Network":"10.5.0.0/16","Backend":"vxlan"}`, "Backend: want a JSON object, have a JSON string"},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":1}}`, "Backend: Type: want a string, have number"},
		{`{"Network":"10.5.0.0/16","NextBackend":{"Type":1}}`, "NextBackend: Type: want a string, have number"},
		{`{"Network":"10.5.0.0/16","NextBackend":{}}`, "NextBackend has no Type"},
		{`{"Network":"` + strings.Repeat("x", 1<<20) + `"}`, "Network: invalid IPv4 CIDR format"},
	} {
		_, err := subnet.ParseConfig([]byte(tc.raw))
		checkInvalid(t, tc.raw, err, tc.want)
	}
}

// TestNoNetwork checks that a configuration without any network is not advised to be one for IPv6 alone.
func TestNoNetwork(t *testing.T) {
	if _, err := subnet.ParseConfig([]byte(`{}`)); err == nil || strings.Contains(err.Error(), "EnableIPv4") {
		t.Errorf("error is %v", err)
	}
}

func checkInvalid(t *testing.T, input string, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, subnet.ErrInvalidConfig) {
		t.Errorf("%.60s: error is %v, want ErrInvalidConfig with %q", input, err, want)
		return
	}
	if strings.Contains(err.Error(), "\n") || len(err.Error()) > 300 {
		t.Errorf("%.60s: error is not one short line: %.400q", input, err)
	}
}

func TestDecodeBackend(t *testing.T) {
	type vxlan struct {
		VNI      int
		Learning bool
		Port     uint16 `json:"Port,omitempty"`
		Limit    int    `json:"Size"`
		Hidden   int    `json:"-"`
		internal int    //nolint:unused // the test checks that an unexported field is not a key
	}
	got := vxlan{VNI: 1, Port: 8472}
	warnings, err := subnet.DecodeBackend(
		json.RawMessage(`{"type":"vxlan","vni":7,"Prot":9,"Learn":true,"internal":3,"Old":1,"size":5,"Hidden":6}`), &got, "Old")
	if err != nil {
		t.Fatal(err)
	}
	if want := (vxlan{VNI: 7, Port: 8472, Limit: 5}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	want := []string{
		`unknown key "Prot" is ignored, the nearest known key is "Port"`,
		`unknown key "Learn" is ignored, the nearest known key is "Learning"`,
		`unknown key "internal" is ignored, the nearest known key is "VNI"`,
		`unknown key "Hidden" is ignored, the nearest known key is "Size"`,
	}
	if diff := cmp.Diff(want, warnings); diff != "" {
		t.Errorf("warnings differ (-want +got):\n%s", diff)
	}
	for _, raw := range []json.RawMessage{nil, json.RawMessage("null")} {
		if warnings, err := subnet.DecodeBackend(raw, &got); err != nil || warnings != nil {
			t.Errorf("%q: got %v, %v, want nothing", raw, warnings, err)
		}
	}
	_, err = subnet.DecodeBackend(json.RawMessage(`{"Port":65536}`), &got)
	if want := "Backend: Port: want a whole number from 0 to 65535, have number 65536"; err == nil || err.Error() != want {
		t.Errorf("error is %v, want %q", err, want)
	}
}

func TestShorten(t *testing.T) {
	x := strings.Repeat("x", 64)
	for text, want := range map[string]string{x: x, x + "x": x + "…", x[:63] + "éx": x[:63] + "…"} {
		if got := subnet.Shorten(text); got != want {
			t.Errorf("%s becomes %s, want %s", text, got, want)
		}
	}
}

// TestKeys removes a key of an object, and reads its keys.
func TestKeys(t *testing.T) {
	for _, tc := range []struct{ raw, without, keys string }{
		{`{"Network":"x", "backend":{"Type":"udp"}, "A":[1, 2]}`, `{"Network":"x","A":[1, 2]}`, `map[A:[1, 2] Network:"x" backend:{"Type":"udp"}]`},
		{`{"a":1,"BACKEND":2,"A":3,"a":4,"Backend":5}`, `{"a":1,"A":3,"a":4}`, `map[Backend:5 a:4]`},
		{`{"a\n\"b":1}`, `{"a\n\"b":1}`, "map[a\n\"b:1]"},
		{` {"Backend":1} `, `{}`, `map[Backend:1]`},
		{`{}`, `{}`, `map[]`},
		{`["a", 1]`, `{}`, "want a JSON object, have a JSON array"},
		{`null`, `{}`, "want a JSON object, have null"},
		{` `, `{}`, "want a JSON object, have nothing"},
		{`{"a":1`, `{}`, "byte 6: unexpected end of JSON input"},
		{`{"a":1,`, `{}`, "byte 7: unexpected end of JSON input"},
	} {
		if got := subnet.WithoutKey(json.RawMessage(tc.raw), "Backend"); string(got) != tc.without {
			t.Errorf("%s without Backend: %s, want %s", tc.raw, got, tc.without)
		}
		keys, err := subnet.Keys(json.RawMessage(tc.raw))
		texts := map[string]string{}
		for key, value := range keys {
			texts[key] = string(value)
		}
		got := fmt.Sprint(texts)
		if err != nil {
			got = err.Error()
		}
		if got != tc.keys {
			t.Errorf("keys of %s: %s, want %s", tc.raw, got, tc.keys)
		}
	}
}

// TestSpares checks which configurations hosts can be given a subnet of that contains the address of a host.
func TestSpares(t *testing.T) {
	for _, tc := range []struct{ config, used, addr, want string }{
		{`{"Network":"10.0.0.0/8"}`, `{"Network":"10.5.0.0/16"}`, "10.99.0.11", "Network: a host could get the subnet with 10.99.0.11, an address of this host: leave it out by SubnetMin and SubnetMax"},
		{`{"Network":"10.0.0.0/8","SubnetMin":"10.128.0.0"}`, `{"Network":"10.5.0.0/16"}`, "10.99.0.11", ""},
		{`{"Network":"10.0.0.0/8"}`, `{"Network":"10.96.0.0/12"}`, "10.99.0.11", ""},
		{`{"Network":"10.0.0.0/8"}`, "", "10.99.0.11", "10.99.0.11"},
		{`{"Network":"10.5.0.0/16"}`, "", "10.99.0.11", ""},
		{`{"Network":"10.0.0.0/8"}`, "", "10.0.0.11", ""}, // the first subnet is not used
		{`{"Network":"10.5.0.0/16","SubnetLen":30}`, "", "10.5.255.255", "10.5.255.255"},
		{`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"2001:db8::/32"}`, "", "2001:db8:1::1", "IPv6Network: a host could get the subnet with 2001:db8:1::1, an address of this host: leave it out by IPv6SubnetMin and IPv6SubnetMax"},
		{`{"Network":"10.5.0.0/16"}`, "", "fd00::1", ""},
		{`{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.7"}`, "", "10.99.0.11", "SubnetMin is not on a SubnetLen boundary"},
	} {
		var used subnet.Config
		var err error
		if tc.used != "" {
			if used, err = subnet.ParseConfig([]byte(tc.used)); err != nil {
				t.Fatal(err)
			}
		}
		cfg, err := subnet.ParseConfig([]byte(tc.config))
		if err != nil {
			t.Fatal(err)
		}
		err = cfg.Spares(used, "this host", netip.Addr{}, netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr(tc.addr))
		if tc.want != "" {
			checkInvalid(t, tc.config, err, tc.want)
		} else if err != nil {
			t.Errorf("%s after %s: %v", tc.config, tc.used, err)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	for _, s := range []string{
		`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":1}}`,
		`{"Network":"10.5.0.0/16","SubnetLen":24,"SubnetMin":"10.5.1.0","SubnetMax":"10.5.9.0","EnableNFTables":true}`,
		`{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetLen":64,"IPv6SubnetMin":"fd00:0:0:1::"}`,
		`{"Network":"255.255.0.0/16"}`, `{"Network":null}`, `{"Netwrok":"10.5.0.0/16"}`, `null`, `{`, ``,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		cfg, err := subnet.ParseConfig(raw)
		if err != nil {
			if !errors.Is(err, subnet.ErrInvalidConfig) {
				t.Errorf("error does not wrap ErrInvalidConfig: %v", err)
			}
			return
		}
		if len(cfg.Networks) == 0 {
			t.Error("accepted without a network")
		}
		for _, n := range cfg.Networks {
			pool, err := n.Pool()
			if err != nil {
				continue
			}
			s, ok := pool.Pick(nil)
			if !ok || !pool.Contains(s) || !n.Prefix.Contains(s.Addr()) {
				t.Errorf("%+v: picked %v, %v from %v", n, s, ok, pool)
			}
		}
	})
}
