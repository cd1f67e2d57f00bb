// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/subnet"
)

// A lease has at most maxRelayKeys keys in each of its lists about relays, in a JSON array of at most
// maxRelayKeysSize bytes. A larger array is ignored.
const (
	maxRelayKeys     = 32
	maxRelayKeysSize = 2 << 10
)

// relayLists is what a host publishes while it does not reach some peers: the public keys of
// these peers (unreachable), and of the relays that could carry the packets to them (relays).
// Both lists are sorted.
type relayLists struct {
	unreachable []wgtypes.Key
	relays      []wgtypes.Key
}

func (r relayLists) empty() bool { return len(r.unreachable) == 0 }

func (r relayLists) equal(to relayLists) bool {
	return slices.Equal(r.unreachable, to.unreachable) && slices.Equal(r.relays, to.relays)
}

func compareKeys(a, b wgtypes.Key) int { return bytes.Compare(a[:], b[:]) }

// hasKey reports whether keys contain key. keys must be sorted.
func hasKey(keys []wgtypes.Key, key wgtypes.Key) bool {
	_, found := slices.BinarySearchFunc(keys, key, compareKeys)
	return found
}

// encodeKeys returns a JSON array of keys, or nil if there are none.
func encodeKeys(keys []wgtypes.Key) (json.RawMessage, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	texts := make([]string, 0, len(keys))
	for _, k := range keys {
		texts = append(texts, k.String())
	}
	raw, err := json.Marshal(texts)
	if err != nil {
		return nil, fmt.Errorf("encode keys of peers: %w", err)
	}
	return raw, nil
}

// decodeKeys returns the keys in a JSON array, sorted and without duplicates. Another host has
// written the array, so decodeKeys skips an entry that encodeKeys would not write, and returns
// nil if the array is invalid or too large.
func decodeKeys(raw json.RawMessage) []wgtypes.Key {
	var texts []string
	if len(raw) == 0 || len(raw) > maxRelayKeysSize || json.Unmarshal(raw, &texts) != nil || len(texts) > maxRelayKeys {
		return nil
	}
	var keys []wgtypes.Key
	for _, text := range texts {
		if key, err := wgtypes.ParseKey(text); err == nil && key != (wgtypes.Key{}) && key.String() == text {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, compareKeys)
	return slices.Compact(keys)
}

// relayField is the begin of the JSON keys of leaseData.Relay and leaseData.Relays.
const relayField = `"Relay`

// decodeRelays decodes what the backend data of a host says about relays: whether the host is a
// relay, and its lists. Both are zero if the data is invalid or says nothing.
func decodeRelays(raw json.RawMessage) (relay bool, lists relayLists) {
	if !bytes.Contains(raw, []byte(relayField)) { // as in nearly all leases
		return false, relayLists{}
	}
	var d struct {
		Relay               mark
		Unreachable, Relays json.RawMessage
	}
	if json.Unmarshal(raw, &d) != nil {
		return false, relayLists{}
	}
	return bool(d.Relay), relayLists{decodeKeys(d.Unreachable), decodeKeys(d.Relays)}
}

// IsRelay reports whether the lease says that its host is a relay.
func IsRelay(l *subnet.Lease) bool {
	return slices.ContainsFunc(l.Endpoints, func(e subnet.Endpoint) bool {
		relay, _ := decodeRelays(e.Data)
		return relay
	})
}

// relaysIn returns what lease l says about relays to hosts with t: whether its host is a relay, and
// its lists. key is the public key of that host; it is zero if the lease says nothing about relays.
// relaysIn reads the data of the first family of t that l has.
func relaysIn(t tunnel, l subnet.Lease) (key wgtypes.Key, relay bool, lists relayLists) {
	for _, f := range t.families {
		if e, ok := l.Endpoint(f); ok {
			if relay, lists = decodeRelays(e.Data); relay || !lists.empty() {
				key, _, _ = decodeData(e.Data)
			}
			return key, relay, lists
		}
	}
	return key, false, relayLists{}
}

// relayNote is what the lease of another host says about relays, as far as it matters to this host.
type relayNote struct {
	peer   wgtypes.Key   // public key of that host
	relay  bool          // that host is a relay
	misses bool          // that host does not reach this host
	relays []wgtypes.Key // relays that that host reaches; only if misses is set
}

func (r relayNote) equal(to relayNote) bool {
	return r.peer == to.peer && r.relay == to.relay && r.misses == to.misses && slices.Equal(r.relays, to.relays)
}

// newRelayNote returns the note about lease l. own is the public key of this host. The note is
// zero if the lease says nothing about relays that matters to this host.
func newRelayNote(t tunnel, l subnet.Lease, own wgtypes.Key) (note relayNote) {
	key, relay, lists := relaysIn(t, l)
	misses := slices.Contains(lists.unreachable, own)
	if !relay && !misses {
		return relayNote{}
	}
	note = relayNote{peer: key, relay: relay, misses: misses}
	if misses {
		note.relays = lists.relays
	}
	return note
}

// relayNotes contains the notes about leases, by the key of the lease. Most leases have none.
type relayNotes map[string]relayNote

// set replaces the note about a lease, and reports whether it differs from the one before.
func (ns relayNotes) set(lease string, now relayNote) (changed bool) {
	before, had := ns[lease]
	switch {
	case had && before.equal(now), !had && now.equal(relayNote{}):
		return false
	case now.equal(relayNote{}):
		delete(ns, lease)
	default:
		ns[lease] = now
	}
	return true
}

// retain removes the notes about leases for which keep returns false. It reports whether there were
// any.
func (ns relayNotes) retain(keep func(lease string) bool) (changed bool) {
	for lease := range ns {
		if !keep(lease) {
			delete(ns, lease)
			changed = true
		}
	}
	return changed
}

// byPeer returns the notes by the public key of the host.
func (ns relayNotes) byPeer() map[wgtypes.Key]relayNote {
	all := make(map[wgtypes.Key]relayNote, len(ns))
	for _, note := range ns {
		all[note.peer] = note
	}
	return all
}

// agreedRelay returns the relay for the packets between this host and a peer. own is the public key
// of this host, lists is what this host publishes, and peer is the note about the lease of the
// peer. usable reports whether a host can be a relay. ok is false if there is no relay. Both hosts
// find the same relay, because both use the same data: a relay can be chosen only if each host
// publishes that it does not reach the other host, and that it reaches the relay. relayRank gives
// each pair of hosts an order of its own, so that different pairs use different relays.
func agreedRelay(own wgtypes.Key, lists relayLists, peer relayNote, usable func(wgtypes.Key) bool) (relay wgtypes.Key, ok bool) {
	if !peer.misses || !slices.Contains(lists.unreachable, peer.peer) {
		return relay, false
	}
	var first [sha256.Size]byte
	for _, r := range lists.relays {
		if r == own || r == peer.peer || slices.Contains(lists.unreachable, r) || !slices.Contains(peer.relays, r) || !usable(r) {
			continue
		}
		if rank := relayRank(own, peer.peer, r); !ok || bytes.Compare(rank[:], first[:]) < 0 {
			relay, first, ok = r, rank, true
		}
	}
	return relay, ok
}

// relayRank returns the rank of a relay for the packets between the hosts a and b, in either
// direction. The relay with the lowest rank is used.
func relayRank(a, b, relay wgtypes.Key) [sha256.Size]byte {
	if compareKeys(a, b) > 0 {
		a, b = b, a
	}
	return sha256.Sum256(slices.Concat(a[:], b[:], relay[:]))
}
