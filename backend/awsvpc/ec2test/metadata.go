// SPDX-License-Identifier: Apache-2.0

package ec2test

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

const (
	metadataToken = "token-of-the-metadata-service"
	role          = "flanneld"
)

// Metadata returns the metadata service of an instance. It refuses requests without a token.
func Metadata(i vpctest.Instance) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /latest/api/token", func(w http.ResponseWriter, r *http.Request) {
		ttl := r.Header.Get("X-Aws-Ec2-Metadata-Token-Ttl-Seconds")
		if ttl == "" {
			http.Error(w, "no time to live", http.StatusBadRequest)
			return
		}
		w.Header().Set("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", ttl)
		_, _ = w.Write([]byte(metadataToken))
	})

	serve := func(path string, text []byte) {
		mux.HandleFunc("GET /latest/meta-data/"+path, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Aws-Ec2-Metadata-Token") != metadataToken {
				http.Error(w, "no token", http.StatusUnauthorized)
				return
			}
			_, _ = w.Write(text)
		})
	}

	serve("placement/region", []byte(vpctest.Region))
	serve("instance-id", []byte(i.ID))
	serve("services/domain", []byte("amazonaws.com"))
	serve("iam/security-credentials/{$}", []byte(role))
	serve("iam/security-credentials/"+role, Keys())
	return mux
}

// Keys returns the keys of the role of every instance, in the form of the metadata service and of the agents that give
// containers a role.
func Keys() []byte {
	text, _ := json.Marshal(map[string]string{ //nolint:errchkjson // strings
		"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": vpctest.KeyID, "SecretAccessKey": vpctest.Secret, "Token": vpctest.Token,
		"Expiration": time.Now().Add(6 * time.Hour).UTC().Format(time.RFC3339),
	})
	return text
}
