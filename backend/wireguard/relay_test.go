// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/subnet"
)

func keys(numbers ...byte) (ks []wgtypes.Key) {
	for _, n := range numbers {
		ks = append(ks, key(n))
	}
	return ks
}

// array returns a JSON array that contains key(n) for each n in numbers, or nil without numbers.
func array(t *testing.T, numbers ...byte) json.RawMessage {
	t.Helper()
	raw, err := encodeKeys(keys(numbers...))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// withRelays returns the lease of host i, with d as its backend data for IPv4. It sets the
// public key and the port in d.
func withRelays(t *testing.T, i byte, d leaseData) *subnet.Lease {
	t.Helper()
	l := host(t, i, int(i))
	d.PublicKey, d.Port = text(key(i)), 51820
	var err error
	if l.Endpoints[0].Data, err = encodeData(d); err != nil {
		t.Fatal(err)
	}
	return l
}

// TestListsAboutRelaysInALease checks the encoded form of lists, and that relaysIn returns what
// a lease contains.
func TestListsAboutRelaysInALease(t *testing.T) {
	want := fmt.Sprintf(`[%q,%q]`, text(key(2)), text(key(3)))
	if got := array(t, 2, 3); string(got) != want {
		t.Errorf("two keys are encoded as %s, want %s", got, want)
	}
	if got := array(t); got != nil {
		t.Errorf("no keys are encoded as %s, want nothing", got)
	}
	tun := newDevice(tunnel{families: both}).tunnel
	k, relay, lists := relaysIn(tun, *withRelays(t, 9, leaseData{Relay: true, Unreachable: array(t, 3, 2, 3), Relays: array(t, 4)}))
	if k != key(9) || !relay || !lists.equal(relayLists{keys(2, 3), keys(4)}) {
		t.Errorf("key %s, relay %v and %v are read, want what the lease has", k, relay, lists)
	}
	if k, relay, lists := relaysIn(tun, *host(t, 9, 9)); k != (wgtypes.Key{}) || relay || !lists.empty() {
		t.Errorf("key %s, relay %v and %v are read from a lease that says nothing about relays", k, relay, lists)
	}
}

// TestHostileListsAboutRelays checks lists that flanneld never writes. They must be read as
// empty, and the rest of the data must remain usable.
func TestHostileListsAboutRelays(t *testing.T) {
	many := make([]byte, maxRelayKeys+1)
	for i := range many {
		many[i] = byte(i + 1)
	}
	for name, list := range map[string]string{
		"another type":           `7`,
		"null":                   `null`,
		"an object":              `{"AQ==":1}`,
		"values of another type": `[7]`,
		"too many":               string(array(t, many...)),
		"too long":               strings.Replace(string(array(t, 2)), "[", "["+strings.Repeat(" ", maxRelayKeysSize), 1),
		"no key":                 `["AQ=="]`,
		"the zero key":           fmt.Sprintf(`[%q]`, text(wgtypes.Key{})),
		"a key in another form":  strings.Replace(string(array(t, 2)), "A=", "B=", 1),
	} {
		data := json.RawMessage(fmt.Sprintf(`{"PublicKey":%q,"Port":51820,"Relay":true,"Unreachable":%s,"Relays":%s}`, text(key(9)), list, list))
		relay, lists := decodeRelays(data)
		if !relay || len(lists.unreachable)+len(lists.relays) > 0 {
			t.Errorf("%s: relay %v and %v are read, want a relay without lists", name, relay, lists)
		}
		if k, port, err := decodeData(data); err != nil || k != key(9) || port != 51820 {
			t.Errorf("%s: the lease has key %s and port %d, %v, want those that it contains", name, k, port, err)
		}
	}
	if got := decodeKeys(json.RawMessage(fmt.Sprintf(`["",%q,%q]`, text(key(3)), text(key(2))))); !slices.Equal(got, keys(2, 3)) {
		t.Errorf("read %v, want the valid keys beside an invalid one", got)
	}
}

// TestAgreedRelay checks which relay host 1 chooses for host 2, which it does not reach, with
// different lists of both hosts.
func TestAgreedRelay(t *testing.T) {
	own, other := relayLists{keys(2), keys(5, 6)}, relayNote{peer: key(2), misses: true, relays: keys(5, 6)}
	change := func(f func(own *relayLists, other *relayNote)) (relayLists, relayNote) {
		o, n := own, other
		f(&o, &n)
		return o, n
	}
	first, ok := agreedRelay(key(1), own, other, func(wgtypes.Key) bool { return true })
	if !ok || !slices.Contains(own.relays, first) {
		t.Fatalf("the relay is %s, %v, want one that both hosts reach", first, ok)
	}
	second := own.relays[0]
	if second == first {
		second = own.relays[1]
	}
	for name, tt := range map[string]struct {
		change func(own *relayLists, other *relayNote)
		hidden wgtypes.Key // a relay that does not publish that it is one
		want   wgtypes.Key // zero for none
	}{
		"both reach both relays":                {change: func(*relayLists, *relayNote) {}, want: first},
		"the peer does not reach the first":     {change: func(_ *relayLists, n *relayNote) { n.relays = []wgtypes.Key{second} }, want: second},
		"this host does not reach the first":    {change: func(o *relayLists, _ *relayNote) { o.relays = []wgtypes.Key{second} }, want: second},
		"the first does not say that it is one": {change: func(*relayLists, *relayNote) {}, hidden: first, want: second},
		"only the peer misses the other":        {change: func(o *relayLists, _ *relayNote) { o.unreachable = keys(3) }},
		"only this host misses the other":       {change: func(_ *relayLists, n *relayNote) { n.misses = false }},
		"they reach no relay in common":         {change: func(o *relayLists, n *relayNote) { o.relays, n.relays = keys(5), keys(6) }},
		"the relays are the hosts themselves":   {change: func(o *relayLists, n *relayNote) { o.relays, n.relays = keys(1, 2), keys(1, 2) }},
		"the relay is itself not reached":       {change: func(o *relayLists, n *relayNote) { o.unreachable, o.relays = keys(2, 5), keys(5) }},
	} {
		o, n := change(tt.change)
		got, ok := agreedRelay(key(1), o, n, func(k wgtypes.Key) bool { return k != tt.hidden })
		if got != tt.want || ok != (tt.want != wgtypes.Key{}) {
			t.Errorf("%s: the relay is %s, %v, want %s", name, got, ok, tt.want)
		}
	}
}

// TestBothHostsAgreeOnARelay checks that both hosts of a pair choose the same relay, each from
// its own lists and the published lists of the other host, and that many pairs use all relays.
func TestBothHostsAgreeOnARelay(t *testing.T) {
	used := map[wgtypes.Key]int{}
	random := rand.New(rand.NewPCG(1, 2))
	some := func() (relays []wgtypes.Key) {
		for k := range byte(8) {
			if random.IntN(4) > 0 {
				relays = append(relays, key(k+1))
			}
		}
		return relays
	}
	usable := func(k wgtypes.Key) bool { return k != key(1) }
	for range 500 {
		a, b := key(byte(100+random.IntN(50))), key(byte(150+random.IntN(50)))
		ofA, ofB := relayLists{[]wgtypes.Key{b}, some()}, relayLists{[]wgtypes.Key{a}, some()}
		one, okOne := agreedRelay(a, ofA, relayNote{peer: b, misses: true, relays: ofB.relays}, usable)
		two, okTwo := agreedRelay(b, ofB, relayNote{peer: a, misses: true, relays: ofA.relays}, usable)
		if one != two || okOne != okTwo {
			t.Fatalf("hosts %s and %s choose %s and %s from %v and %v", a, b, one, two, ofA.relays, ofB.relays)
		}
		if okOne {
			used[one]++
		}
	}
	if len(used) != 7 || used[key(1)] > 0 {
		t.Errorf("the pairs use relays %v, want 7 different ones", used)
	}
}

// TestRelayNotes checks that only leases that matter to this host have a note, and that set
// reports each change.
func TestRelayNotes(t *testing.T) {
	tun, notes := newDevice(tunnel{families: both}).tunnel, relayNotes{}
	for _, step := range []struct {
		data    leaseData
		want    relayNote
		changed bool
	}{
		{leaseData{}, relayNote{}, false},
		{leaseData{Unreachable: array(t, 3), Relays: array(t, 5)}, relayNote{}, false}, // the lists concern other hosts
		{leaseData{Relay: true}, relayNote{peer: key(2), relay: true}, true},
		{leaseData{Relay: true}, relayNote{peer: key(2), relay: true}, false},
		{leaseData{Unreachable: array(t, 1), Relays: array(t, 5)}, relayNote{peer: key(2), misses: true, relays: keys(5)}, true},
		{leaseData{Unreachable: array(t, 1, 3), Relays: array(t, 5)}, relayNote{peer: key(2), misses: true, relays: keys(5)}, false},
		{leaseData{Unreachable: array(t, 1), Relays: array(t, 6)}, relayNote{peer: key(2), misses: true, relays: keys(6)}, true},
		{leaseData{}, relayNote{}, true},
	} {
		changed := notes.set("host2", newRelayNote(tun, *withRelays(t, 2, step.data), key(1)))
		if got := notes["host2"]; !got.equal(step.want) || changed != step.changed {
			t.Errorf("note %+v, changed %v, want %+v, %v", got, changed, step.want, step.changed)
		}
	}
	notes.set("host2", relayNote{peer: key(2), relay: true})
	if !notes.retain(func(string) bool { return false }) || len(notes) > 0 {
		t.Errorf("notes %v without leases, want none", notes)
	}
}

// TestHostileMarkOfARelay checks values of Relay that flanneld never writes. They must be read
// as false, and the rest of the data must remain usable.
func TestHostileMarkOfARelay(t *testing.T) {
	for value, want := range map[string]bool{
		`true`: true, `false`: false, `1`: false, `"true"`: false, `null`: false, `[true]`: false, `{"Relay":true}`: false,
	} {
		data := json.RawMessage(fmt.Sprintf(`{"PublicKey":%q,"Port":51820,"Relay": %s ,"Unreachable":%s}`, text(key(9)), value, array(t, 3)))
		if relay, lists := decodeRelays(data); relay != want || !slices.Equal(lists.unreachable, keys(3)) {
			t.Errorf("Relay %s: relay %v and %v are read, want %v, and the list", value, relay, lists, want)
		}
		if k, port, err := decodeData(data); err != nil || k != key(9) || port != 51820 {
			t.Errorf("Relay %s: the lease has key %s and port %d, %v, want those that it contains", value, k, port, err)
		}
	}
}

func FuzzRelays(f *testing.F) {
	f.Add([]byte(`{"Relay":true,"Unreachable":["AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="],"Relays":["AgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, lists := decodeRelays(raw)
		for _, list := range [][]wgtypes.Key{lists.unreachable, lists.relays} {
			if len(list) > maxRelayKeys || !slices.IsSortedFunc(list, compareKeys) || slices.Contains(list, wgtypes.Key{}) {
				t.Errorf("%q gives the keys %v", raw, list)
			}
			text, err := encodeKeys(list)
			if again := decodeKeys(text); err != nil || !slices.Equal(again, list) {
				t.Errorf("%q gives %v, which are read again as %v, %v", raw, list, again, err)
			}
		}
	})
}
