// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/pkg/cloud"
)

// TestInstanceWithoutRole checks that a host names the missing role, and does not wait for the metadata service.
func TestInstanceWithoutRole(t *testing.T) {
	s := open(t)
	bed().ReplaceMetadata(t, s.State, map[string]string{"/security-credentials/": ""})
	err := bed().Backend(t, `{}`).Cloud.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), "the instance has no role: attach one with the policy in "+page) || cloud.Transient(err) {
		t.Errorf("error %v, transient %v, want a lasting one about the role", err, cloud.Transient(err))
	}
}

// TestEndpoint checks the address of EC2. A host that has only IPv6 needs a name that has IPv6 addresses.
func TestEndpoint(t *testing.T) {
	for _, test := range []struct{ address, domain, want string }{
		{"192.168.77.1", "amazonaws.com", "https://ec2.eu-test-1.amazonaws.com"},
		{"fd00:77::1", "amazonaws.com", "https://ec2.eu-test-1.api.aws"},
		{"fd00:77::1", "amazonaws.com.cn", "https://ec2.eu-test-1.api.amazonwebservices.com.cn"},
		{"fd00:77::1", "amazonaws.eu", "https://ec2.eu-test-1.api.amazonwebservices.eu"},
		{"fd00:77::1", "c2s.ic.gov", "https://ec2.eu-test-1.c2s.ic.gov"},
	} {
		s := open(t)
		t.Setenv("AWS_ENDPOINT_URL_EC2", "")
		metadata := ec2test.Metadata(s.Instance("i-1"))
		l, err := net.Listen("tcp", "[::1]:0")
		if err != nil {
			t.Fatal(err)
		}
		server := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // of a test
			if r.URL.Path == "/latest/meta-data/services/domain" {
				_, _ = w.Write([]byte(test.domain))
				return
			}
			metadata.ServeHTTP(w, r)
		})}}
		server.Start()
		t.Cleanup(server.Close)
		t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.URL) // has brackets, as http://[fd00:ec2::254] does
		c, err := connect(t.Context(), []netip.Addr{netip.MustParseAddr(test.address)}, &cloud.Calls{})
		if err != nil {
			t.Fatal(err)
		}
		if c.endpoint != test.want || c.instance != "i-1" {
			t.Errorf("%+v: endpoint %s of instance %s", test, c.endpoint, c.instance)
		}
	}
}
