// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/oneline"
)

// senderFilter is the source check of the kernel path, because the kernel itself accepts datagrams
// from any sender. It is an nftables table of its own, for IPv4 only: a set with the public
// addresses of all peers, and the rules of senderRules. Only dropped may be called concurrently
// with another method.
type senderFilter struct {
	senderRules
	peers map[netip.Addr]struct{} // public addresses
	// rules contains the handles of the rules by chain, as the kernel assigned them. It is nil if this
	// process has not created the table, or could not read the handles after that.
	rules map[string][]uint64

	mu   sync.Mutex
	lost map[string]uint64 // packets dropped by earlier tables, by reason
}

// filterPlaces returns the chains for nftables.Watch.
func filterPlaces() []firewall.Place {
	var places []firewall.Place
	for _, chain := range filterChains {
		places = append(places, firewall.Place{Table: filterTable, Chain: chain})
	}
	return places
}

// newSenderFilter returns a filter for datagrams to local. It admits no peer, or every sender if
// anySender is set. It does not change the kernel yet.
func newSenderFilter(local netip.AddrPort, anySender bool) *senderFilter {
	return &senderFilter{senderRules: senderRules{local, anySender}, lost: map[string]uint64{}}
}

// start creates a table that admits no peer, unless the kernel already has an active table.
// That table stays until the first call of admit, so that a restart does not interrupt its peers.
// existed reports whether there was such a table. With anySender, start always creates the
// table, and existed is false.
func (f *senderFilter) start() (existed bool, err error) {
	if f.anySender {
		return false, f.build()
	}
	exists, active, err := filterState()
	if err != nil {
		return false, err
	}
	if exists && active {
		return true, nil
	}
	return false, f.build()
}

// admit admits exactly the senders with these addresses. If this process has not created the table
// yet, or if the change fails, admit creates the table with all of them. Otherwise the change is one
// transaction.
func (f *senderFilter) admit(addrs []netip.Addr) error {
	if f.anySender {
		addrs = nil
	}

	before := f.peers
	f.peers = map[netip.Addr]struct{}{}
	var in []netip.Addr
	for _, a := range addrs {
		_, known := before[a]
		_, repeated := f.peers[a]
		if !known && !repeated {
			in = append(in, a)
		}
		f.peers[a] = struct{}{}
	}
	if f.rules == nil {
		return f.build()
	}

	var out []netip.Addr
	for a := range before {
		if _, stays := f.peers[a]; !stays {
			out = append(out, a)
		}
	}
	if len(in)+len(out) == 0 {
		return nil
	}
	err := changeFilter(func(c *nftables.Conn) error {
		set := peerSet()
		return oneline.Join(elements(in, func(e []nftables.SetElement) error { return c.SetAddElements(set, e) }),
			elements(out, func(e []nftables.SetElement) error { return c.SetDeleteElements(set, e) }))
	})
	if err != nil { // another program has changed the table
		return f.build()
	}
	return nil
}

// repair creates the table again if the kernel does not have it as it was created, and reports
// whether it did. It does nothing before this process has created the table.
func (f *senderFilter) repair() (repaired bool, err error) {
	if f.rules == nil {
		return false, nil
	}
	intact, err := f.intact()
	if err != nil || intact {
		return false, err
	}
	return true, f.build()
}

// intact reports whether the kernel has the table as this process created it. Comparing the
// handles of rules is sufficient, because a rule with the same handle never changes.
func (f *senderFilter) intact() (bool, error) {
	exists, active, err := filterState()
	if err != nil || !exists || !active {
		return false, err
	}
	c, err := nftables.New()
	if err != nil {
		return false, err
	}
	rules, err := handles(c)
	if err != nil || !maps.EqualFunc(rules, f.rules, slices.Equal) {
		return false, ignoreMissing(err)
	}
	have, err := c.GetSetElements(peerSet())
	if err != nil || len(have) != len(f.peers) {
		return false, ignoreMissing(err)
	}
	for _, e := range have {
		a, ok := netip.AddrFromSlice(e.Key)
		if _, known := f.peers[a]; !ok || !known {
			return false, nil
		}
	}
	for _, name := range filterChains {
		chain, err := c.ListChain(tableRef(), name)
		if err != nil || chain.Hooknum == nil || chain.Policy == nil || *chain.Policy != nftables.ChainPolicyAccept {
			return false, ignoreMissing(err)
		}
	}
	return true, nil
}

