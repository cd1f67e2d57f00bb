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
	session = "session-of-the-metadata-service"
	role    = "flanneld"
	mac     = "00:16:3e:00:00:01"
)

// Metadata returns the metadata service of an instance. It refuses requests for values without the
// token of a session.
func Metadata(i vpctest.Instance) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /latest/api/token", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-aliyun-ecs-metadata-token-ttl-seconds") == "" {
			http.Error(w, "no time to live", http.StatusBadRequest)
			return
		}
		_, _ = w.Write([]byte(session))
	})

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

	for path, text := range map[string]string{
		"region-id": vpctest.Region, "instance-id": i.ID, "mac": mac, "ram/security-credentials/{$}": role, "ram/security-credentials/" + role: string(keys),
		"network/interfaces/macs/{$}":                       mac + "/",
		"network/interfaces/macs/" + mac + "/private-ipv4s": "[" + strings.Join(four, ",") + "]",
		"network/interfaces/macs/" + mac + "/ipv6s":         "[" + strings.Join(six, ", ") + "]",
		"network/interfaces/macs/" + mac + "/vswitch-id":    i.Subnet,
	} {
		mux.HandleFunc("GET /latest/meta-data/"+path, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Aliyun-Ecs-Metadata-Token") != session {
				http.Error(w, "no session", http.StatusUnauthorized)
				return
			}
			_, _ = w.Write([]byte(text))
		})
	}
	return mux
}
