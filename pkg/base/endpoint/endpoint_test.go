// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	label := strings.Repeat("a", 63)
	longest := strings.Join([]string{label, label, label, strings.Repeat("a", 61)}, ".")
	for text, want := range map[string]Named{
		"node7.example.org":       {"node7.example.org", 0},
		"node7.example.org:51820": {"node7.example.org", 51820},
		"Node_7":                  {"Node_7", 0},
		"7.node":                  {"7.node", 0},
		"203.0.113.7:4500":        {"203.0.113.7", 4500},
		"2001:db8::7":             {"2001:db8::7", 0},
		"[2001:db8::7]:65535":     {"2001:db8::7", 65535},
		longest + ":1":            {longest, 1},
	} {
		got, err := Parse(text)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, want)
		}
		if again, err := Parse(got.String()); err != nil || again != got {
			t.Errorf("%q: its text %q gives %+v, %v", text, got.String(), again, err)
		}
	}
	for _, text := range []string{
		"", ":1", "node:", "node:0", "node:65536", "node:-1", "node:http", "node:1:2", "no de", "node..org", ".org", "org.",
		"-node", "node-", "node/x", "http://node", "user@node", "nöde", "node\n", "203.0.113", "203.0.113.700", "0x7f", "7",
		"fe80::1%eth0", "[fe80::1%eth0]:1", "::ffff:203.0.113.7", "[node]", label + "a", longest + "a", strings.Repeat("a.", 1000),
	} {
		if got, err := Parse(text); err == nil || !got.IsZero() {
			t.Errorf("%q: %+v, %v, want an error", text, got, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("node7.example.org:51820")
	f.Fuzz(func(t *testing.T, text string) {
		n, err := Parse(text)
		if err != nil {
			return
		}
		if again, err := Parse(n.String()); err != nil || again != n || len(n.Host) > maxName || strings.ContainsAny(n.Host, " /@%\n") {
			t.Errorf("%q gives %+v, and its text %+v, %v", text, n, again, err)
		}
	})
}
