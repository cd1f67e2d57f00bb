// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// Gate protects a kernel tunnel device against packets that do not come from a known
// peer, because the kernel accepts datagrams from any sender. It also drops packets with
// addresses that no host on a network can have. A gate is an nftables table of its own,
// for IPv4 only. Only Dropped may be called concurrently with another method.
type Gate struct {
	device  string
	local   netip.AddrPort // address at which datagrams for the device arrive
	anyHost bool           // any host may send, not only peers
	peers   map[netip.Addr]int
	rules   map[string][]uint64 // handles of the rules by chain, as build created them; nil if the gate must be built

	mu   sync.Mutex
	lost map[string]uint64 // packets dropped by earlier tables, by reason
}

// gateTable is the name of the table.
const gateTable = "flannel-udp"

// The chains of a gate. The first marks datagrams from peers. The second drops packets
// from the device whose datagram was not marked.
const (
	gateInput  = "input"
	gateDevice = "tunnel"
	gatePeers  = "peers"
)

// voucher is the priority that the first chain gives to datagrams from known peers, and
// that the second chain checks. Unlike a packet mark, no other program uses the priority
// between the two chains, and a packet from a network does not have it.
const voucher = 0x666c75 // "flu"

// The reasons for dropping packets, as in the comments of the rules.
const (
	unknownPeer      = "unknown_peer"
	wrongPort        = "wrong_port"
	wrongSource      = "wrong_source"
	wrongDestination = "wrong_destination"
)

// NewGate returns a gate in front of device for datagrams to local. It admits no peer,
// and does not change the kernel yet.
func NewGate(device string, local netip.AddrPort) *Gate {
	return &Gate{device: device, local: local, peers: map[netip.Addr]int{}, lost: map[string]uint64{}}
}

// NewOpenGate returns a gate that admits every sender.
func NewOpenGate(device string, local netip.AddrPort) *Gate {
	g := NewGate(device, local)
	g.anyHost = true
	return g
}

// GatePlaces returns the chains of a gate.
func GatePlaces() []firewall.Place {
	return []firewall.Place{{Table: gateTable, Chain: gateInput}, {Table: gateTable, Chain: gateDevice}}
}

// Shut creates a gate that admits no sender, unless the kernel has one already: that one
// admits its peers until the first Update. former reports whether there was one. Shut
// creates an open gate open.
func (g *Gate) Shut() (former bool, err error) {
	if g.anyHost {
		return false, g.build()
	}
	t, err := read(prefix.IPv4, gateTable)
	if err != nil {
		return false, err
	}
	if t.exists && !t.dormant {
		return true, nil
	}
	return false, g.build()
}

// Update admits the addresses in added and no longer those in removed. An address that
// was added several times must be removed as often. The change is one transaction.
func (g *Gate) Update(removed, added []netip.Addr) error {
	if g.anyHost {
		removed, added = nil, nil
	}
	before := map[netip.Addr]bool{}
	count := func(addrs []netip.Addr, by int) {
		for _, a := range addrs {
			if _, ok := before[a]; !ok {
				before[a] = g.peers[a] > 0
			}
			if g.peers[a] += by; g.peers[a] <= 0 {
				delete(g.peers, a)
			}
		}
	}
	count(added, 1)
	count(removed, -1)
	if g.rules == nil {
		return g.build()
	}
	var in, out []netip.Addr
	for a, was := range before {
		switch is := g.peers[a] > 0; {
		case is && !was:
			in = append(in, a)
		case was && !is:
			out = append(out, a)
		}
	}
	if len(in)+len(out) == 0 {
		return nil
	}
	err := transact(func(c *nftables.Conn) error {
		set := g.set()
		return oneline.Join(elements(in, func(e []nftables.SetElement) error { return c.SetAddElements(set, e) }),
			elements(out, func(e []nftables.SetElement) error { return c.SetDeleteElements(set, e) }))
	})
	if err != nil { // another program has changed the table
		return g.build()
	}
	return nil
}

// Check creates the gate again if the kernel does not have it as it was created, and
// reports whether it did.
func (g *Gate) Check() (repaired bool, err error) {
	if g.rules == nil {
		return false, nil
	}
	right, err := g.right()
	if err != nil || right {
		return false, err
	}
	return true, g.build()
}

