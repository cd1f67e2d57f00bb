// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"encoding/json"
	"slices"

	"github.com/flanneld/flanneld/subnet"
)

// Identities returns what only one host of a network may have: the VTEP MACs and public keys in the
// backend data of these endpoints.
func Identities(es []subnet.Endpoint) []string {
	var ids []string
	for _, e := range es {
		for _, raw := range []json.RawMessage{e.Data, e.NextData} {
			var data any
			if json.Unmarshal(raw, &data) == nil {
				ids = appendIdentities(ids, data)
			}
		}
	}
	return ids
}

// HasIdentity reports whether the backend data of these endpoints has one of ids. It decodes only data
// that can have one, because at a start a host asks this about each of thousands of leases.
func HasIdentity(es []subnet.Endpoint, ids []string) bool {
	mayHave := func(raw json.RawMessage) bool {
		// JSON can write each character of an identity as an escape sequence.
		return bytes.IndexByte(raw, '\\') >= 0 || slices.ContainsFunc(ids, func(id string) bool { return bytes.Contains(raw, []byte(id)) })
	}

	return slices.ContainsFunc(es, func(e subnet.Endpoint) bool { return mayHave(e.Data) || mayHave(e.NextData) }) &&
		slices.ContainsFunc(Identities(es), func(id string) bool { return slices.Contains(ids, id) })
}

// appendIdentities also finds identities in objects inside of data, such as that of a tunnel in
// the data of a cloud. It ignores lists, because wireguard lists the keys of other hosts.
func appendIdentities(ids []string, data any) []string {
	fields, _ := data.(map[string]any)
	for name, value := range fields {
		id, text := value.(string)
		switch {
		case name != "VtepMAC" && name != "PublicKey":
			ids = appendIdentities(ids, value)
		case text && id != "" && !slices.Contains(ids, id):
			ids = append(ids, id)
		}
	}
	return ids
}
