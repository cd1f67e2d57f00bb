// SPDX-License-Identifier: Apache-2.0

package prefix_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
)

func TestMerge(t *testing.T) {
	for _, tc := range []struct{ all, want string }{
		{"", "[]"},
		{"10.5.0.0/16", "[10.5.0.0/16]"},
		{"10.5.0.0/16 10.4.0.0/16", "[10.4.0.0/15]"},
		{"10.5.0.0/16 10.6.0.0/16", "[10.5.0.0/16 10.6.0.0/16]"}, // neighbours, but not halves of one prefix
		{"10.4.0.0/16 10.5.0.0/16 10.6.0.0/16 10.7.0.0/16", "[10.4.0.0/14]"},
		{"10.4.0.0/16 10.5.0.0/16 10.6.0.0/15", "[10.4.0.0/14]"},
		{"10.5.7.0/24 10.5.0.0/16 10.5.0.0/16", "[10.5.0.0/16]"},
		{"10.4.0.0/16 10.4.7.0/24 10.5.0.0/16", "[10.4.0.0/15]"},
		{"0.0.0.0/1 128.0.0.0/1", "[0.0.0.0/0]"},
		{"10.5.0.0/16 fd00:5::/32 fd00:4::/32 ::/0", "[10.5.0.0/16 ::/0]"},
		{"fd00:5::/32 fd00:4::/32 0.0.0.0/0", "[0.0.0.0/0 fd00:4::/31]"},
		{"10.5.7.1/16", "[10.5.0.0/16]"},
	} {
		if got := fmt.Sprint(prefix.Merge(prefixtest.Parse(strings.Fields(tc.all)...))); got != tc.want {
			t.Errorf("Merge(%s) = %s, want %s", tc.all, got, tc.want)
		}
	}
}
