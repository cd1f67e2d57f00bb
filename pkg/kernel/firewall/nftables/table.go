// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

type table struct {
	exists, dormant bool
	chains          uint32 // number of chains, sets and other objects in the table, including foreign ones
	ours            map[firewall.Chain]chainState
}

// chainState is a chain of flanneld in the kernel.
type chainState struct {
	exists  bool
	right   bool             // the chain is as wanted, apart from its rules
	rules   [][]byte         // expressions of the rules
	decoded []*firewall.Rule // decoded rules; nil for a rule that no flannel daemon creates
}

// table reads the named table and flanneld's chains in it.
func (c *conn) table(name string) (table, error) {
	t := table{ours: map[firewall.Chain]chainState{}}
	key := []netlink.Attribute{str(unix.NFTA_TABLE_NAME, name)}
	err := c.get(unix.NFT_MSG_GETTABLE, 0, key, func(a attrs) {
		t.exists = true
		t.dormant = a.number(unix.NFTA_TABLE_FLAGS)&unix.NFT_TABLE_F_DORMANT != 0
		t.chains = uint32(a.number(unix.NFTA_TABLE_USE))
	})
	if err != nil || !t.exists {
		return t, err
	}

	for _, chain := range firewall.Chains() {
		if t.ours[chain], err = c.chain(name, chain); err != nil {
			return t, err
		}
	}
	return t, nil
}

func (c *conn) chain(table string, chain firewall.Chain) (chainState, error) {
	var s chainState
	want := specs[chain]
	err := c.get(unix.NFT_MSG_GETCHAIN, 0, ofChain(table, want.name), func(a attrs) {
		hook := a.in(unix.NFTA_CHAIN_HOOK)
		is := want
		is.kind = a.text(unix.NFTA_CHAIN_TYPE)
		is.hook = uint32(hook.number(unix.NFTA_HOOK_HOOKNUM))
		is.priority = uint32(hook.number(unix.NFTA_HOOK_PRIORITY))
		s.exists = true
		s.right = is == want && a.number(unix.NFTA_CHAIN_POLICY) == nfAccept
	})
	if err != nil || !s.exists {
		return s, err
	}

	return s, c.eachRule(table, want.name, func(raw []byte) {
		s.rules = append(s.rules, raw)
		var decoded *firewall.Rule
		if rule, ok := decode(c.family, raw); ok {
			decoded = &rule
		}
		s.decoded = append(s.decoded, decoded)
	})
}

// eachRule calls take with the expressions of each rule of a chain.
func (c *conn) eachRule(table, chain string, take func(raw []byte)) error {
	return c.get(unix.NFT_MSG_GETRULE, netlink.Dump, ofRules(table, chain), func(a attrs) { take(a[unix.NFTA_RULE_EXPRESSIONS]) })
}

// commentType is the type of the comment in the user data of tables and chains.
const commentType = userdata.Type(0)

func comment(typ uint16, text string) netlink.Attribute {
	return netlink.Attribute{Type: typ, Data: userdata.AppendString(nil, commentType, text)}
}

// The attributes of user data (linux/netfilter/nf_tables.h), for which x/sys/unix has no
// constants.
const (
	nftaTableUserdata = 6
	nftaChainUserdata = 12
)

func (c *conn) newTable() netlink.Message {
	name := tableName(c.family)
	return c.message(unix.NFT_MSG_NEWTABLE, netlink.Create, str(unix.NFTA_TABLE_NAME, name), num(unix.NFTA_TABLE_FLAGS, 0),
		comment(nftaTableUserdata, "rules for "+name))
}

func (c *conn) delTable(name string) netlink.Message {
	return c.message(unix.NFT_MSG_DELTABLE, 0, str(unix.NFTA_TABLE_NAME, name))
}

func (c *conn) newChain(chain firewall.Chain) netlink.Message {
	s := specs[chain]
	hook := pack(num(unix.NFTA_HOOK_HOOKNUM, s.hook), num(unix.NFTA_HOOK_PRIORITY, s.priority))
	return c.message(unix.NFT_MSG_NEWCHAIN, netlink.Create, ofChain(tableName(c.family), s.name,
		netlink.Attribute{Type: netlink.Nested | unix.NFTA_CHAIN_HOOK, Data: hook}, num(unix.NFTA_CHAIN_POLICY, nfAccept),
		str(unix.NFTA_CHAIN_TYPE, s.kind), comment(nftaChainUserdata, s.comment))...)
}

// delRules deletes all rules of a chain.
func (c *conn) delRules(chain firewall.Chain) netlink.Message {
	return c.message(unix.NFT_MSG_DELRULE, 0, ofRules(tableName(c.family), specs[chain].name)...)
}

func (c *conn) delChain(chain firewall.Chain) netlink.Message {
	return c.message(unix.NFT_MSG_DELCHAIN, 0, ofChain(tableName(c.family), specs[chain].name)...)
}

// newRule adds a rule at the end of its chain.
func (c *conn) newRule(chain firewall.Chain, expressions []byte) netlink.Message {
	return c.message(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, ofRules(tableName(c.family), specs[chain].name,
		netlink.Attribute{Type: netlink.Nested | unix.NFTA_RULE_EXPRESSIONS, Data: expressions})...)
}