// dropped returns the number of dropped packets by reason, with a zero for each reason without
// any. It includes those that earlier tables have dropped. It leaves out those of the present
// table if that cannot be read.
func (f *senderFilter) dropped() map[string]uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[string]uint64{unknownPeer: 0, wrongPort: 0, wrongSource: 0, wrongDestination: 0}
	if c, err := nftables.New(); err == nil {
		_ = addCounts(c, all)
	}
	for reason, n := range f.lost {
		all[reason] += n
	}
	return all
}

// build creates the table with the admitted peers, and replaces any table with its name.
func (f *senderFilter) build() error {
	f.rules = nil
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	if err := f.replace(c); err != nil {
		return err
	}
	f.rules, err = handles(c)
	return err
}

// replace writes the table. Then it adds the counts of the former table, as far as they could be read, to f.lost.
// It locks f.mu all the time, so that dropped counts no packet twice.
func (f *senderFilter) replace(c *nftables.Conn) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	counts := map[string]uint64{}
	_ = addCounts(c, counts)
	peers := slices.Collect(maps.Keys(f.peers))
	if err := changeFilter(func(c *nftables.Conn) error { return f.write(c, peers) }); err != nil {
		return err
	}
	for reason, n := range counts {
		f.lost[reason] += n
	}
	return nil
}

// filterState reports whether the kernel has the table, and whether it is active. A table with
// the flag dormant is not active: it admits every sender. write sets no flags, and the library
// decodes flags in the wrong byte order, so any flag counts as dormant. A kernel without
// nftables has no table, which is no error.
func filterState() (exists, active bool, err error) {
	c, err := nftables.New()
	if err != nil {
		return false, false, fmt.Errorf("open nftables: %w", err)
	}
	t, err := c.ListTableOfFamily(filterTable, nftables.TableFamilyIPv4)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT):
		return false, false, nil
	case err != nil:
		return false, false, fmt.Errorf("read nftables table %s: %w", filterTable, err)
	}
	return true, t.Flags == 0, nil
}

// removeFilter removes the table from the kernel. It returns nil if there is no table.
func removeFilter() error {
	exists, _, err := filterState()
	if err != nil || !exists {
		return err
	}
	err = changeFilter(func(c *nftables.Conn) error { c.DelTable(tableRef()); return nil })
	return ignoreMissing(err)
}

// ignoreMissing returns err, or nil if err says that an object does not exist.
func ignoreMissing(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// transactionBuffer is the maximum size of a transaction in bytes. The kernel's default is
// too small for the addresses of several thousand peers.
const transactionBuffer = 16 << 20

// changeFilter executes the changes that fill adds to the connection: all of them or none.
func changeFilter(fill func(*nftables.Conn) error) error {
	c, err := nftables.New(nftables.WithSockOptions(func(nl *netlink.Conn) error { return nl.SetWriteBuffer(transactionBuffer) }))
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	if err := fill(c); err != nil {
		return err
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("change nftables table %s: %w", filterTable, err)
	}
	return nil
}

// rulesOf reads the rules of one chain of the table.
func rulesOf(c *nftables.Conn, chain string) ([]*nftables.Rule, error) {
	rules, err := c.GetRules(tableRef(), &nftables.Chain{Name: chain, Table: tableRef()})
	if err != nil {
		return nil, fmt.Errorf("read nftables table %s: %w", filterTable, err)
	}
	return rules, nil
}

// handles reads the handles of the table's rules, by chain.
func handles(c *nftables.Conn) (map[string][]uint64, error) {
	all := map[string][]uint64{}
	for _, chain := range filterChains {
		rules, err := rulesOf(c, chain)
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			all[chain] = append(all[chain], r.Handle)
		}
	}
	return all, nil
}

// addCounts adds the number of packets that the table in the kernel has dropped to counts, by
// reason.
func addCounts(c *nftables.Conn, counts map[string]uint64) error {
	for _, chain := range filterChains {
		rules, err := rulesOf(c, chain)
		if err != nil {
			return err
		}
		for _, r := range rules {
			reason, ok := userdata.GetString(r.UserData, userdata.TypeComment)
			if !ok {
				reason = unknownPeer // created by a version that had no other reason
			}
			for _, e := range r.Exprs {
				if counter, ok := e.(*expr.Counter); ok {
					counts[reason] += counter.Packets
				}
			}
		}
	}
	return nil
}
