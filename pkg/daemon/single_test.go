// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"testing"

	"github.com/flanneld/flanneld/pkg/report/status"
)

// TestSingleHasNoNamedNetwork expects the error from which the page /statusz makes a 404.
func TestSingleHasNoNamedNetwork(t *testing.T) {
	if _, err := (single{}).status(t.Context(), status.Query{Network: "blue"}); !errors.Is(err, status.ErrNoNetwork) {
		t.Errorf("got %v, want %v", err, status.ErrNoNetwork)
	}
}
