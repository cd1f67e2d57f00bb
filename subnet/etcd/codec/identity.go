// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"encoding/json"
	"slices"

	"github.com/flanneld/flanneld/subnet"
)

// Identities returns what only one host of a network may have: the VTEP MACs and public keys in the
// backend data of these endpoints.
func Identities(es []subnet.Endpoint) []string {
	var ids []string
	for _, e := range es {
		ids = appendIdentities(ids, e.Data)
		ids = appendIdentities(ids, e.NextData)
	}
	return ids
}

// appendIdentities also finds identities in objects inside of raw, such as the data of a tunnel in
// the data of a cloud. It ignores lists, because wireguard lists the keys of other hosts.
func appendIdentities(ids []string, raw json.RawMessage) []string {
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return ids
	}
	for name, value := range fields {
		if name != "VtepMAC" && name != "PublicKey" {
			ids = appendIdentities(ids, value)
			continue
		}
		var id string
		if json.Unmarshal(value, &id) == nil && id != "" && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}
