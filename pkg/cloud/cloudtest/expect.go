// SPDX-License-Identifier: Apache-2.0

package cloudtest

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/cloud"
)

// Serve starts a server that ends with the test, and returns its URL.
func Serve(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.URL
}

// CheckFails expects that Check of a cloud returns an error that contains text. transient is the expected
// result of cloud.Transient. name is the name of the case, for messages.
func CheckFails(t *testing.T, name string, c cloud.Cloud, text string, transient bool) {
	t.Helper()
	err := c.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), text) || cloud.Transient(err) != transient {
		t.Errorf("%s: error %v, transient %v, want %q, %v", name, err, cloud.Transient(err), text, transient)
	}
}

// Routes returns the routes of a cloud. It fails the test unless the cloud has one table.
func Routes(t *testing.T, c cloud.Cloud) []cloud.Route {
	t.Helper()
	tables, err := c.Tables(t.Context())
	if err != nil || len(tables) != 1 {
		t.Fatalf("%d tables, error %v", len(tables), err)
	}
	return tables[0].Routes
}

// Lacks expects that Check of a cloud returns a MissingError with exactly these permissions. name is the name of
// the case, for messages.
func Lacks(t *testing.T, name string, c cloud.Cloud, permissions ...string) {
	t.Helper()
	err := c.Check(t.Context())
	if missing, ok := errors.AsType[*cloud.MissingError](err); !ok || !slices.Equal(missing.Permissions, permissions) {
		t.Errorf("%s: error %v, want the permissions %q named", name, err, permissions)
	}
}
