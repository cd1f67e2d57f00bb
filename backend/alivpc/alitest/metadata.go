// SPDX-License-Identifier: Apache-2.0

package alitest

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

const (
	role = "flanneld"
	mac  = "00:16:3e:00:00:01"
)

// Metadata returns the metadata service of an instance. It refuses requests for values without the
// token of a session.
func Metadata(i vpctest.Instance) http.Handler {
	keys, _ := json.Marshal(map[string]string{ //nolint:errchkjson // strings
		"Code": "Success", "AccessKeyId": vpctest.KeyID, "AccessKeySecret": vpctest.Secret, "SecurityToken": vpctest.Token,
		"Expiration": time.Now().Add(6 * time.Hour).UTC().Format(time.RFC3339), "LastUpdated": time.Now().UTC().Format(time.RFC3339),
	})

	var four, six []string
	for _, a := range i.Addresses {
		if a.Is4() {
			four = append(four, `"`+a.String()+`"`)
		} else {
			six = append(six, a.String())
		}
	}

	return vpctest.Metadata("X-Aliyun-Ecs-Metadata-Token", map[string]string{
		"region-id": vpctest.Region, "instance-id": i.ID, "mac": mac, "ram/security-credentials/{$}": role, "ram/security-credentials/" + role: string(keys),
		"network/interfaces/macs/{$}":                       mac + "/",
		"network/interfaces/macs/" + mac + "/private-ipv4s": "[" + strings.Join(four, ",") + "]",
		"network/interfaces/macs/" + mac + "/ipv6s":         "[" + strings.Join(six, ", ") + "]",
		"network/interfaces/macs/" + mac + "/vswitch-id":    i.Subnet,
	})
}
