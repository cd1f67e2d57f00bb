// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

const hintTable = "mangle" // contains the hints

// hints returns the chains that show which variant kubelet uses, and then the chain of kube-proxy, which
// counts only if kubelet has none. The containers of Kubernetes follow kubelet's chains as well, and read
// nftables first.
func hints() [][]string {
	return [][]string{{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}, {"KUBE-PROXY-CANARY"}}
}

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
	for _, v := range []Variant{NFT, Legacy} {
		if !v.complete(families) {
			return Default, ""
		}
	}
	if _, err := inNFT(prefix.IPv4, hintTable); err != nil {
		return Legacy, err.Error()
	}

	v, because, err := chooser{save: save, tables: map[Variant]tablesFunc{NFT: inNFT, Legacy: inLegacy}}.choose(ctx)
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

// tablesFunc reports whether a table exists. A program of iptables would create it.
type tablesFunc func(prefix.Family, string) (bool, error)

func inLegacy(f prefix.Family, name string) (bool, error) {
	return slices.Contains(legacyTables(f), name), nil
}

func save(ctx context.Context, v Variant, f prefix.Family, args ...string) (string, error) {
	return run(ctx, "", v.Program(f)+"-save", args...)
}

// chooser reads the rules of both families, independently of the families of the network.
type chooser struct {
	tables map[Variant]tablesFunc
	save   func(context.Context, Variant, prefix.Family, ...string) (string, error)
}

func (c chooser) choose(ctx context.Context) (v Variant, because string, err error) {
	hinted := map[Variant][]string{}
	rules := map[Variant]int{}
	for _, v := range []Variant{NFT, Legacy} {
		err := c.each(ctx, v, []string{hintTable}, []string{"-t", hintTable}, func(d dump) {
			for chain := range d[hintTable] {
				hinted[v] = append(hinted[v], chain)
			}
		})
		if err != nil {
			return Default, "", err
		}
	}

	for _, names := range hints() {
		for _, v := range []Variant{NFT, Legacy} {
			if i := slices.IndexFunc(names, func(name string) bool { return slices.Contains(hinted[v], name) }); i >= 0 {
				return v, "it has the chain " + names[i], nil
			}
		}
	}

	for _, v := range []Variant{NFT, Legacy} {
		err := c.each(ctx, v, append(Tables(), "raw"), nil, func(d dump) { rules[v] += foreign(d) })
		if err != nil {
			return Default, "", err
		}
	}

	switch nft, legacy := rules[NFT], rules[Legacy]; {
	case nft > legacy:
		return NFT, fmt.Sprintf("rules of others: %d there, %d in legacy", nft, legacy), nil
	case legacy > nft:
		return Legacy, fmt.Sprintf("rules of others: %d there, %d in nft", legacy, nft), nil
	default:
		return Default, fmt.Sprintf("rules of others: %d in each", nft), nil
	}
}

// each calls take with the rules of one variant, for each family that has one of the named tables.
func (c chooser) each(ctx context.Context, v Variant, tables, args []string, take func(dump)) error {
	for _, f := range families() {
		for _, name := range tables {
			there, err := c.tables[v](f, name)
			if err != nil {
				return err
			}
			if !there {
				continue
			}

			text, err := c.save(ctx, v, f, args...)
			if err != nil && !errors.Is(err, ErrMissing) {
				return err
			}
			take(parseSave(text))
			break
		}
	}
	return nil
}

// foreign counts the rules that have nothing to do with a chain of flanneld.
func foreign(d dump) (n int) {
	ours := func(chain string) bool {
		return slices.ContainsFunc(firewall.Chains(), func(c firewall.Chain) bool { return placeOf(c).chain == chain })
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
