// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func subnetOf(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n >> 8), byte(n), 0}), 24)
}

// TestAnnouncementIsSmall has many hosts with long reasons. The announcement must fit into an annotation of
// Kubernetes, and all hosts must get a reason.
func TestAnnouncementIsSmall(t *testing.T) {
	var r Report
	for n := range 2000 {
		r.Routed = append(r.Routed, subnetOf(n))
		r.Unrouted = append(r.Unrouted, Unrouted{subnetOf(10000 + n), fmt.Sprintf("%d %s", n, strings.Repeat("é", 500))})
	}
	text, err := announce(r, errors.New(strings.Repeat("x", 1000)))
	if err != nil || len(text) > 200<<10 {
		t.Fatalf("%d bytes, error %v", len(text), err)
	}
	slices.Reverse(r.Routed)
	slices.Reverse(r.Unrouted)
	if again, _ := announce(r, errors.New(strings.Repeat("x", 1000))); string(again) != string(text) {
		t.Error("equal states have different texts")
	}
	var a announcement
	if err := json.Unmarshal(text, &a); err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int]string{10000: "says the leader one: 0 é", 11999: "says the leader one: " + otherReason, 5000: "cannot write: xxx"} {
		if err := a.check([]netip.Prefix{subnetOf(n)}, "one"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", subnetOf(n), err, want)
		}
	}
	if err := a.check([]netip.Prefix{subnetOf(0), subnetOf(1999)}, "one"); err != nil {
		t.Error(err)
	}
}

// TestAnnouncementIsOneLine has an announcement that another program has written.
func TestAnnouncementIsOneLine(t *testing.T) {
	dirty := "a\nb\x1b[31m" + strings.Repeat("c", 1000)
	for _, a := range []announcement{{Unrouted: []unrouted{{dirty, []netip.Prefix{subnetOf(1)}}}}, {Error: dirty}} {
		err := a.check([]netip.Prefix{subnetOf(1)}, "one")
		if text := fmt.Sprint(err); !strings.Contains(text, "a b [31mccc") || len(text) > 400 {
			t.Errorf("error %q, want one short line", text)
		}
	}
}
