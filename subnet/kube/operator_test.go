// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const twoContexts = `{"apiVersion":"v1","kind":"Config","current-context":"one",
"clusters":[{"name":"one","cluster":{"server":"https://192.0.2.1"}},{"name":"two","cluster":{"server":"https://192.0.2.2"}}],
"users":[{"name":"u","user":{"token":"secret"}}],
"contexts":[{"name":"one","context":{"cluster":"one","user":"u"}},{"name":"two","context":{"cluster":"two","user":"u"}}]}`

// TestOperatorConfig checks that programs of operators find the API server like kubectl.
func TestOperatorConfig(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	if err := os.Mkdir(filepath.Join(dir, ".kube"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", "")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	file := filepath.Join(dir, "file")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(file, twoContexts)
	expect := func(cfg Config, host, token string) {
		t.Helper()
		cfg.operator = true
		rc, err := restConfig(cfg)
		if err != nil || rc.Host != host || rc.BearerToken != token {
			t.Errorf("%+v: %+v, %v, want %s", cfg, rc, err, host)
		}
	}
	expectError := func(cfg Config, want string) {
		t.Helper()
		cfg.operator = true
		if _, err := restConfig(cfg); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%+v: %v, want %q", cfg, err, want)
		}
	}

	expectError(Config{}, "no API server is known: there is no kubeconfig in "+homeConfig())
	expect(Config{Kubeconfig: file}, "https://192.0.2.1", "secret")
	expect(Config{Kubeconfig: file, Context: "two"}, "https://192.0.2.2", "secret")
	expect(Config{Kubeconfig: file, APIURL: "https://192.0.2.3"}, "https://192.0.2.3", "secret")
	expectError(Config{Kubeconfig: file, Context: "three"}, `context "three" does not exist`)

	write(homeConfig(), twoContexts)
	expect(Config{}, "https://192.0.2.1", "secret")
	expect(Config{Context: "two"}, "https://192.0.2.2", "secret")
	expect(Config{APIURL: "https://192.0.2.3"}, "https://192.0.2.3", "") // the token is for another server

	// The first file that sets a value counts, as with kubectl.
	other := filepath.Join(dir, "other")
	write(other, strings.Replace(twoContexts, `"current-context":"one"`, `"current-context":"two"`, 1))
	t.Setenv("KUBECONFIG", other+":"+file)
	expect(Config{}, "https://192.0.2.2", "secret")
}

// TestMissingRights checks that the rights are named that the API server does not grant.
func TestMissingRights(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review map[string]any
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil || r.Method != http.MethodPost || r.URL.Path != "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" {
			t.Errorf("%s %s: %v", r.Method, r.URL.Path, err)
		}
		attributes, _ := review["spec"].(map[string]any)["resourceAttributes"].(map[string]any)
		review["status"] = map[string]any{"allowed": attributes["verb"] == "list" && attributes["resource"] == "nodes"}
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(review)
	}))
	defer server.Close()
	missing, err := Missing(t.Context(), Config{APIURL: server.URL})
	if want := []string{"watch nodes", "patch nodes/status"}; err != nil || !slices.Equal(missing, want) {
		t.Errorf("%q, %v, want %q", missing, err, want)
	}
}
