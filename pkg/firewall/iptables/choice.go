package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"flanneld/pkg/firewall"
	"flanneld/pkg/prefix"
)

// hintTable has the hints.
const hintTable = "mangle"

// hints are chains by which kubelet and, if there are none of those, kube-proxy
// show the variant that they use. Containers of Kubernetes go by kubelet's, and
// by nftables first.
func hints() [][]string {
	return [][]string{{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}, {"KUBE-PROXY-CANARY"}}
}

// Choose returns the variant in which other programs of this host hold their
// rules, and how that was told: by chains of Kubernetes, else by where more rules
// are. Ours do not count: what an earlier run has chosen is no reason. inNFT asks
// nftables for a table; programs are run only where a variant has tables. The
// result is Default where others show nothing, and Default without a reason
// unless the programs of both variants are installed, for all of families.
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
		return Default, "what others use is not known: " + err.Error()
	}
	return v, because
}

// complete reports whether all programs of the variant are installed.
func (v Variant) complete(families []prefix.Family) bool {
	return !slices.ContainsFunc(families, func(f prefix.Family) bool {
		return slices.ContainsFunc([]string{"", "-save", "-restore"}, func(suffix string) bool { return !installed(v.Program(f) + suffix) })
	})
}

// tablesFunc reports whether there is a table of that name, and makes none.
type tablesFunc func(prefix.Family, string) (bool, error)

func inLegacy(f prefix.Family, name string) (bool, error) {
	return slices.Contains(legacyTables(f), name), nil
}

func save(ctx context.Context, v Variant, f prefix.Family, args ...string) (string, error) {
	return run(ctx, "", v.Program(f)+"-save", args...)
}

// chooser looks at the whole host, whatever families the network has.
type chooser struct {
	tables map[Variant]tablesFunc
	save   func(context.Context, Variant, prefix.Family, ...string) (string, error)
}

func (c chooser) choose(ctx context.Context) (v Variant, because string, err error) {
	hinted, rules := map[Variant][]string{}, map[Variant]int{}
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

// each hands over what one variant holds in each family that has any of the
// named tables.
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

// foreign counts the rules that are neither in a chain of ours nor lead to one.
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
