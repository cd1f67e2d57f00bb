// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/json"
	"errors"
	"fmt"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
)

// leaseData is a lease's backend data for one family: the JSON object of upstream flannel's
// wireguardLeaseAttrs (pkg/backend/wireguard), and further fields. Older peers leave out the port,
// and listen on the configured one.
type leaseData struct {
	PublicKey string
	Port      int
	// flannel does not know the fields below, and ignores them.

	// PublicEndpoint is a name of the host, with an optional port. See endpoint.Named.
	PublicEndpoint string `json:",omitempty"`
	// PeerEndpoints has the endpoints at which the host sees peers behind NAT, by public key. See
	// sharedEndpoints.
	PeerEndpoints json.RawMessage `json:",omitempty"`
}

func encodeData(d leaseData) json.RawMessage {
	raw, _ := json.Marshal(d) // fails only if PeerEndpoints is not JSON
	return raw
}

// peerData is what the backend data of a peer says about one family.
type peerData struct {
	key  wgtypes.Key
	port int            // 0 if the data contains none
	name endpoint.Named // zero if the data contains no PublicEndpoint, or an invalid one
}

func decodeData(raw json.RawMessage) (p peerData, err error) {
	if len(raw) == 0 {
		return p, errors.New("no backend data, want a PublicKey")
	}

	var d leaseData
	if err := json.Unmarshal(raw, &d); err != nil {
		return p, fmt.Errorf("backend data: %w", err)
	}
	if d.PublicKey == "" {
		return p, errors.New("backend data without a PublicKey")
	}
	if p.key, err = wgtypes.ParseKey(d.PublicKey); err != nil || p.key == (wgtypes.Key{}) {
		return p, fmt.Errorf("PublicKey %.60q is no key: want 32 bytes in base64", d.PublicKey)
	}
	if d.Port < 0 || d.Port > 65535 {
		return p, fmt.Errorf("port %d: want 0 to 65535", d.Port)
	}
	p.port = d.Port
	p.name, _ = endpoint.Parse(d.PublicEndpoint) // zero with an error
	return p, nil
}
