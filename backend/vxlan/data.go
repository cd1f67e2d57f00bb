// SPDX-License-Identifier: Apache-2.0

package vxlan

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/flanneld/flanneld/pkg/base/plainjson"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// leaseData is a lease's backend data for one family: the JSON object of flannel's
// vxlanLeaseAttrs (pkg/backend/vxlan). Older peers leave out VNI, which is then 0. Only
// Matches uses VNI.
type leaseData struct {
	VNI     int
	VtepMAC string
}

func encodeData(vni int, mac dataplane.MAC) json.RawMessage {
	raw, _ := json.Marshal(leaseData{VNI: vni, VtepMAC: mac.String()}) // a number and a text always encode
	return raw
}

func decodeData(raw json.RawMessage) (leaseData, error) {
	if d, plain := decodePlain(raw); plain {
		return d, nil
	}

	// In a variable of its own: encoding/json moves it to the heap, even if it is not reached.
	var d leaseData
	err := json.Unmarshal(raw, &d)
	return d, err
}

// decodePlain decodes data in the form that flannel writes, at a fraction of the cost of
// encoding/json. ok is false for any other form.
func decodePlain(raw json.RawMessage) (d leaseData, ok bool) {
	ok = plainjson.Object(raw, func(key, value []byte) bool {
		switch string(key) {
		case "VNI":
			if !plainjson.IsNumber(value) || d.VNI != 0 {
				return false
			}
			var err error
			d.VNI, err = strconv.Atoi(string(value))
			return err == nil

		case "VtepMAC":
			text, ok := plainjson.Text(value)
			if !ok || d.VtepMAC != "" { // encoding/json takes the last of duplicate keys
				return false
			}
			d.VtepMAC = string(text)
			return true
		}
		return false // encoding/json also accepts keys in another case
	})
	return d, ok
}

// vtepMAC requires a unicast address.
func vtepMAC(raw json.RawMessage) (dataplane.MAC, error) {
	if len(raw) == 0 {
		return dataplane.MAC{}, errors.New("no backend data, want a VtepMAC")
	}

	d, err := decodeData(raw)
	if err != nil {
		return dataplane.MAC{}, fmt.Errorf("backend data: %w", err)
	}
	if d.VtepMAC == "" {
		return dataplane.MAC{}, errors.New("backend data without a VtepMAC")
	}

	mac, err := dataplane.ParseMAC(d.VtepMAC)
	if err != nil {
		return mac, fmt.Errorf("VtepMAC: %w", err)
	}
	if !mac.IsUnicast() {
		return mac, fmt.Errorf("VtepMAC %s is not a unicast address", mac)
	}
	return mac, nil
}
