// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

// TestReadStreams checks what the messages of a server mean. The server closes the connection after the last one.
func TestReadStreams(t *testing.T) {
	const (
		limit   = 70000
		success = "\x03" + `{"status":"Success"}`
	)
	long := strings.Repeat("y", 66000)
	for _, tc := range []struct {
		name        string
		messages    []string
		output, err string
	}{
		{"output", []string{"\x01ab", "\x01c", success}, "abc", ""},
		{"an empty message, errors, and an unknown stream", []string{"\x01ab", "", "\x02no", "\x07x", success}, "ab", ""},
		{"after the outcome", []string{"\x01ab", success, "\x01c"}, "ab", ""},
		{"failure", []string{"\x01ab", "\x02no", "\x03" + `{"status":"Failure","message":"m\n"}`}, "ab", "m : no"},
		{"no outcome", []string{"\x03x"}, "", "decode the outcome"},
		{"closed", []string{"\x01ab", "\x02no"}, "ab", "has ended before the command: "},
		{"too much", []string{"\x01" + long, "\x01" + long, success}, long, "more than 70000 bytes"},
		{"too much in one message", []string{"\x01a", "\x01" + long + long, success}, "a", "has ended before the command: "},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			conn, err := websocket.Accept(w, r, nil)
			if err != nil {
				t.Error(err)
				return
			}
			for _, m := range tc.messages {
				_ = conn.Write(r.Context(), websocket.MessageBinary, []byte(m)) // the client may have ended
			}
			_ = conn.Close(websocket.StatusNormalClosure, "")
		}))
		conn, _, err := websocket.Dial(t.Context(), server.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		conn.SetReadLimit(limit)
		output, err := readStreams(t.Context(), conn, limit)
		if string(output) != tc.output || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %.20q of %d bytes, %v; want %.20q, %q", tc.name, output, len(output), err, tc.output, tc.err)
		}
		_ = conn.CloseNow()
		server.Close()
	}
}

// TestExecWithAnOlderServer checks that servers that know only the fourth version of the protocol, which are those
// before Kubernetes 1.30, run commands too.
func TestExecWithAnOlderServer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/exec") {
			_, _ = w.Write([]byte(`{"items":[]}`))
			return
		}
		conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"v4.channel.k8s.io"}})
		if err != nil {
			t.Error(err)
			return
		}
		for _, m := range []string{"\x01" + conn.Subprotocol() + strings.Join(r.URL.Query()["command"], " "), "\x03" + `{"status":"Success"}`} {
			_ = conn.Write(r.Context(), websocket.MessageBinary, []byte(m)) // the client may have ended
		}
		_ = conn.Close(websocket.StatusNormalClosure, "")
	}))
	defer server.Close()
	d, err := FindDaemons(t.Context(), Config{APIURL: server.URL}, "net", "app=flannel")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	output, err := d.Exec(t.Context(), "pod", "container", 1000, "echo", "a")
	if want := "v4.channel.k8s.ioecho a"; err != nil || string(output) != want {
		t.Errorf("%q, %v, want %q", output, err, want)
	}
}
