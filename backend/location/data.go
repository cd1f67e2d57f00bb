// SPDX-License-Identifier: Apache-2.0

package location

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
)

// data is what a host publishes about its location for one family. It is the value of the key
// Location in the backend data. flannel and earlier versions ignore that key.
type data struct {
	Name    string          // of the location
	Type    string          // of the backend inside of the location
	Config  string          // digest of the configuration of that backend
	Address netip.Addr      // address to which hosts of the location send
	Data    json.RawMessage `json:",omitempty"` // for the backend inside of the location
}

// digest identifies a configuration of the backend inside. Two hosts use that backend for each other
// only if they publish the same digest, because hosts do not read a changed configuration at once.
func digest(same backend.Inner) string {
	sum := sha256.Sum256(append([]byte(same.Type+" "), canonical(same.Raw)...))
	return hex.EncodeToString(sum[:4])
}

// canonical returns the same text for all configurations that mean the same. The last known state has
// another text than the store, and the decoder accepts keys in any case and ignores null.
func canonical(raw json.RawMessage) []byte {
	var object map[string]any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	_ = d.Decode(&object) // a configuration may be the type alone, which is not an object
	lower := map[string]any{}
	for _, key := range slices.Sorted(maps.Keys(object)) { // the same key may occur in upper and in lower case
		if object[key] != nil {
			lower[strings.ToLower(key)] = object[key]
		}
	}
	delete(lower, "type")

	text, err := json.Marshal(lower)
	if err != nil { // cannot happen: the value was decoded from JSON
		return raw
	}
	return text
}

// field is the key of data in backend data.
const field = "Location"

// addTo returns a copy of raw, a JSON object, with d as the value of field.
func (d data) addTo(raw json.RawMessage) (json.RawMessage, error) {
	var object map[string]json.RawMessage
	err := json.Unmarshal(raw, &object)
	if err == nil {
		if object[field], err = json.Marshal(d); err == nil {
			raw, err = json.Marshal(object)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("encode the location in backend data: %w", err)
	}
	return raw, nil
}

// decode returns ok false if the host has no location, or none that can be used.
func decode(raw json.RawMessage) (d data, ok bool) {
	if !bytes.Contains(raw, []byte(field)) { // a network may have thousands of hosts without a location
		return data{}, false
	}
	var object struct{ Location data }
	if json.Unmarshal(raw, &object) != nil || subnet.CheckLocation(object.Location.Name) != nil {
		return data{}, false
	}
	return object.Location, true
}
