// SPDX-License-Identifier: Apache-2.0

package tc3

import (
	"net/http"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/access"
)

// TestPublishedExample signs the example in Tencent Cloud's description of the algorithm, and expects the
// signature from there.
func TestPublishedExample(t *testing.T) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://cvm.tencentcloudapi.com/", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json; charset=utf-8")
	keys := access.Keys{ID: "AKIDz8krbsJ5yKBZQpn74WFkmLPx3EXAMPLE", Secret: "Gu5t9xGARNpq86cd98joQYCN3EXAMPLE"} //nolint:gosec // published
	Sign(req, keys, Call{
		Service: "cvm", Time: time.Unix(1551113065, 0), Body: []byte(`{"Limit": 1, "Filters": [{"Values": ["\u672a\u547d\u540d"], "Name": "instance-name"}]}`),
	})
	const want = "TC3-HMAC-SHA256 Credential=AKIDz8krbsJ5yKBZQpn74WFkmLPx3EXAMPLE/2019-02-25/cvm/tc3_request, SignedHeaders=content-type;host, " +
		"Signature=72e494ea809ad7a8c8f7a4507b9bddcbaa8e581f516e8da2f66e2c5a96525168"
	if got := req.Header.Get("Authorization"); got != want {
		t.Errorf("have %s, want %s", got, want)
	}
	if got := req.Header.Get("X-Tc-Timestamp"); got != "1551113065" || req.Header.Get("X-Tc-Token") != "" {
		t.Errorf("the time is %q, want that of the call, and no token", got)
	}
}
