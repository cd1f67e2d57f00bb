// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

const hintTable = "mangle" // contains the hints

// hints are the chains that show which variant kubelet uses, and then the chain of kube-proxy, which
// counts only if kubelet has none. The containers of Kubernetes follow kubelet's chains as well, and read
// nftables first.
var hints = [][]string{{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}, {"KUBE-PROXY-CANARY"}}

var variants = []Variant{NFT, Legacy}

// Choose returns the variant of iptables, legacy or nft, that other software on this host uses, and the
// reason for the choice. It follows the chains of Kubernetes if there are any, and otherwise prefers the
// variant with more rules. flanneld's own rules do not count, so that an earlier choice does not repeat
// itself. inNFT reports whether nftables has a table of that name. Choose runs iptables-save of a variant
// only if the variant has tables, because some variants would create them.
//
// If a program of one of the variants is missing for a family in families, Choose returns Default without a
// reason. If inNFT fails, it returns Legacy with the error as the reason. It returns Default if the rules
// cannot be read, or if other software has equally many rules in both variants, such as none.
func Choose(ctx context.Context, families []prefix.Family, inNFT func(prefix.Family, string) (bool, error)) (v Variant, because string) {
	if slices.ContainsFunc(variants, func(v Variant) bool { return !v.complete(families) }) {
		return Default, ""
	}
	if _, err := inNFT(prefix.IPv4, hintTable); err != nil {
		return Legacy, err.Error()
	}

	v, because, err := choose(func(v Variant, f prefix.Family, tables []string) (dump, error) {
		for _, name := range tables {
			there := slices.Contains(legacyTables(f), name)
			if v == NFT {
				var err error
				if there, err = inNFT(f, name); err != nil {
					return nil, err
				}
			}
			if there {
				return save(ctx, v, f, tables)
			}
		}
		return nil, nil
	})
	if err != nil {
		return Default, "cannot read the rules of other programs: " + err.Error()
	}
	return v, because
}

// complete reports whether all programs of the variant are installed.
func (v Variant) complete(families []prefix.Family) bool {
	return !slices.ContainsFunc(families, func(f prefix.Family) bool {
		return slices.ContainsFunc([]string{"", "-save", "-restore"}, func(suffix string) bool { return !installed(v.Program(f) + suffix) })
	})
}

// save returns the rules of a variant, in one table or in all of several.
func save(ctx context.Context, v Variant, f prefix.Family, tables []string) (dump, error) {
	var args []string
	if len(tables) == 1 {
		args = []string{"-t", tables[0]}
	}
	text, err := run(ctx, "", v.Program(f)+"-save", args...)
	if errors.Is(err, ErrMissing) { // for a family that the network does not have
		err = nil
	}
	return parseSave(text), err
}

// choose chooses by the rules of both families, independently of the families of the network. read returns
// the rules in these tables, and none if none of the tables exists: a program of iptables would create it.
func choose(read func(v Variant, f prefix.Family, tables []string) (dump, error)) (v Variant, because string, err error) {
	each := func(take func(Variant, dump), tables ...string) error {
		for _, v := range variants {
			for _, f := range families() {
				d, err := read(v, f, tables)
				if err != nil {
					return err
				}
				take(v, d)
			}
		}
		return nil
	}

	hinted := map[Variant][]string{}
	err = each(func(v Variant, d dump) { hinted[v] = slices.AppendSeq(hinted[v], maps.Keys(d[hintTable])) }, hintTable)
	if err != nil {
		return Default, "", err
	}
	for _, names := range hints {
		for _, v := range variants {
			if i := slices.IndexFunc(names, func(name string) bool { return slices.Contains(hinted[v], name) }); i >= 0 {
				return v, "it has the chain " + names[i], nil
			}
		}
	}

	rules := map[Variant]int{}
	err = each(func(v Variant, d dump) { rules[v] += foreign(d) }, append(Tables(), "raw")...)
	switch nft, legacy := rules[NFT], rules[Legacy]; {
	case err != nil:
		return Default, "", err
	case nft > legacy:
		return NFT, fmt.Sprintf("rules of others: %d there, %d in legacy", nft, legacy), nil
	case legacy > nft:
		return Legacy, fmt.Sprintf("rules of others: %d there, %d in nft", legacy, nft), nil
	default:
		return Default, fmt.Sprintf("rules of others: %d in each", nft), nil
	}
}

// foreign counts the rules that have nothing to do with a chain of flanneld.
func foreign(d dump) (n int) {
	ours := func(chain string) bool {
		return slices.ContainsFunc(places[:], func(p place) bool { return p.chain == chain })
	}

	for _, chains := range d {
		for chain, rules := range chains {
			for _, r := range rules {
				if !ours(chain) && !ours(r.target) {
					n++
				}
			}
		}
	}
	return n
}
