package vxlan

import (
	"encoding/json"
	"errors"
	"fmt"

	"flanneld/pkg/dataplane"
)

// leaseData is a lease's backend data in one family, in the form that flannel
// gives it. Older peers leave VNI out; receivers never use it.
type leaseData struct {
	VNI     int
	VtepMAC string
}

func encodeData(vni int, mac dataplane.MAC) (json.RawMessage, error) {
	raw, err := json.Marshal(leaseData{VNI: vni, VtepMAC: mac.String()})
	if err != nil {
		return nil, fmt.Errorf("encode backend data: %w", err)
	}
	return raw, nil
}

// vtepMAC returns the MAC in a lease's backend data.
func vtepMAC(raw json.RawMessage) (dataplane.MAC, error) {
	if len(raw) == 0 {
		return dataplane.MAC{}, errors.New("no backend data, want a VtepMAC")
	}
	var d leaseData
	if err := json.Unmarshal(raw, &d); err != nil {
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
