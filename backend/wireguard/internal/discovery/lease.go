// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bytes"
	"encoding/json"
	"net/netip"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// A lease has at most maxShared shared endpoints of each family, in a JSON object of at most
// maxSharedSize bytes. A larger object is ignored.
const (
	maxShared     = 32
	maxSharedSize = 4 << 10
)

// Of identifies a shared endpoint in a lease, which has at most one for each peer and family.
type Of struct {
	Peer   wgtypes.Key
	Family prefix.Family
}

// Endpoints are the endpoints at which a host sees peers that are behind NAT. The host publishes them
// in its lease, so that other hosts can try them.
type Endpoints map[Of]netip.AddrPort

// Encode returns the JSON object with the endpoints of family f, or nil if there are none.
func (s Endpoints) Encode(f prefix.Family) json.RawMessage {
	texts := map[string]string{}
	for of, endpoint := range s {
		if of.Family == f {
			texts[of.Peer.String()] = endpoint.String()
		}
	}
	if len(texts) == 0 {
		return nil
	}

	raw, _ := json.Marshal(texts) // sorted by key, so that equal endpoints have equal texts; texts always encode
	return raw
}

// SharedIn returns the endpoints in the key PeerEndpoints of the backend data of lease l. Another host has
// written them. So SharedIn skips an endpoint that Encode would not write, and an endpoint for whose
// address usable returns false. If there are more than maxShared endpoints of a family, or their object is
// too large, it skips all of them.
func SharedIn(l subnet.Lease, usable func(netip.Addr) bool) Endpoints {
	shared := Endpoints{}
	for _, e := range l.Endpoints {
		f := prefix.FamilyOf(e.PublicIP)
		for peer, text := range decode(e.Data) {
			key, _ := wgtypes.ParseKey(peer) // another text with an error
			endpoint, err := netip.ParseAddrPort(text)
			if err == nil && key.String() == peer && endpoint.String() == text && endpoint.Port() != 0 && prefix.FamilyOf(endpoint.Addr()) == f && usable(endpoint.Addr()) {
				shared[Of{key, f}] = endpoint
			}
		}
	}
	return shared
}

func decode(raw json.RawMessage) map[string]string {
	if !bytes.Contains(raw, []byte("PeerEndpoints")) { // as in nearly all leases
		return nil
	}
	var d struct{ PeerEndpoints json.RawMessage }
	var texts map[string]string
	if json.Unmarshal(raw, &d) != nil || len(d.PeerEndpoints) > maxSharedSize || json.Unmarshal(d.PeerEndpoints, &texts) != nil || len(texts) > maxShared {
		return nil
	}
	return texts
}
