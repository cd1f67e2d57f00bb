// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	vishvananda "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// Blocks returns the rules and policies that drop or redirect one of packets. It omits the tables of iptables
// and of Docker, for which there are other functions.
func Blocks(packets []firewall.Packet) (blocks []firewall.Block, err error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	chains, err := c.ListChains()
	if lacksNFTables(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	builtin := []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}
	ofIPTables := func(t *nftables.Table) bool {
		return t.Family != nftables.TableFamilyINet && slices.ContainsFunc(chains, func(c *nftables.Chain) bool {
			return c.Table.Name == t.Name && c.Table.Family == t.Family && slices.Contains(builtin, c.Name)
		})
	}

	devices, err := devicesOf(chains)
	if err != nil {
		return nil, err
	}
	ports, err := redirected(c, chains)
	if err != nil {
		return nil, err
	}
	for i, p := range slices.Concat(packets, firewall.ToPorts(packets, ports)) {
		f := follower{conn: c, devices: devices, packet: p, raw: encodePacket(p)}
		for _, base := range chains {
			if !f.passes(base) || ofIPTables(base.Table) || base.Table.Name == dockerTable {
				continue
			}

			o, err := f.follow(base)
			if err != nil {
				return blocks, err
			}
			policy := "accept"
			if base.Policy != nil && *base.Policy == nftables.ChainPolicyDrop {
				policy = "drop"
			}
			if b, ok := o.Block(p, base.Name, policy); ok && (b.Redirects || i < len(packets)) {
				b.Program = "nft"
				b.Table = familyName(base.Table.Family) + " " + base.Table.Name
				blocks = append(blocks, b)
			}
		}
	}
	return blocks, nil
}

func familyName(f nftables.TableFamily) string {
	return map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6", nftables.TableFamilyINet: "inet", nftables.TableFamilyNetdev: "netdev", nftables.TableFamilyBridge: "bridge"}[f]
}

