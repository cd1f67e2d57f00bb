// SPDX-License-Identifier: Apache-2.0

package cloudtest

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// Serve starts a server that ends with the test, and returns its URL.
func Serve(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.URL
}
