package nftables

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"flanneld/pkg/firewall"
	"flanneld/pkg/oneline"
	"flanneld/pkg/prefix"
)

// Gate keeps from a tunnel device of the kernel what does not come from a known
// peer: the kernel itself does not ask where a datagram is from. It is a table
// of its own, IPv4 alone. Its methods but Dropped are not safe for concurrent use.
type Gate struct {
	device string
	local  netip.AddrPort // where datagrams for the device arrive
	peers  map[netip.Addr]int
	rules  map[string][]uint64 // handles by chain, as they were made; nil: they have to be made
	lost   atomic.Uint64       // what tables that are gone have counted
}

// gateTable is the name of the table.
const gateTable = "flannel-udp"

// The chains of a gate: one vouches for datagrams from peers, the other takes
// what comes out of the device if it was vouched for.
const (
	gateInput  = "input"
	gateDevice = "tunnel"
	gatePeers  = "peers"
)

// voucher is the priority of packets from known peers, between the two chains.
// Unlike a mark nobody else looks at it there, and it does not come over a
// network.
const voucher = 0x666c75 // "flu"

// NewGate returns a gate before device for what arrives at local, with nobody
// admitted and nothing in the kernel yet.
func NewGate(device string, local netip.AddrPort) *Gate {
	return &Gate{device: device, local: local, peers: map[netip.Addr]int{}}
}

// GatePlaces are the chains of a gate.
func GatePlaces() []firewall.Place {
	return []firewall.Place{{Table: gateTable, Chain: gateInput}, {Table: gateTable, Chain: gateDevice}}
}

// Shut closes the gate to everybody, unless there is one in the kernel, whose
// peers go on until the first Update. It reports whether.
func (g *Gate) Shut() (former bool, err error) {
	t, err := read(prefix.IPv4, gateTable)
	if err != nil {
		return false, err
	}
	if t.exists && !t.dormant {
		return true, nil
	}
	return false, g.build()
}

// Update admits added and not removed any more; an address may have been added
// more than once. The change is one transaction.
func (g *Gate) Update(removed, added []netip.Addr) error {
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
	if err != nil { // another program has had its hands in it
		return g.build()
	}
	return nil
}

// Check makes the gate anew if it is not as it was made, and reports whether.
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

// right reports whether the kernel has the gate. A rule is never changed: one
// with the same handle is the same.
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

// ignoreGone is err unless it says that something is not there.
func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Dropped returns how many packets were dropped, as far as is known: one of the
// process before counts.
func (g *Gate) Dropped() uint64 {
	c, err := nftables.New()
	if err != nil {
		return g.lost.Load()
	}
	n, _ := g.counted(c)
	return g.lost.Load() + n
}

func (g *Gate) counted(c *nftables.Conn) (n uint64, err error) {
	for _, chain := range []string{gateInput, gateDevice} {
		rules, err := c.GetRules(tableOfGate(), &nftables.Chain{Name: chain, Table: tableOfGate()})
		if err != nil {
			return n, err
		}
		for _, r := range rules {
			for _, e := range r.Exprs {
				if counter, ok := e.(*expr.Counter); ok {
					n += counter.Packets
				}
			}
		}
	}
	return n, nil
}

// HasGate reports whether the kernel has a gate. One without nftables has none.
func HasGate() (bool, error) {
	exists, err := HasTable(prefix.IPv4, gateTable)
	if errors.Is(err, errNoKernel) {
		return false, nil
	}
	return exists, err
}

// RemoveGate removes what a gate has in the kernel.
func RemoveGate() error {
	exists, err := HasGate()
	if err != nil || !exists {
		return err
	}
	err = transact(func(c *nftables.Conn) error { c.DelTable(tableOfGate()); return nil })
	return ignoreGone(err)
}

// build makes the gate in place of whatever has its name.
func (g *Gate) build() error {
	g.rules = nil
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	if n, err := g.counted(c); err == nil {
		g.lost.Add(n)
	}
	if err := transact(g.write); err != nil {
		return err
	}
	g.rules, err = g.handles(c)
	return err
}

// transact carries out what fill adds: all of it or nothing.
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

// elements hands addrs to do, as many at once as one message can carry.
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

// write adds what makes the gate to c's transaction.
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
	chain := func(name string, hook *nftables.ChainHook, rules ...[]expr.Any) {
		ch := c.AddChain(&nftables.Chain{
			Name: name, Table: t, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityMangle,
		})
		for _, r := range rules {
			c.AddRule(&nftables.Rule{Table: t, Chain: ch, Exprs: r})
		}
	}
	datagram := g.datagram()
	chain(gateInput, nftables.ChainHookInput,
		slices.Concat(datagram, notFrom(set), drop()),
		slices.Concat(datagram, []expr.Any{
			&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(voucher)},
			&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: 1},
		}))
	chain(gateDevice, nftables.ChainHookPrerouting, slices.Concat([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		equal(append([]byte(g.device), make([]byte, unix.IFNAMSIZ-len(g.device))...)),
		&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(voucher)},
	}, drop()))
	return nil
}

// datagram matches what arrives at the tunnel's port.
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

func notFrom(set *nftables.Set) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: headerOf(prefix.IPv4).src, Len: 4},
		&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID, Invert: true},
	}
}

func drop() []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}
}
