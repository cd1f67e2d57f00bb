// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestRefusalOfAProxy expects the message of a refusal whose other fields are not those of a Status.
func TestRefusalOfAProxy(t *testing.T) {
	c := &client{host: "api"}
	for _, body := range []string{`{"status":503,"message":"no backend"}`, `{"code":"503","message":"no backend"}`, `{"message":"no backend","details":"x"}`, `{"message":"no backend","metadata":[]}`, `{"message":"no backend"}`} {
		err := c.refusal(&http.Response{StatusCode: 503, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))})
		if !strings.Contains(err.Error(), "503 no backend") {
			t.Errorf("%s: %v", body, err)
		}
	}
}
