// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// TestKubeAdmissionPolicy installs the manifests and patches Nodes with the token of a pod of the
// daemon. RBAC permits it to patch the status of all Nodes. The policy must admit what a daemon writes
// to the Node of that pod, and nothing else.
//
//stages:rest it needs kubectl, which takes minutes to build
func TestKubeAdmissionPolicy(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t, lab.Config{Hosts: 2})
	c.tool("kubectl", "apply", "--validate=strict", "-k", repository(t, "dist/kubernetes/base"))
	const strategic = "application/strategic-merge-patch+json"
	patch := func(token string, n int, body string) (int, string) {
		t.Helper()
		status, answer, err := c.tryAs(token, http.MethodPatch, nodesPath+"/"+nodeName(n)+"/status", json.RawMessage(body), strategic)
		if err != nil {
			t.Fatal(err)
		}
		return status, string(answer)
	}
	for n := 1; n <= 2; n++ {
		status, answer := patch(adminToken, n, `{"metadata":{"annotations":{"other":"1","flannel.alpha.coreos.com/public-ip-overwrite":"192.0.2.1"},"labels":{"zone":"a"}},
			"status":{"conditions":[{"type":"Ready","status":"True"}],"addresses":[{"type":"InternalIP","address":"192.0.2.1"}]}}`)
		if status != http.StatusOK {
			t.Fatalf("%d: %s", status, answer)
		}
	}

	token := c.boundToken(1)
	unbound := strings.TrimSpace(c.tool("kubectl", "create", "token", "flannel", "--namespace=kube-flannel"))

	// The API server begins to apply a new policy after a moment.
	const overwrite = `{"metadata":{"annotations":{"flannel.alpha.coreos.com/public-ip-overwrite":"192.0.2.66"}}}`
	eventually(t, "the policy is in force", func() error {
		if status, answer := patch(token, 2, overwrite); status != http.StatusUnprocessableEntity {
			return fmt.Errorf("%d: %s", status, answer)
		}
		return nil
	})

	own := `{"metadata":{"annotations":{"flannel.alpha.coreos.com/public-ip":"192.0.2.1","flannel.alpha.coreos.com/backend-data":"{}",
		"flannel.alpha.coreos.com/kube-subnet-manager":"true"}},"status":{"conditions":[{"type":"NetworkUnavailable","status":"False"}]}}`
	for name, tc := range map[string]struct {
		token   string
		node    int
		body    string
		refused string // part of the reason; empty: admitted
	}{
		"what a daemon writes":        {token, 1, own, ""},
		"the same to another Node":    {token, 2, own, "only the Node that it runs on: node1"},
		"a token that names no Node":  {unbound, 1, own, "only the Node that it runs on"},
		"an annotation for operators": {token, 1, overwrite, "only these annotations: flannel.alpha.coreos.com/kube-subnet-manager, "},
		"another annotation":          {token, 1, `{"metadata":{"annotations":{"other":"2"}}}`, "only these annotations"},
		"another annotation removed":  {token, 1, `{"metadata":{"annotations":{"other":null}}}`, "only these annotations"},
		"a new label":                 {token, 1, `{"metadata":{"labels":{"node-restriction.kubernetes.io/location":"b"}}}`, "no labels"},
		"a changed label":             {token, 1, `{"metadata":{"labels":{"zone":"b"}}}`, "no labels"},
		"a finalizer":                 {token, 1, `{"metadata":{"finalizers":["example.org/stay"]}}`, "no labels, finalizers"},
		"another condition":           {token, 1, `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`, "only the condition NetworkUnavailable"},
		"an address":                  {token, 1, `{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.66"}]}}`, "only the conditions in the status"},
		"capacity":                    {token, 1, `{"status":{"capacity":{"example.org/gpu":"4"}}}`, "only the conditions in the status"},
		"an administrator":            {adminToken, 2, overwrite, ""},
	} {
		t.Run(name, func(t *testing.T) {
			status, answer := patch(tc.token, tc.node, tc.body)
			switch {
			case tc.refused == "" && status != http.StatusOK:
				t.Errorf("%d, want it admitted: %s", status, answer)
			case tc.refused != "" && (status != http.StatusUnprocessableEntity || !strings.Contains(answer, tc.refused)):
				t.Errorf("%d, want it refused with %q: %s", status, tc.refused, answer)
			}
		})
	}
}
