// SPDX-License-Identifier: Apache-2.0

// Package tc3 signs calls of Tencent Cloud with TC3-HMAC-SHA256.
package tc3

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/access"
)

const (
	algorithm = "TC3-HMAC-SHA256"
	list      = "content-type;host"
	end       = "tc3_request"
)

// Call contains the parts of a signed call that Sign does not take from the request.
type Call struct {
	Service string // such as vpc
	Time    time.Time
	Body    []byte
}

// Sign signs a POST request, and adds the headers of the signature. The request must have a Content-Type
// header, the path /, and no parameters in the URL.
func Sign(req *http.Request, keys access.Keys, c Call) {
	date := c.Time.UTC().Format(time.DateOnly)
	stamp := strconv.FormatInt(c.Time.Unix(), 10)
	scope := strings.Join([]string{date, c.Service, end}, "/")
	headers := "content-type:" + strings.ToLower(req.Header.Get("Content-Type")) + "\nhost:" + strings.ToLower(req.URL.Host) + "\n"
	canonical := strings.Join([]string{http.MethodPost, "/", "", headers, list, sum(c.Body)}, "\n")

	key := []byte("TC3" + keys.Secret)
	for _, part := range []string{date, c.Service, end} {
		key = mac(key, part)
	}
	signature := mac(key, strings.Join([]string{algorithm, stamp, scope, sum([]byte(canonical))}, "\n"))

	req.Header.Set("X-TC-Timestamp", stamp)
	if keys.Token != "" {
		req.Header.Set("X-TC-Token", keys.Token)
	}
	req.Header.Set("Authorization", algorithm+" Credential="+keys.ID+"/"+scope+", SignedHeaders="+list+", Signature="+hex.EncodeToString(signature))
}

func sum(text []byte) string {
	s := sha256.Sum256(text)
	return hex.EncodeToString(s[:])
}

func mac(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}
