// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestDifference checks the lines for added, changed and removed values. A value that may be
// secret must not be shown.
func TestDifference(t *testing.T) {
	const old = `{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard","PSK":"swordfish","ListenPort":51820}}`
	for _, tc := range []struct{ name, old, text, want string }{
		{"the same", old, `{"Backend":{"ListenPort":51820,"PSK":"swordfish","Type":"wireguard"},"Network":"10.5.0.0/16"}`, ""},
		{"new", "", old, `+ Backend.ListenPort: 51820; + Backend.PSK: [redacted]; + Backend.Type: "wireguard"; + Network: "10.5.0.0/16"`},
		{"changed", old, strings.Replace(old, "swordfish", "swordtuna", 1), "~ Backend.PSK: [redacted] (was [redacted])"},
		{"removed", old, strings.Replace(old, `"PSK":"swordfish",`, "", 1), "- Backend.PSK: [redacted]"},
		{"in another case", "{}", `{"backend":{"psk":"swordfish","type":"wireguard"}}`, `+ backend.psk: [redacted]; + backend.type: "wireguard"`},
		{"a word", "{}", `{"Backend":{"Type":"udp","Mode":"kernel"},"NextBackend":{"Implementation":"userspace"}}`,
			`+ Backend.Mode: "kernel"; + Backend.Type: "udp"; + NextBackend.Implementation: "userspace"`},
		{"further below", "{}", `{"Backend":{"Keys":{"Type":"swordfish","On":true},"List":["swordfish"]}}`,
			"+ Backend.Keys.On: true; + Backend.Keys.Type: [redacted]; + Backend.List: [redacted]"},
		{"the backend itself", `{"Backend":"swordfish"}`, "{}", "- Backend: [redacted]"},
		{"not JSON", "{" + old, "{}", "- (not JSON): [redacted]"},
		{"outside of the backend", old, strings.Replace(old, "10.5.", "10.6.", 1), `~ Network: "10.6.0.0/16" (was "10.5.0.0/16")`},
	} {
		if diff := cmp.Diff(tc.want, strings.Join(difference([]byte(tc.old), []byte(tc.text)), "; ")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
}

// TestInterruptedInput checks that Ctrl-C ends the wait for input, and does not count as yes.
func TestInterruptedInput(t *testing.T) {
	in, silent := io.Pipe()
	defer silent.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if confirmed(ctx, in) {
		t.Error("an interrupt counts as yes")
	}
	root := newRoot(thisHost())
	root.SetArgs([]string{"config", "validate", "-"})
	root.SetIn(in)
	if err := root.ExecuteContext(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted while reading a configuration: %v", err)
	}
}

func TestConfirmed(t *testing.T) {
	for answer, want := range map[string]bool{"y\n": true, "Yes\n": true, "n\n": false, "\n": false, "": false, "yesterday\n": false} {
		if got := confirmed(t.Context(), strings.NewReader(answer)); got != want {
			t.Errorf("%q: %v, want %v", answer, got, want)
		}
	}
}
