// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// The names of the table, of its chains and of its set. They are public: operators delete
// the table by its name.
const (
	filterTable = "flannel-udp"
	inputChain  = "input"  // receives datagrams to the port
	deviceChain = "tunnel" // receives the packets that come out of the device
	peerSetName = "peers"
)

var filterChains = []string{inputChain, deviceChain}

// The reasons for dropping packets, as in the comments of the rules. They are values of
// the metric's label, like those of package tunnel.
const (
	unknownPeer      = "unknown_peer"
	wrongPort        = "wrong_port"
	wrongSource      = "wrong_source"
	wrongDestination = "wrong_destination"
)

// peerPriority is the packet priority that the input chain gives to datagrams from peers,
// and that the device chain requires. Between the two chains, other programs may change a packet
// mark, but do not change the priority. A packet that arrives at a link has another priority.
const peerPriority = 0x666c75 // "flu"

// Offsets of the addresses in an IPv4 header, and of the ports in a UDP header, in bytes
// (RFC 791, RFC 768).
const (
	sourceAddress      = 12
	destinationAddress = 16
	sourcePort         = 0
	destinationPort    = 2
)

// tableRef identifies the table in requests.
func tableRef() *nftables.Table {
	return &nftables.Table{Name: filterTable, Family: nftables.TableFamilyIPv4}
}

// peerSet identifies, in requests, the set with the public addresses of the peers.
func peerSet() *nftables.Set {
	return &nftables.Set{Table: tableRef(), Name: peerSetName, KeyType: nftables.TypeIPAddr}
}

// senderRules describes the rules of a senderFilter, and writes them.
type senderRules struct {
	local     netip.AddrPort // address at which datagrams for the device arrive
	anySender bool           // any host may send, not only peers
}

// write adds the table, with the set of peers and all rules, to c's transaction. addrs are the
// public addresses of the peers. The transaction first deletes a table with the same name.
func (s senderRules) write(c *nftables.Conn, addrs []netip.Addr) error {
	c.AddTable(tableRef()) // because DelTable fails if there is no table
	c.DelTable(tableRef())
	t := c.AddTable(tableRef())
	peers := peerSet()
	if err := c.AddSet(peers, nil); err != nil {
		return err
	}
	if err := elements(addrs, func(e []nftables.SetElement) error { return c.SetAddElements(peers, e) }); err != nil {
		return err
	}
	chain := func(name string, hook *nftables.ChainHook, rules []filterRule) {
		ch := c.AddChain(&nftables.Chain{
			Name: name, Table: t, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityMangle,
		})
		for _, r := range rules {
			c.AddRule(r.in(t, ch))
		}
	}
	chain(inputChain, nftables.ChainHookInput, s.inputRules(peers))
	var noHost [2]*nftables.Set // an anonymous set belongs to one rule
	for i := range noHost {
		noHost[i] = &nftables.Set{Table: t, Anonymous: true, Constant: true, Interval: true, KeyType: nftables.TypeIPAddr}
		if err := c.AddSet(noHost[i], noHostAddresses()); err != nil {
			return err
		}
	}
	chain(deviceChain, nftables.ChainHookPrerouting, s.deviceRules(noHost[0], noHost[1]))
	return nil
}

// filterRule is a rule of the table. drops is the reason for which the rule drops packets; if it is empty,
// the rule executes action instead.
type filterRule struct {
	match  []expr.Any
	drops  string
	action []expr.Any
}

// in returns the rule in the form of the library, for the chain c of the table t.
func (r filterRule) in(t *nftables.Table, c *nftables.Chain) *nftables.Rule {
	if r.drops == "" {
		return &nftables.Rule{Table: t, Chain: c, Exprs: slices.Concat(r.match, r.action)}
	}
	return &nftables.Rule{
		Table: t, Chain: c, Exprs: slices.Concat(r.match, []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}),
		UserData: userdata.AppendString(nil, userdata.TypeComment, r.drops),
	}
}

// inputRules returns the rules for datagrams to the port; none with anySender. The datagrams must
// come from a peer, and from the port that peers send from. A pod on a peer's host has the same
// address because of masquerading, but another port.
func (s senderRules) inputRules(peers *nftables.Set) []filterRule {
	if s.anySender {
		return nil
	}
	datagram := s.datagram()
	return []filterRule{
		{match: slices.Concat(datagram, []expr.Any{
			loadAddress(sourceAddress), &expr.Lookup{SourceRegister: 1, SetName: peers.Name, SetID: peers.ID, Invert: true},
		}), drops: unknownPeer},
		{match: slices.Concat(datagram, []expr.Any{
			loadPort(sourcePort),
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.BigEndian.PutUint16(s.local.Port())},
		}), drops: wrongPort},
		{match: datagram, action: []expr.Any{
			&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(peerPriority)},
			&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: 1},
		}},
	}
}

// deviceRules returns the rules for packets that come out of the device. Unless anySender is set,
// their datagrams must have passed the input chain. Their addresses must be those of hosts:
// noSource and noDestination contain the addresses that no host can have.
func (s senderRules) deviceRules(noSource, noDestination *nftables.Set) []filterRule {
	device := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		equal(append([]byte(deviceName), make([]byte, unix.IFNAMSIZ-len(deviceName))...)),
	}
	in := func(offset uint32, set *nftables.Set) []expr.Any {
		return slices.Concat(device, []expr.Any{loadAddress(offset), &expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID}})
	}
	rules := []filterRule{
		{match: in(sourceAddress, noSource), drops: wrongSource},
		{match: in(destinationAddress, noDestination), drops: wrongDestination},
	}
	if s.anySender {
		return rules
	}
	notFromPeer := filterRule{match: slices.Concat(device, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(peerPriority)},
	}), drops: unknownPeer}
	return append([]filterRule{notFromPeer}, rules...)
}

// noHostAddresses returns the addresses that no host on a network can have: unspecified,
// loopback, multicast and broadcast. These are the IPv4 addresses for which packet.Forwardable
// returns false.
func noHostAddresses() []nftables.SetElement {
	return []nftables.SetElement{
		{Key: []byte{0, 0, 0, 0}}, {Key: []byte{0, 0, 0, 1}, IntervalEnd: true},
		{Key: []byte{127, 0, 0, 0}}, {Key: []byte{128, 0, 0, 0}, IntervalEnd: true},
		{Key: []byte{224, 0, 0, 0}}, {Key: []byte{240, 0, 0, 0}, IntervalEnd: true},
		{Key: []byte{255, 255, 255, 255}},
	}
}

// datagram matches datagrams to the address and port in s.local.
func (s senderRules) datagram() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, equal([]byte{unix.IPPROTO_UDP}),
		loadPort(destinationPort), equal(binaryutil.BigEndian.PutUint16(s.local.Port())),
		loadAddress(destinationAddress), equal(s.local.Addr().AsSlice()),
	}
}

// loadAddress loads the address at offset in the IPv4 header into register 1.
func loadAddress(offset uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}
}

// loadPort loads the port at offset in the UDP header into register 1.
func loadPort(offset uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2}
}

func equal(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }

// elements calls do with parts of addrs, each of which fits in one message.
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
