// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// The kernel's own iptables announces no change, so its rules have to be read again and
// again. For 10,000 rules iptables-save takes 23 ms of CPU time, because it translates each
// of them. The kernel takes 9 ms to return them in binary form, and some microseconds to
// return the sizes of its tables. The binary form shows any change that iptables-save would
// print. The sizes show most of these changes.

const (
	// large is the size in bytes of some thousand rules. If the rules of a family are larger,
	// they are not read at each check, because that takes milliseconds of CPU time.
	large = 1 << 20
	// rests is the number of checks in a row that compare only the sizes of large tables.
	rests = 3
)

// exact describes a state in which the kernel has the wanted rules. The zero exact
// describes none.
type exact struct {
	known        bool
	wanted       firewall.Table
	sizes, rules uint64 // hashes over the sizes and over the rules in the kernel
	rested       int    // how often in a row only the sizes were compared
}

// legacy remembers for each family the last state in which the kernel had the wanted rules.
type legacy struct {
	seed  maphash.Seed
	exact map[prefix.Family]exact
}

func newLegacy() legacy {
	return legacy{seed: maphash.MakeSeed(), exact: map[prefix.Family]exact{}}
}

// unchanged reports whether the kernel still has the wanted rules of family f. If there are
// many rules, some calls compare only sizes, see large. If same is false, the caller
// must read the rules. If they are right, the caller must pass now to remember. now describes
// the rules before the caller reads them, so that the next call notices a change in between.
// If the kernel does not answer, now is zero and same is false.
func (l *legacy) unchanged(f prefix.Family, wanted firewall.Table) (now exact, same bool) {
	tables, err := openTables(l.seed, f)
	if err != nil { // iptables-save returns the reason
		return exact{}, false
	}
	defer tables.close()
	last := l.exact[f]
	now = exact{known: true, wanted: wanted, sizes: tables.sizes}
	maybe := last.known && last.sizes == now.sizes && reflect.DeepEqual(last.wanted, wanted)
	if maybe && tables.bytes > large && last.rested < rests {
		last.rested++
		l.exact[f] = last
		return now, true
	}
	if now.rules, err = tables.digest(l.seed); err != nil {
		return exact{}, false
	}
	l.exact[f] = exact{}
	if same = maybe && last.rules == now.rules; same {
		l.exact[f] = now
	}
	return now, same
}

func (l *legacy) remember(f prefix.Family, now exact) { l.exact[f] = now }

// legacyTables returns the names of the tables of the kernel's own iptables in the network
// namespace of this thread. It returns none if the kernel module is not loaded.
func legacyTables(f prefix.Family) []string {
	file := "/proc/thread-self/net/ip_tables_names"
	if f == prefix.IPv6 {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	names, _ := os.ReadFile(file) // the file exists if the module is loaded
	return strings.Fields(string(names))
}

// Socket options and sizes of include/uapi/linux/netfilter_ipv4/ip_tables.h and
// netfilter_ipv6/ip6_tables.h. All 64-bit fields are aligned to 8 bytes on the
// architectures that flanneld is built for.
const (
	getInfo     = 64
	getEntries  = 65
	nameSize    = 32 // of the table's name, with which both structures begin
	infoSize    = 84 // of struct ipt_getinfo
	infoBytes   = 80 // offset in it of the size of all rules
	entriesHead = 40 // of struct ipt_get_entries, before the rules
)

// layout contains the offsets in a rule of one family, struct ipt_entry or ip6t_entry.
type layout struct {
	level    int
	next     int // the length of this rule (u16)
	comefrom int // a value of the kernel's own (u32), followed by two counters of 64 bits
	elements int
}

func layoutOf(f prefix.Family) layout {
	if f == prefix.IPv4 {
		return layout{level: unix.SOL_IP, next: 90, comefrom: 92, elements: 112}
	}
	return layout{level: unix.SOL_IPV6, next: 142, comefrom: 144, elements: 168}
}

// tables are those tables of the kernel's own iptables that may contain flanneld's chains.
type tables struct {
	layout
	fd    int
	names []string
	sizes uint64 // hash over the number and size of rules, and where built-in chains begin
	bytes int    // size of all rules
}

// openTables reads the sizes of the tables that exist. It does not ask for a table that does not exist,
// because that would create it. The caller closes the result.
func openTables(seed maphash.Seed, f prefix.Family) (*tables, error) {
	domain := unix.AF_INET
	if f == prefix.IPv6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	t := &tables{layout: layoutOf(f), fd: fd}
	existing := legacyTables(f)
	var h maphash.Hash
	h.SetSeed(seed)
	for _, name := range Tables() {
		if !slices.Contains(existing, name) {
			continue
		}
		info, err := t.info(name)
		if err != nil {
			t.close()
			return nil, fmt.Errorf("read size of table %s: %w", name, err)
		}
		t.names = append(t.names, name)
		t.bytes += rulesIn(info)
		_, _ = h.Write(info)
	}
	t.sizes = h.Sum64()
	return t, nil
}

func (t *tables) close() { _ = unix.Close(t.fd) }

// info returns the struct ipt_getinfo of a table.
func (t *tables) info(name string) ([]byte, error) {
	info := make([]byte, infoSize)
	copy(info[:nameSize-1], name)
	return info, getsockopt(t.fd, t.level, getInfo, info)
}

func rulesIn(info []byte) int { return int(binary.NativeEndian.Uint32(info[infoBytes:])) }

// digest returns a hash over the rules of all tables, without their counters.
func (t *tables) digest(seed maphash.Seed) (uint64, error) {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, name := range t.names {
		rules, err := t.read(name)
		if err == nil {
			_, _ = h.WriteString(name)
			err = t.hash(&h, rules)
		}
		if err != nil {
			return 0, fmt.Errorf("read rules of table %s: %w", name, err)
		}
	}
	return h.Sum64(), nil
}

// read returns the rules of a table.
func (t *tables) read(name string) (rules []byte, err error) {
	// Another program may change the size of the table between the two calls.
	for range 5 {
		info, err := t.info(name)
		if err != nil {
			return nil, err
		}
		buf := make([]byte, entriesHead+rulesIn(info))
		copy(buf[:nameSize-1], name)
		binary.NativeEndian.PutUint32(buf[nameSize:], uint32(rulesIn(info)))
		err = getsockopt(t.fd, t.level, getEntries, buf)
		if !errors.Is(err, unix.EAGAIN) {
			return buf[entriesHead:], err
		}
	}
	return nil, unix.EAGAIN
}

// hash writes all rules to h, without the bytes that change when a packet passes.
func (l layout) hash(h *maphash.Hash, rules []byte) error {
	for len(rules) > 0 {
		if len(rules) < l.elements {
			return fmt.Errorf("the last rule has %d bytes, want at least %d", len(rules), l.elements)
		}
		next := int(binary.NativeEndian.Uint16(rules[l.next:]))
		if next < l.elements || next > len(rules) {
			return fmt.Errorf("a rule has %d bytes, want %d to %d", next, l.elements, len(rules))
		}
		_, _ = h.Write(rules[:l.comefrom])
		_, _ = h.Write(rules[l.elements:next])
		rules = rules[next:]
	}
	return nil
}

// getsockopt fills all of buf. The package unix has no such call for options of this size.
func getsockopt(fd, level, option int, buf []byte) error {
	size := uint32(len(buf))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&size)), 0)
	runtime.KeepAlive(buf)
	if errno != 0 {
		return errno
	}
	if int(size) != len(buf) {
		return fmt.Errorf("the kernel returned %d bytes, want %d", size, len(buf))
	}
	return nil
}