// right reports whether the kernel has the gate unchanged. Comparing handles is
// sufficient, because a rule with the same handle never changes.
func (g *Gate) right() (bool, error) {
	t, err := read(prefix.IPv4, gateTable)
	if err != nil || !t.exists || t.dormant {
		return false, err
	}
	c, err := nftables.New()
	if err != nil {
		return false, err
	}
	rules, err := g.handles(c)
	if err != nil || !maps.EqualFunc(rules, g.rules, slices.Equal) {
		return false, ignoreGone(err)
	}
	have, err := c.GetSetElements(g.set())
	if err != nil || len(have) != len(g.peers) {
		return false, ignoreGone(err)
	}
	for _, e := range have {
		if a, ok := netip.AddrFromSlice(e.Key); !ok || g.peers[a] == 0 {
			return false, nil
		}
	}
	for _, name := range []string{gateInput, gateDevice} {
		chain, err := c.ListChain(tableOfGate(), name)
		if err != nil || chain.Hooknum == nil || chain.Policy == nil || *chain.Policy != nftables.ChainPolicyAccept {
			return false, ignoreGone(err)
		}
	}
	return true, nil
}

// ignoreGone returns err, or nil if err says that an object does not exist.
func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Dropped returns the number of dropped packets by reason. It includes those that the
// gate of an earlier process has dropped.
func (g *Gate) Dropped() map[string]uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := map[string]uint64{unknownPeer: 0, wrongPort: 0, wrongSource: 0, wrongDestination: 0}
	if c, err := nftables.New(); err == nil {
		_ = counted(c, all)
	}
	for reason, n := range g.lost {
		all[reason] += n
	}
	return all
}

// counted adds the packets that the gate in the kernel has dropped to counts.
func counted(c *nftables.Conn, counts map[string]uint64) error {
	for _, chain := range []string{gateInput, gateDevice} {
		rules, err := c.GetRules(tableOfGate(), &nftables.Chain{Name: chain, Table: tableOfGate()})
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

// HasGate reports whether the kernel has a gate. It returns false if the kernel does not
// support nftables.
func HasGate() (bool, error) {
	exists, err := HasTable(prefix.IPv4, gateTable)
	if errors.Is(err, errNoKernel) {
		return false, nil
	}
	return exists, err
}

// RemoveGate removes the gate from the kernel.
func RemoveGate() error {
	exists, err := HasGate()
	if err != nil || !exists {
		return err
	}
	err = transact(func(c *nftables.Conn) error { c.DelTable(tableOfGate()); return nil })
	return ignoreGone(err)
}

// build creates the gate, and replaces any table with its name.
func (g *Gate) build() error {
	g.rules = nil
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	g.keepCounts(c)
	if err := transact(g.write); err != nil {
		return err
	}
	g.rules, err = g.handles(c)
	return err
}

// keepCounts saves the counts of the gate in the kernel before it is replaced.
func (g *Gate) keepCounts(c *nftables.Conn) {
	counts := map[string]uint64{}
	if counted(c, counts) != nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for reason, n := range counts {
		g.lost[reason] += n
	}
}

// transact executes the changes that fill adds: all of them or none.
func transact(fill func(*nftables.Conn) error) error {
	c, err := nftables.New(nftables.WithSockOptions(func(nl *netlink.Conn) error { return nl.SetWriteBuffer(batchBuffer) }))
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	if err := fill(c); err != nil {
		return err
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("change nftables table %s: %w", gateTable, err)
	}
	return nil
}

func tableOfGate() *nftables.Table {
	return &nftables.Table{Name: gateTable, Family: nftables.TableFamilyIPv4}
}

func (g *Gate) set() *nftables.Set {
	return &nftables.Set{Table: tableOfGate(), Name: gatePeers, KeyType: nftables.TypeIPAddr}
}

func (g *Gate) handles(c *nftables.Conn) (map[string][]uint64, error) {
	all := map[string][]uint64{}
	for _, chain := range []string{gateInput, gateDevice} {
		rules, err := c.GetRules(tableOfGate(), &nftables.Chain{Name: chain, Table: tableOfGate()})
		if err != nil {
			return nil, fmt.Errorf("read nftables table %s: %w", gateTable, err)
		}
		for _, r := range rules {
			all[chain] = append(all[chain], r.Handle)
		}
	}
	return all, nil
}

// elements calls do with parts of addrs that fit one message.
func elements(addrs []netip.Addr, do func([]nftables.SetElement) error) error {
	const most = 1000
	for chunk := range slices.Chunk(addrs, most) {
		var es []nftables.SetElement
		for _, a := range chunk {
			es = append(es, nftables.SetElement{Key: a.AsSlice()})
		}
		if err := do(es); err != nil {
			return err
		}
	}
	return nil
}

// write adds the gate to c's transaction.
func (g *Gate) write(c *nftables.Conn) error {
	c.AddTable(tableOfGate())
	c.DelTable(tableOfGate())
	t := c.AddTable(tableOfGate())
	set := g.set()
	if err := c.AddSet(set, nil); err != nil {
		return err
	}
	addrs := slices.Collect(maps.Keys(g.peers))
	if err := elements(addrs, func(e []nftables.SetElement) error { return c.SetAddElements(set, e) }); err != nil {
		return err
	}
	chain := func(name string, hook *nftables.ChainHook, rules []gateRule) {
		ch := c.AddChain(&nftables.Chain{
			Name: name, Table: t, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityMangle,
		})
		for _, r := range rules {
			c.AddRule(r.in(t, ch))
		}
	}
	chain(gateInput, nftables.ChainHookInput, g.input(set))
	nowhere := &nftables.Set{Table: t, Anonymous: true, Constant: true, Interval: true, KeyType: nftables.TypeIPAddr}
	if err := c.AddSet(nowhere, ofNoHost()); err != nil {
		return err
	}
	noHost := &nftables.Set{Table: t, Anonymous: true, Constant: true, Interval: true, KeyType: nftables.TypeIPAddr}
	if err := c.AddSet(noHost, ofNoHost()); err != nil {
		return err
	}
	chain(gateDevice, nftables.ChainHookPrerouting, g.tunnel(noHost, nowhere))
	return nil
}

// gateRule is a rule of a gate. drops is the reason if the rule drops packets.
type gateRule struct {
	match  []expr.Any
	drops  string
	action []expr.Any
}

// in returns the rule for a chain.
func (r gateRule) in(t *nftables.Table, c *nftables.Chain) *nftables.Rule {
	if r.drops == "" {
		return &nftables.Rule{Table: t, Chain: c, Exprs: slices.Concat(r.match, r.action)}
	}
	return &nftables.Rule{
		Table: t, Chain: c, Exprs: slices.Concat(r.match, []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}),
		UserData: userdata.AppendString(nil, userdata.TypeComment, r.drops),
	}
}

// input returns the rules for datagrams. These must come from a peer, and from the port
// that peers send from. A pod on a peer's host has the same address because of
// masquerading, but another port.
func (g *Gate) input(peers *nftables.Set) []gateRule {
	if g.anyHost {
		return nil
	}
	datagram := g.datagram()
	return []gateRule{
		{match: slices.Concat(datagram, address(headerOf(prefix.IPv4).src), []expr.Any{
			&expr.Lookup{SourceRegister: 1, SetName: peers.Name, SetID: peers.ID, Invert: true},
		}), drops: unknownPeer},
		{match: slices.Concat(datagram, []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.BigEndian.PutUint16(g.local.Port())},
		}), drops: wrongPort},
		{match: datagram, action: []expr.Any{
			&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(voucher)},
			&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: 1},
		}},
	}
}

