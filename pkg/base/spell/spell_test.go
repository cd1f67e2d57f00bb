// SPDX-License-Identifier: Apache-2.0

package spell

import "testing"

func TestNearest(t *testing.T) {
	for _, tt := range []struct {
		word       string
		candidates []string
		want       string
		distance   int
	}{
		{"port", []string{"Port", "PORT"}, "Port", 0},
		{"log-backtrace", []string{"log_backtrace"}, "log_backtrace", 0},
		{"prot", []string{"Protocol", "Port"}, "Port", 1},
		{"Prt", []string{"Port"}, "Port", 1},
		{"Poort", []string{"Port"}, "Port", 1},
		{"Pört", []string{"Port"}, "Port", 1},
		{"", []string{"Port", "VNI"}, "VNI", 3},
		{"kitten", []string{"sitting"}, "sitting", 3},
		{"Port", nil, "", 0},
	} {
		if got, distance := Nearest(tt.word, tt.candidates); got != tt.want || distance != tt.distance {
			t.Errorf("nearest to %q of %q: %q at %d, want %q at %d", tt.word, tt.candidates, got, distance, tt.want, tt.distance)
		}
	}
}

func TestMeant(t *testing.T) {
	candidates := []string{"iface", "iface-regex", "log_backtrace_at", "healthz-port", "v"}
	for word, want := range map[string]string{
		"iface":            "iface",
		"ifaec":            "iface",
		"iface_regex":      "iface-regex",
		"log-backtrace-at": "log_backtrace_at",
		"helthz-port":      "healthz-port",
		"kubeconfig":       "",
		"":                 "",
		"port":             "",
		"x":                "",
	} {
		if got, ok := Meant(word, candidates); got != want || ok != (want != "") {
			t.Errorf("meant by %q: %q, %v, want %q", word, got, ok, want)
		}
	}
	if got, ok := Meant("iface", nil); ok {
		t.Errorf("meant without candidates: %q, want none", got)
	}
}
