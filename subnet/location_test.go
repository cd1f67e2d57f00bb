// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"strings"
	"testing"
)

func TestCheckLocation(t *testing.T) {
	for name, ok := range map[string]bool{
		"a": true, "7": true, "fra1": true, "eu-central-1a": true, "Rack_7.West": true, strings.Repeat("a", 63): true,
		"": false, "-a": false, "a-": false, ".": false, "a b": false, "a\n": false, "a\x00b": false, "zürich": false, "a/b": false,
		`a"b`: false, strings.Repeat("a", 64): false,
	} {
		if err := CheckLocation(name); (err == nil) != ok {
			t.Errorf("CheckLocation(%q) = %v, want an error: %v", name, err, !ok)
		}
	}
}