// tunnel returns the rules for packets that come out of the device.
func (g *Gate) tunnel(noHost, nowhere *nftables.Set) []gateRule {
	device := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		equal(append([]byte(g.device), make([]byte, unix.IFNAMSIZ-len(g.device))...)),
	}
	in := func(offset uint32, set *nftables.Set) []expr.Any {
		return slices.Concat(device, address(offset), []expr.Any{&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID}})
	}
	rules := []gateRule{
		{match: in(headerOf(prefix.IPv4).src, noHost), drops: wrongSource},
		{match: in(headerOf(prefix.IPv4).dst, nowhere), drops: wrongDestination},
	}
	if g.anyHost {
		return rules
	}
	vouched := gateRule{match: slices.Concat(device, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(voucher)},
	}), drops: unknownPeer}
	return append([]gateRule{vouched}, rules...)
}

// ofNoHost returns the addresses that no host on a network can have: unspecified,
// loopback, multicast and broadcast.
func ofNoHost() []nftables.SetElement {
	return []nftables.SetElement{
		{Key: []byte{0, 0, 0, 0}}, {Key: []byte{0, 0, 0, 1}, IntervalEnd: true},
		{Key: []byte{127, 0, 0, 0}}, {Key: []byte{128, 0, 0, 0}, IntervalEnd: true},
		{Key: []byte{224, 0, 0, 0}}, {Key: []byte{240, 0, 0, 0}, IntervalEnd: true},
		{Key: []byte{255, 255, 255, 255}},
	}
}

// address loads an address of the IPv4 header.
func address(offset uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}}
}

// datagram matches datagrams to the tunnel's port.
func (g *Gate) datagram() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, equal([]byte{unix.IPPROTO_UDP}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		equal(binaryutil.BigEndian.PutUint16(g.local.Port())),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: headerOf(prefix.IPv4).dst, Len: 4},
		equal(g.local.Addr().AsSlice()),
	}
}

func equal(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }
