// SPDX-License-Identifier: Apache-2.0

// Package acs3 signs calls of Alibaba Cloud with ACS3-HMAC-SHA256.
package acs3

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/access"
)

const algorithm = "ACS3-HMAC-SHA256"

// Call contains the parts of a signed call that are not in the request.
type Call struct {
	Action, Version string
	Time            time.Time
	Nonce           string // differs in each call
}

// Sign signs a request, and adds the headers of the call and the signature. The request must have the path /,
// its parameters in the URL, and no body.
func Sign(req *http.Request, keys access.Keys, c Call) {
	req.URL.RawQuery = query(req.URL.Query())
	signed := map[string]string{
		"host": req.URL.Host, "x-acs-action": c.Action, "x-acs-version": c.Version,
		"x-acs-date": c.Time.UTC().Format(time.RFC3339), "x-acs-signature-nonce": c.Nonce, "x-acs-content-sha256": sum(""),
	}
	if keys.Token != "" {
		signed["x-acs-security-token"] = keys.Token
	}

	names := slices.Sorted(maps.Keys(signed))
	var headers strings.Builder
	for _, name := range names {
		headers.WriteString(name + ":" + strings.TrimSpace(signed[name]) + "\n")
		if name != "host" {
			req.Header.Set(name, signed[name])
		}
	}

	list := strings.Join(names, ";")
	canonical := strings.Join([]string{req.Method, "/", req.URL.RawQuery, headers.String(), list, sum("")}, "\n")
	mac := hmac.New(sha256.New, []byte(keys.Secret))
	mac.Write([]byte(algorithm + "\n" + sum(canonical)))
	req.Header.Set("Authorization", algorithm+" Credential="+keys.ID+",SignedHeaders="+list+",Signature="+hex.EncodeToString(mac.Sum(nil)))
}

// query sorts the parameters, and escapes them as in RFC 3986.
func query(params url.Values) string {
	return strings.NewReplacer("+", "%20", "*", "%2A", "%7E", "~").Replace(params.Encode())
}

func sum(text string) string {
	s := sha256.Sum256([]byte(text))
	return hex.EncodeToString(s[:])
}
