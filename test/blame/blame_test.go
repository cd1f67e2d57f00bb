// SPDX-License-Identifier: Apache-2.0

package blame

import (
	"strings"
	"testing"
)

func TestWrong(t *testing.T) {
	rule := Words{Doctor: "priority 5270", Check: "rule"}
	all := map[string]Words{"rule": rule, "no forwarding": {Doctor: "is not forwarded", Check: "forwarding"}}
	const heading = "SUBNET PUBLIC IP RESULT RTT ADVICE\n"
	for _, c := range []struct {
		name, command, out string
		words              Words
		want               string // parts of the errors, with commas between them
	}{
		{"the fault", "doctor", "PROBLEM a rule with priority 5270\nnote 1.2.3.0/24 is not forwarded\n", rule, ""},
		{"another problem too", "doctor", "PROBLEM a rule with priority 5270\nPROBLEM the disk is full\n", rule, "blames something else"},
		{"another fault on the same line", "doctor", "PROBLEM a rule with priority 5270, and IPv4 is not forwarded\n", rule, `fault "no forwarding"`},
		{"another fault", "check", heading + "10.5.1.0/24 192.0.2.1 forwarding - none\n", rule, `blames something else,fault "no forwarding"`},
		{"rows without a fault", "check", heading + "10.5.1.0/24 192.0.2.1 ok 1 ms\n10.5.2.0/24 192.0.2.2 unknown -\n", rule, ""},
		{"another column", CheckPod, heading + "10.5.1.0/24 192.0.2.1 way rule -\n", rule, ""},
		{"what may be blamed too", "check", heading + "10.5.1.0/24 192.0.2.1 network -\n", Words{Check: "rule", Also: []string{"network"}}, ""},
		{"nothing may be blamed", "status", "not ready: pods: cut off\n", Words{}, "blames something else"},
	} {
		t.Run(c.name, func(t *testing.T) {
			errs := c.words.Wrong(c.command, c.out, all)
			parts := strings.FieldsFunc(c.want, func(r rune) bool { return r == ',' })
			if len(errs) != len(parts) {
				t.Fatalf("%v, want %q", errs, parts)
			}
			for i, err := range errs {
				if !strings.Contains(err.Error(), parts[i]) {
					t.Errorf("%v, want %q", err, parts[i])
				}
			}
		})
	}
}
