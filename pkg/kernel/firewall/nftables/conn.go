// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// answerTimeout limits the time from opening a connection to the last answer on it.
const answerTimeout = 10 * time.Second

// batchBuffer is the maximum size of a transaction in bytes. A rule takes about a hundred
// bytes. The kernel's default is sufficient for a few hundred rules.
const batchBuffer = 16 << 20

// errRaced means that the ruleset changed between reading and writing.
var errRaced = errors.New("another program changes the ruleset")

// errNoKernel means that the kernel has no nftables.
var errNoKernel = errors.New("the kernel has no nftables")

// conn is a connection to nftables in the kernel, for one family.
type conn struct {
	nl       *netlink.Conn
	family   prefix.Family
	protocol uint8 // of the tables
}

func dial(f prefix.Family) (*conn, error) {
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	if err := oneline.Join(nl.SetDeadline(time.Now().Add(answerTimeout)), nl.SetWriteBuffer(batchBuffer), nl.SetReadBuffer(batchBuffer)); err != nil {
		return nil, oneline.Join(err, nl.Close())
	}
	return &conn{nl, f, protocols[f]}, nil
}

var protocols = map[prefix.Family]uint8{prefix.IPv4: unix.NFPROTO_IPV4, prefix.IPv6: unix.NFPROTO_IPV6}

func (c *conn) close() { _ = c.nl.Close() }

func (c *conn) message(typ uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ),
			Flags: netlink.Request | flags,
		},
		Data: append([]byte{c.protocol, unix.NFNETLINK_V0, 0, 0}, pack(attrs...)...),
	}
}

// get requests one object, or with netlink.Dump many, and calls take with the attributes of each. It returns
// nil if the object does not exist, and errRaced if the ruleset changed during a dump.
func (c *conn) get(typ uint16, flags netlink.HeaderFlags, key []netlink.Attribute, take func(attrs)) error {
	answers, err := c.nl.Execute(c.message(typ, flags, key...))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if lacksNFTables(err) {
		return fmt.Errorf("%w: %w", errNoKernel, err)
	}
	if err != nil {
		return err
	}

	for _, m := range answers {
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			return errRaced
		}
		if len(m.Data) < 4 || m.Header.Type == netlink.Error || m.Header.Type == netlink.Done {
			continue
		}
		a, err := parse(m.Data[4:])
		if err != nil {
			return err
		}
		take(a)
	}
	return nil
}

func lacksNFTables(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)
}

// attrs contains the values of attributes by type.
type attrs map[uint16][]byte

func parse(b []byte) (attrs, error) {
	list, err := netlink.UnmarshalAttributes(b)
	all := attrs{}
	for _, a := range list {
		all[a.Type&^(netlink.Nested|netlink.NetByteOrder)] = a.Data
	}
	return all, err
}

// in returns the attributes that are nested in one, and none if there is no such one.
func (a attrs) in(typ uint16) attrs {
	inner, _ := parse(a[typ])
	return inner
}

// number returns 0 if there is no such attribute.
func (a attrs) number(typ uint16) (n uint64) {
	for _, b := range a[typ] {
		n = n<<8 | uint64(b)
	}
	return n
}

func (a attrs) text(typ uint16) string { return text(a[typ]) }

func text(b []byte) string { return strings.TrimRight(string(b), "\x00") }

func pack(list ...netlink.Attribute) []byte {
	b, _ := netlink.MarshalAttributes(list) // fails only for one of more than 64 KiB
	return b
}

func str(typ uint16, s string) netlink.Attribute {
	return netlink.Attribute{Type: typ, Data: append([]byte(s), 0)}
}

func num(typ uint16, n uint32) netlink.Attribute {
	return netlink.Attribute{Type: typ, Data: binary.BigEndian.AppendUint32(nil, n)}
}

// ofChain returns the attributes that name a chain, and more.
func ofChain(table, name string, more ...netlink.Attribute) []netlink.Attribute {
	return append([]netlink.Attribute{str(unix.NFTA_CHAIN_TABLE, table), str(unix.NFTA_CHAIN_NAME, name)}, more...)
}

// ofRules returns the attributes that name all rules of a chain, and more.
func ofRules(table, chain string, more ...netlink.Attribute) []netlink.Attribute {
	return append([]netlink.Attribute{str(unix.NFTA_RULE_TABLE, table), str(unix.NFTA_RULE_CHAIN, chain)}, more...)
}

// generation returns the number of the ruleset, which every change increases.
func (c *conn) generation() (id uint32, err error) {
	err = c.get(unix.NFT_MSG_GETGEN, 0, nil, func(a attrs) { id = uint32(a.number(unix.NFTA_GEN_ID)) })
	return id, err
}

// commit executes all of changes, of which there must be some, or none. It returns errRaced if the
// ruleset no longer has the given generation.
func (c *conn) commit(generation uint32, changes []netlink.Message) error {
	limit := func(typ netlink.HeaderType, attrs ...netlink.Attribute) netlink.Message {
		data := append([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}, pack(attrs...)...)
		return netlink.Message{Header: netlink.Header{Type: typ, Flags: netlink.Request}, Data: data}
	}
	begin := limit(unix.NFNL_MSG_BATCH_BEGIN, num(unix.NFNL_BATCH_GENID, generation))

	// The last acknowledgement follows all errors. Those of many changes would not fit the buffer.
	changes[len(changes)-1].Header.Flags |= netlink.Acknowledge
	if _, err := c.nl.SendMessages(slices.Concat([]netlink.Message{begin}, changes, []netlink.Message{limit(unix.NFNL_MSG_BATCH_END)})); err != nil {
		return err
	}

	for {
		answers, err := c.nl.Receive()
		if errors.Is(err, unix.ERESTART) {
			return errRaced
		}
		if err != nil || slices.ContainsFunc(answers, func(m netlink.Message) bool { return m.Header.Type == netlink.Error }) {
			return err
		}
	}
}