// devicesOf returns the devices of the base chains whose hook is in a device, which the library does not read.
func devicesOf(chains []*nftables.Chain) (map[*nftables.Chain][]string, error) {
	all := map[*nftables.Chain][]string{}
	for _, chain := range chains {
		if !inDevice(chain) {
			continue
		}
		c, err := dial(prefix.IPv4)
		if err != nil {
			return nil, err
		}
		c.protocol = uint8(chain.Table.Family)
		err = c.get(unix.NFT_MSG_GETCHAIN, 0, ofChain(chain.Table.Name, chain.Name), func(a attrs) { all[chain] = deviceNames(a.in(unix.NFTA_CHAIN_HOOK)) })
		c.close()
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// deviceNames returns the devices of a hook: the kernel names one, or a list.
func deviceNames(hook attrs) []string {
	names := []string{hook.text(unix.NFTA_HOOK_DEV)}
	list, _ := netlink.UnmarshalAttributes(hook[hookDevices])
	for _, device := range list {
		names = append(names, text(device.Data))
	}
	return names
}

// These are missing in package unix.
const (
	hookDevices = 4                     // NFTA_HOOK_DEVS
	inetIngress = unix.NF_INET_NUMHOOKS // NF_INET_INGRESS
)

// inDevice reports whether c is a base chain that sees the packets of single devices.
func inDevice(c *nftables.Chain) bool {
	return c.Hooknum != nil && (c.Table.Family == nftables.TableFamilyNetdev ||
		c.Table.Family == nftables.TableFamilyINet && *c.Hooknum == inetIngress)
}

type follower struct {
	conn *nftables.Conn
	// devices are those of the chains that see the packets of single devices.
	devices map[*nftables.Chain][]string
	packet  firewall.Packet
	raw     []byte // the headers of the packet
}

func (f follower) family() prefix.Family { return prefix.FamilyOf(f.packet.Src) }

// passes reports whether c is a base chain that the packet passes, and that may drop or redirect it.
func (f follower) passes(c *nftables.Chain) bool {
	if inDevice(c) {
		device := f.packet.In
		if c.Table.Family == nftables.TableFamilyNetdev && *c.Hooknum == *nftables.ChainHookEgress {
			device = f.packet.Out
		}
		return device != "" && slices.Contains(f.devices[c], device)
	}

	if c.Table.Family == nftables.TableFamilyBridge {
		return f.passesInBridge(c)
	}
	own := nftables.TableFamily(protocols[f.family()])
	if c.Hooknum == nil || c.Table.Family != own && c.Table.Family != nftables.TableFamilyINet {
		return false
	}
	changesSources := *c.Hooknum == *nftables.ChainHookPostrouting || *c.Hooknum == *nftables.ChainHookInput
	if c.Type == nftables.ChainTypeNAT && changesSources && !f.packet.Forwarded() {
		return false
	}

	hooks := []nftables.ChainHook{*nftables.ChainHookPrerouting, *nftables.ChainHookForward, *nftables.ChainHookPostrouting}
	if f.packet.In == "" {
		hooks = []nftables.ChainHook{*nftables.ChainHookOutput, *nftables.ChainHookPostrouting}
	} else if f.packet.Out == "" {
		hooks = []nftables.ChainHook{*nftables.ChainHookPrerouting, *nftables.ChainHookInput}
	}
	return slices.Contains(hooks, *c.Hooknum)
}

// passesInBridge reports whether c is a base chain of bridges that the packet passes: on its way from a port
// of a bridge to this host, or from this host to a port.
func (f follower) passesInBridge(c *nftables.Chain) bool {
	if c.Hooknum == nil || c.Type != nftables.ChainTypeFilter {
		return false
	}
	device := f.packet.In
	switch *c.Hooknum {
	case *nftables.ChainHookPrerouting, *nftables.ChainHookInput:
	case *nftables.ChainHookOutput, *nftables.ChainHookPostrouting:
		device = f.packet.Out
	default: // forward: from port to port
		return false
	}
	link, err := vishvananda.LinkByName(device)
	return err == nil && link.Type() == "bridge"
}

// follow returns what becomes of the packet in a chain.
func (f follower) follow(c *nftables.Chain) (firewall.Outcome, error) {
	return firewall.Steps(func(chain string, each func(firewall.Step) bool) error {
		rules, err := f.conn.GetRules(c.Table, &nftables.Chain{Name: chain})
		for _, r := range rules {
			s, failed := f.step(r)
			if failed != nil || !each(s) {
				return failed
			}
		}
		return err
	}).Follow(c.Name)
}

// redirected returns the ports whose packets a rule of a base chain redirects. Other chains, of which
// kube-proxy may have thousands, are not read.
func redirected(c *nftables.Conn, chains []*nftables.Chain) (ports []firewall.Payload, err error) {
	for _, base := range chains {
		if base.Hooknum == nil || base.Type != nftables.ChainTypeNAT {
			continue
		}
		rules, err := c.GetRules(base.Table, base)
		if err != nil {
			return nil, err
		}

		for _, r := range rules {
			to := firewall.Payload{Protocol: firewall.TCP}
			var compared expr.Any
			for _, e := range r.Exprs {
				is, ok := e.(*expr.Cmp)
				if !ok || is.Op != expr.CmpOpEq {
					compared = e
					continue
				}
				meta, _ := compared.(*expr.Meta)
				payload, _ := compared.(*expr.Payload)
				switch {
				case meta != nil && meta.Key == expr.MetaKeyL4PROTO:
					to.Protocol = is.Data[0]
				case payload != nil && payload.Base == expr.PayloadBaseTransportHeader &&
					payload.Offset == destinationPort && len(is.Data) == 2:
					to.Port = binary.BigEndian.Uint16(is.Data)
				}
			}
			if to.Port != 0 && slices.ContainsFunc(r.Exprs, redirects) && !slices.Contains(ports, to) {
				ports = append(ports, to)
			}
		}
	}
	return ports, nil
}

const destinationPort = 2 // bytes from the beginning of the header of TCP or UDP

// redirects reports whether a part of a rule gives packets another destination.
func redirects(e expr.Any) bool {
	nat, ok := e.(*expr.NAT)
	_, local := e.(*expr.Redir)
	return local || ok && nat.Type == expr.NATTypeDestNAT
}

// Queue adds to a step what becomes of packets for the queues from first to last: if no program reads one, its packets
// are dropped, unless the rule has bypass. A program is taken to accept them.
func Queue(s firewall.Step, first, last int, bypass bool) firewall.Step {
	s.Effect = firewall.Accepts
	text, _ := os.ReadFile("/proc/thread-self/net/netfilter/nfnetlink_queue") // missing if no program has ever read one
	read := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		number, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		read[number] = true
	}
	for n := first; n <= last && !bypass; n++ {
		if !read[strconv.Itoa(n)] {
			s.Effect = firewall.Drops
			s.Rule += fmt.Sprintf(" (no program reads queue %d)", n)
			return s
		}
	}
	return s
}

// effects contains the verdicts that decide about the packet or its next rule.
var effects = map[expr.VerdictKind]firewall.Effect{
	expr.VerdictAccept: firewall.Accepts, expr.VerdictDrop: firewall.Drops, expr.VerdictReturn: firewall.Returns,
	expr.VerdictJump: firewall.Jumps, expr.VerdictGoto: firewall.GoesTo,
}

// step returns what a rule does with the packet.
func (f follower) step(r *nftables.Rule) (s firewall.Step, err error) {
	loaded := registers{}
	seldom := false // a condition that is not known is true for few packets
	s = firewall.Step{Met: firewall.Yes, Rule: fmt.Sprintf("the rule with handle %d", r.Handle)}
	for _, e := range r.Exprs {
		met := true
		known := true
		switch e := e.(type) {
		case *expr.Counter, *expr.Log, *expr.Notrack:
		case *expr.Verdict:
			s.Effect = effects[e.Kind]
			s.Chain = e.Chain
			return s, nil
		case *expr.Reject:
			s.Effect = firewall.Drops
			return s, nil
		case *expr.Queue: // the number may also be in a register, which the library does not read
			return Queue(s, int(e.Num), int(e.Num+max(e.Total, 1)-1), e.Total == 0 || e.Flag&expr.QueueFlagBypass != 0), nil
		case *expr.NAT, *expr.Redir, *expr.Masq:
			s.Effect = firewall.Rewrites
			if redirects(e) {
				s.Effect = firewall.Redirects
			}
			return s, nil
		case *expr.Immediate:
			loaded.load(e.Register, e.Data)
		case *expr.Meta:
			loaded.load(e.Register, f.meta(e.Key))
			seldom = seldom || slices.Contains(seldomMeta, e.Key)
			devices := []expr.MetaKey{expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME, expr.MetaKeyIIF, expr.MetaKeyOIF}
			if r.Table.Family == nftables.TableFamilyBridge && slices.Contains(devices, e.Key) {
				loaded.load(e.Register, nil) // a port of the bridge
			}
		case *expr.Ct:
			loaded.load(e.Register, nil)
			seldom = seldom || e.Key != expr.CtKeySTATE
			if e.Key == expr.CtKeySTATE {
				loaded.load(e.Register, binary.NativeEndian.AppendUint32(nil, expr.CtStateBitNEW))
			}

		case *expr.Payload:
			loaded.load(e.DestRegister, f.payload(e))
		case *expr.Bitwise:
			loaded.load(e.DestRegister, bitwise(e, loaded.field(e.SourceRegister)))
		case *expr.Cmp:
			met, known = compare(e, loaded.field(e.Register))
		case *expr.Range:
			have := loaded.field(e.Register)
			known = have != nil
			met = known && (bytes.Compare(have, e.FromData) >= 0 && bytes.Compare(have, e.ToData) <= 0) == (e.Op == expr.CmpOpEq)

		case *expr.Lookup:
			elements, interval, err := f.elements(r.Table, e.SetName)
			if err != nil {
				return s, err
			}
			found, ok := search(elements, interval, loaded.fields(e.SourceRegister, elements))
			known = ok
			met = ok && (found != nil) != e.Invert
			switch {
			case !e.IsDestRegSet:
			case e.DestRegister != unix.NFT_REG_VERDICT:
				loaded.load(e.DestRegister, nil)
				if found != nil {
					loaded.load(e.DestRegister, found.Val)
				}
			case !known: // any verdict of the map may apply
				return firewall.Step{Met: firewall.Unknown, Effect: firewall.Accepts}, nil
			case met:
				verdict, err := parse(found.Val)
				s.Effect = effects[expr.VerdictKind(int32(verdict.number(unix.NFTA_VERDICT_CODE)))]
				s.Chain = verdict.text(unix.NFTA_VERDICT_CHAIN)
				return s, err
			}
		case *expr.Limit, *expr.Connlimit, *expr.Dynset, *expr.Fib:
			known = false
			seldom = true
			clear(loaded)
		default:
			known = false
			clear(loaded)
		}
		if known && !met {
			s.Met = firewall.No
			return s, nil
		}
		if !known && s.Met != firewall.Seldom {
			s.Met = firewall.Unknown
			if seldom {
				s.Met = firewall.Seldom
			}
		}
	}
	return s, nil
}

// seldomMeta contains keys of which Seldom is the answer to a condition: marks of other programs, and senders on this host.
var seldomMeta = []expr.MetaKey{expr.MetaKeyMARK, expr.MetaKeySKUID, expr.MetaKeySKGID, expr.MetaKeyCGROUP}

// meta returns nil if the value of the key is not known.
func (f follower) meta(key expr.MetaKey) []byte {
	name := func(device string) []byte {
		b := make([]byte, unix.IFNAMSIZ)
		copy(b, device)
		return b
	}

	switch key {
	case expr.MetaKeyIIFNAME:
		return name(f.packet.In)
	case expr.MetaKeyOIFNAME:
		return name(f.packet.Out)
	case expr.MetaKeyIIF:
		return deviceIndex(f.packet.In)
	case expr.MetaKeyOIF:
		return deviceIndex(f.packet.Out)
	case expr.MetaKeyL4PROTO:
		return []byte{f.packet.Protocol}
	case expr.MetaKeyNFPROTO:
		return []byte{protocols[f.family()]}
	case expr.MetaKeyPKTTYPE:
		return []byte{unix.PACKET_HOST}

	case expr.MetaKeyPROTOCOL:
		if f.packet.Src.Is4() {
			return binary.BigEndian.AppendUint16(nil, unix.ETH_P_IP)
		}
		return binary.BigEndian.AppendUint16(nil, unix.ETH_P_IPV6)
	default: // also the mark, which an earlier rule may set
		return nil
	}
}

// deviceIndex returns the index of a device as rules contain it, such as those with iif lo. It returns 0 if the packet
// has no device, as the kernel does, and nil if there is no device with the name.
func deviceIndex(name string) []byte {
	index := uint32(0)
	if name != "" {
		link, err := vishvananda.LinkByName(name)
		if err != nil {
			return nil
		}
		index = uint32(link.Attrs().Index)
	}
	return binary.NativeEndian.AppendUint32(nil, index)
}

// payload returns nil if that part of the packet is not known.
func (f follower) payload(e *expr.Payload) []byte {
	start := int(e.Offset)
	switch e.Base {
	case expr.PayloadBaseNetworkHeader:
	case expr.PayloadBaseTransportHeader:
		h := headers[f.family()]
		start += int(h.dst + h.length)
	default:
		return nil
	}
	if end := start + int(e.Len); end <= len(f.raw) {
		return f.raw[start:end]
	}
	return nil
}

// encodePacket returns the headers of a packet up to the ports, or up to the flags of TCP. The fields that Packet lacks are zero.
func encodePacket(p firewall.Packet) []byte {
	h := headers[prefix.FamilyOf(p.Src)]
	raw := make([]byte, h.dst+h.length)
	copy(raw[h.src:], p.Src.AsSlice())
	copy(raw[h.dst:], p.Dst.AsSlice())
	raw[h.protocol] = p.Protocol

	const anyPort = 50000
	raw = binary.BigEndian.AppendUint16(raw, anyPort)
	raw = binary.BigEndian.AppendUint16(raw, p.Port)
	if p.Protocol == firewall.TCP {
		raw = append(raw, 0, 0, 0, 0, 0, 0, 0, 0, 5<<4, 2) // SYN, after the sequence numbers and the length of the header
	}
	return raw
}

func bitwise(e *expr.Bitwise, from []byte) []byte {
	if from == nil || len(e.Mask) != len(from) || len(e.Xor) != len(from) {
		return nil
	}
	to := make([]byte, len(from))
	for i := range from {
		to[i] = from[i]&e.Mask[i] ^ e.Xor[i]
	}
	return to
}

// compare compares shorter data with the beginning of the register, as for patterns of names.
func compare(e *expr.Cmp, have []byte) (met, known bool) {
	if have == nil || len(have) < len(e.Data) {
		return false, false
	}

	order := bytes.Compare(have[:len(e.Data)], e.Data)
	met, known = map[expr.CmpOp]bool{
		expr.CmpOpEq: order == 0, expr.CmpOpNeq: order != 0, expr.CmpOpLt: order < 0,
		expr.CmpOpLte: order <= 0, expr.CmpOpGt: order > 0, expr.CmpOpGte: order >= 0,
	}[e.Op]
	return met, known
}

// registers contains what a rule has loaded, by the first of the words of 4 bytes that it takes. A value
// that is missing is unknown.
type registers map[uint32][]byte

// word returns the first word of a register: there are 16 of 4 bytes each, and 4 that are the same as 4 of those.
func word(register uint32) uint32 {
	if register >= unix.NFT_REG32_00 {
		return register - unix.NFT_REG32_00
	}
	return 4 * (register - unix.NFT_REG_1)
}

func words(bytes int) uint32 { return uint32(bytes+3) / 4 }

func (r registers) load(register uint32, data []byte) { r[word(register)] = data }

func (r registers) field(register uint32) []byte { return r[word(register)] }

// fields returns the fields of a key as long as those of elements, or nil if one is not known.
func (r registers) fields(register uint32, elements []nftables.SetElement) (fields [][]byte) {
	length := 0 // of the keys; an element for all other keys has none
	for _, e := range elements {
		length = max(length, len(e.Key))
	}
	fields = [][]byte{}
	for at, end := word(register), word(register)+words(length); at < end; {
		field := r[at]
		if len(field) == 0 {
			return nil
		}
		fields = append(fields, field)
		at += words(len(field))
	}
	return fields
}

// elements returns the elements of a set, and whether they are limits of intervals.
func (f follower) elements(t *nftables.Table, name string) (elements []nftables.SetElement, interval bool, err error) {
	set, err := f.conn.GetSetByName(t, name)
	if err != nil {
		return nil, false, err
	}
	elements, err = f.conn.GetSetElements(set)
	return elements, set.Interval && !set.Concatenation, err
}

// search returns the element that contains the key with these fields. ok is false if that is not known.
func search(elements []nftables.SetElement, interval bool, key [][]byte) (found *nftables.SetElement, ok bool) {
	if key == nil {
		return nil, false
	}

	var others *nftables.SetElement // the element for all other keys
	for i, e := range elements {
		switch {
		case len(e.Key) == 0:
			others = &elements[i]
		case !interval && contains(e, key):
			return &elements[i], true
		case !interval || bytes.Compare(e.Key, key[0]) > 0:
		case found == nil || bytes.Compare(e.Key, found.Key) > 0 || bytes.Equal(e.Key, found.Key) && found.IntervalEnd:
			found = &elements[i] // the last limit before key, and the start of an interval rather than the end of one before
		}
	}
	if found == nil || found.IntervalEnd {
		return others, true
	}
	return found, true
}

// contains reports whether each field of the key is in the range of that field in the element.
func contains(e nftables.SetElement, key [][]byte) bool {
	last := e.KeyEnd
	if last == nil {
		last = e.Key
	}
	at := 0
	for _, field := range key {
		end := at + len(field)
		if end > min(len(e.Key), len(last)) || bytes.Compare(field, e.Key[at:end]) < 0 || bytes.Compare(field, last[at:end]) > 0 {
			return false
		}
		at += int(4 * words(len(field)))
	}
	return true
}
