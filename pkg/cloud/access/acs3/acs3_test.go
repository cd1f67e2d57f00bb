// SPDX-License-Identifier: Apache-2.0

package acs3

import (
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/access"
)

// TestPublishedExample signs the example in Alibaba Cloud's description of the algorithm, and expects the
// signature from there.
func TestPublishedExample(t *testing.T) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
		"https://ecs.cn-shanghai.aliyuncs.com/?RegionId=cn-shanghai&ImageId=win2019_1809_x64_dtc_zh-cn_40G_alibase_20230811.vhd", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	Sign(req, access.Keys{ID: "YourAccessKeyId", Secret: "YourAccessKeySecret"}, Call{
		Action: "RunInstances", Version: "2014-05-26", Time: time.Date(2023, 10, 26, 10, 22, 32, 0, time.UTC), Nonce: "3156853299f313e23d1673dc12e1703d",
	})
	const want = "ACS3-HMAC-SHA256 Credential=YourAccessKeyId,SignedHeaders=host;x-acs-action;x-acs-content-sha256;x-acs-date;x-acs-signature-nonce;x-acs-version," +
		"Signature=06563a9e1b43f5dfe96b81484da74bceab24a1d853912eee15083a6f0f3283c0"
	if got := req.Header.Get("Authorization"); got != want {
		t.Errorf("have %s, want %s", got, want)
	}
}

func TestQuery(t *testing.T) {
	for _, test := range []struct {
		params url.Values
		want   string
	}{
		{url.Values{}, ""},
		{url.Values{"b": {"2"}, "a": {"1"}}, "a=1&b=2"},
		{url.Values{"Dst": {"10.5.0.0/16"}, "Ids": {`["i-1","i-2"]`}}, "Dst=10.5.0.0%2F16&Ids=%5B%22i-1%22%2C%22i-2%22%5D"},
		{url.Values{"a": {"x y*~+"}}, "a=x%20y%2A~%2B"},
	} {
		if got := query(test.params); got != test.want {
			t.Errorf("%v: have %s, want %s", test.params, got, test.want)
		}
	}
}
