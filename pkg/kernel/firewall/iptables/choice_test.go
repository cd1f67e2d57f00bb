// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// ours contains the rules that an earlier process of flanneld has left.
const ours = `*filter
:FORWARD ACCEPT [0:0]
:FLANNEL-FWD - [0:0]
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -s 10.5.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE
COMMIT
`

func others(rules int) string {
	return "*filter\n" + strings.Repeat("-A INPUT -p tcp -j ACCEPT\n", rules) + "COMMIT\n"
}

func chain(name string) string { return "*mangle\n:" + name + " - [0:0]\nCOMMIT\n" }

// TestChoose checks the choice on hosts on which iptables-save prints the given texts. host
// contains the text of each program, by its name without -save.
func TestChoose(t *testing.T) {
	for name, tt := range map[string]struct {
		host    map[string]string
		want    Variant
		because string
		runs    int // maximum number of programs that run
	}{
		"nothing":                  {nil, Default, "rules of others: 0 in each", 0},
		"ours":                     {map[string]string{"iptables-legacy": ours, "ip6tables-legacy": ours}, Default, "others: 0 in each", 2},
		"kubelet in legacy":        {map[string]string{"iptables-legacy": chain("KUBE-IPTABLES-HINT"), "iptables-nft": others(9)}, Legacy, "KUBE-IPTABLES-HINT", 1},
		"kubelet in nft":           {map[string]string{"iptables-nft": chain("KUBE-KUBELET-CANARY") + ours, "iptables-legacy": others(9)}, NFT, "KUBE-KUBELET-CANARY", 1},
		"kubelet in both":          {map[string]string{"iptables-nft": chain("KUBE-KUBELET-CANARY"), "iptables-legacy": chain("KUBE-IPTABLES-HINT")}, NFT, "KUBE-KUBELET-CANARY", 2},
		"kubelet, IPv6 alone":      {map[string]string{"ip6tables-legacy": chain("KUBE-IPTABLES-HINT")}, Legacy, "KUBE-IPTABLES-HINT", 1},
		"kube-proxy before others": {map[string]string{"iptables-legacy": chain("KUBE-PROXY-CANARY"), "iptables-nft": others(9)}, Legacy, "KUBE-PROXY-CANARY", 1},
		"kubelet before kube-proxy": {
			map[string]string{"iptables-nft": chain("KUBE-PROXY-CANARY"), "iptables-legacy": chain("KUBE-IPTABLES-HINT")},
			Legacy, "KUBE-IPTABLES-HINT", 2,
		},
		"hint in another table": {map[string]string{"iptables-legacy": "*nat\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"}, Default, "others: 0 in each", 1},
		"others in legacy":      {map[string]string{"iptables-legacy": others(1), "iptables-nft": ours}, Legacy, "rules of others: 1 there, 0 in nft", 2},
		"others in nft":         {map[string]string{"iptables-legacy": ours, "iptables-nft": others(2)}, NFT, "rules of others: 2 there, 0 in legacy", 2},
		"more in legacy":        {map[string]string{"iptables-legacy": others(3), "ip6tables-legacy": others(3), "iptables-nft": others(5)}, Legacy, "rules of others: 6 there, 5 in nft", 3},
		"equal numbers":         {map[string]string{"iptables-legacy": others(2), "ip6tables-nft": others(2)}, Default, "others: 2 in each", 2},
		"read fails":            {map[string]string{"iptables-legacy": others(2), "iptables-nft": "error"}, Default, "error", 2},
	} {
		runs := 0
		got, because, err := choose(func(v Variant, f prefix.Family, tables []string) (dump, error) {
			text := tt.host[v.Program(f)]
			if text != "error" && !slices.ContainsFunc(tables, func(name string) bool { return strings.Contains(text, "*"+name+"\n") }) {
				return nil, nil
			}
			runs++
			if text == "error" {
				return nil, errors.New(text)
			}
			d := parseSave(text)
			maps.DeleteFunc(d, func(table string, _ chains) bool { return !slices.Contains(tables, table) })
			return d, nil
		})
		if err != nil {
			because = err.Error()
		}
		if got != tt.want || !strings.Contains(because, tt.because) || runs > tt.runs {
			t.Errorf("%s: %q because %q after %d programs, want %q because %q after %d at most", name, got, because, runs, tt.want, tt.because, tt.runs)
		}
	}
}

// TestNoChoice checks that Choose returns Default without a reason if a program of a variant is missing for
// one of the families. If none is missing and the kernel has no nftables, it must return Legacy.
func TestNoChoice(t *testing.T) {
	noNFT := func(prefix.Family, string) (bool, error) { return false, errors.New("no nftables here") }
	for missing, want := range map[string]Variant{"": Legacy, "iptables-legacy": Default, "ip6tables-nft-restore": Default} {
		dir := t.TempDir()
		t.Setenv("PATH", dir)
		for _, v := range []Variant{Default, Legacy, NFT} {
			for _, f := range families() {
				for _, suffix := range []string{"", "-save", "-restore"} {
					if name := v.Program(f) + suffix; name != missing {
						if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil { //nolint:gosec // an executable file
							t.Fatal(err)
						}
					}
				}
			}
		}
		got, because := Choose(t.Context(), families(), noNFT)
		if got != want || (because == "") != (want == Default) {
			t.Errorf("without %q: %q because %q, want %q", missing, got, because, want)
		}
		if _, because := Choose(t.Context(), []prefix.Family{prefix.IPv4}, noNFT); (because == "") != (missing == "iptables-legacy") {
			t.Errorf("without %q, only IPv4: because %q", missing, because)
		}
	}
}
