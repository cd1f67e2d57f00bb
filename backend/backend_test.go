// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// TestTryDeviceNamesTheStep expects the error of TryDevice to say whether the creation or the deletion has
// failed.
func TestTryDeviceNamesTheStep(t *testing.T) {
	refused := errors.New("refused")
	for want, fail := range map[string]func(dataplane.Op) bool{
		"create": func(op dataplane.Op) bool { return !op.Delete },
		"delete": func(op dataplane.Op) bool { return op.Delete },
	} {
		kernel := &dataplanetest.Spy{Kernel: dataplanetest.New(), Fail: func(op dataplane.Op) error {
			if fail(op) {
				return refused
			}
			return nil
		}}
		err := backend.Env{Kernel: kernel}.TryDevice(t.Context(), dataplane.Link{Name: "try", Kind: dataplane.KindIPIP})
		if !errors.Is(err, refused) || !strings.HasPrefix(err.Error(), want+" ") {
			t.Errorf("%v, want an error that begins with %q", err, want)
		}
	}
}
