// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"fmt"
	"os"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

func TestMain(m *testing.M) {
	lab.RunChild()
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make network namespaces: run them as root")
		os.Exit(1)
	}
	os.Exit(m.Run())
}
