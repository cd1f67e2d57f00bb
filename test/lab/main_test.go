// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/flanneld/flanneld/test/lab"
)

func TestMain(m *testing.M) {
	lab.RunChild()
	runTestChild()
	goleak.VerifyTestMain(m)
}
