// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"strings"
	"testing"
)

// TestReadStreams checks what the frames of a server mean. The test of flannelctl sysdump cluster has a real WebSocket.
func TestReadStreams(t *testing.T) {
	const (
		limit   = 70000
		success = "\x82\x15\x03" + `{"status":"Success"}`
	)
	long := strings.Repeat("x", 200)
	longer := strings.Repeat("y", 66000)
	for _, tc := range []struct{ name, frames, output, err string }{
		{"a message", "\x82\x03\x01ab" + success, "ab", ""},
		{"text, a ping, and an empty message", "\x81\x03\x01ab\x89\x01z\x82\x00\x82\x03\x02no" + success, "ab", ""},
		{"a message in three frames, with a pong in it", "\x02\x02\x01a\x00\x01b\x8a\x00\x80\x01c" + success, "abc", ""},
		{"an outcome in two frames", "\x02\x02\x03{\x80\x13" + `"status":"Success"}`, "", ""},
		{"long frames", "\x82\x7e\x00\xc9\x01" + long + "\x82\x7f\x00\x00\x00\x00\x00\x01\x01\xd1\x01" + longer + success, long + longer, ""},
		{"failure", "\x82\x03\x01ab\x82\x03\x02no\x82\x25\x03" + `{"status":"Failure","message":"m\n"}`, "ab", "m : no"},
		{"no outcome", "\x82\x02\x03x", "", "decode the outcome"},
		{"closed", "\x82\x03\x01ab\x82\x03\x02no\x88\x00", "ab", "closed before the command ended: no"},
		{"the end", "\x82\x03\x01ab\x82\x03", "ab", "ended early: EOF"},
		{"too much", strings.Repeat("\x82\x7e\xff\xff\x01"+longer[:65534], 2), strings.Repeat(longer[:65534], 2)[:limit], "more than 70000 bytes"},
		{"a huge frame", "\x82\x7f\x7f\xff\xff\xff\xff\xff\xff\xff", "", "a frame of 9223372036854775807 bytes"},
		{"a masked frame", "\x82\x83mask\x01ab", "", "is not expected"},
		{"a compressed frame", "\xc2\x03\x01ab", "", "is not expected"},
	} {
		output, err := readStreams(strings.NewReader(tc.frames), limit)
		if string(output) != tc.output || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %.20q of %d bytes, %v; want %.20q, %q", tc.name, output, len(output), err, tc.output, tc.err)
		}
	}
}
