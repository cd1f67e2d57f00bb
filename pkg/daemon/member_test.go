// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
)

// TestMemberPhases refuses, uses and deletes configurations of one of several networks. Its summary must
// have the phase after each step. The network must go all ways between InUse, Refused and Removing that the
// diagram in design.md has, and no others.
func TestMemberPhases(t *testing.T) {
	f := testFleet(t)
	red := f.join("red")
	const valid, invalid = `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`, `{`
	offer := func(text string) func() {
		return func() {
			red.offer([]byte(text))
			red.admit(t.Context())
		}
	}
	remove := func() { red.offer(nil) }
	begin := func() {
		if !red.begin(nil) {
			t.Error("the network cannot begin")
		}
	}
	before, walked := "InUse", map[[2]string]bool{}
	for _, step := range []struct {
		name  string
		do    func()
		phase network.Phase
	}{
		{"a configuration that cannot be used", offer(invalid), network.PhaseRefused},
		{"a valid one", offer(valid), network.PhaseNoConfiguration},
		{"it is used", begin, network.PhaseNoConfiguration},
		{"it is deleted", remove, network.PhaseRemoving},
		{"nothing is left", red.retired, network.PhaseNoConfiguration},
		{"a valid one again", offer(valid), network.PhaseNoConfiguration},
		{"it is used again", begin, network.PhaseNoConfiguration},
		{"it cannot be used any more", offer(invalid), network.PhaseRefused},
		{"it is deleted although it is refused", remove, network.PhaseRemoving},
		{"nothing is left again", red.retired, network.PhaseNoConfiguration},
	} {
		step.do()
		now := red.summary().Phase
		if now != string(step.phase) {
			t.Errorf("%s: the phase is %q, want %q", step.name, now, step.phase)
		}
		outer, ok := map[string]string{string(network.PhaseRefused): "Refused", string(network.PhaseRemoving): "Removing"}[now]
		if !ok {
			outer = "InUse"
		}
		if outer != before {
			walked[[2]string{before, outer}] = true
		}
		before = outer
	}
	page, err := os.ReadFile("../../Documentation/design.md")
	if err != nil {
		t.Fatal(err)
	}
	var drawn [][2]string
	for _, m := range regexp.MustCompile(`(?m)^    (\w+) --> (\w+)$`).FindAllStringSubmatch(string(page), -1) {
		if m[1] != m[2] { // TestKernelPhases of the package network goes this way
			drawn = append(drawn, [2]string{m[1], m[2]})
		}
	}
	for _, arrow := range drawn {
		if !walked[arrow] {
			t.Errorf("the network does not go from %s to %s", arrow[0], arrow[1])
		}
	}
	for arrow := range walked {
		if !slices.Contains(drawn, arrow) {
			t.Errorf("the drawing has no way from %s to %s", arrow[0], arrow[1])
		}
	}
}

// TestYieldEndsWithAnotherConfiguration lets a network yield, and gives it a configuration that it can use before it has
// removed anything. It must then serve that one, and remove nothing.
func TestYieldEndsWithAnotherConfiguration(t *testing.T) {
	f := testFleet(t)
	red := f.join("red")
	offer := func(text string) {
		red.offer([]byte(text))
		red.admit(t.Context())
	}
	offer(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	if !red.begin(nil) {
		t.Fatal("the network cannot begin")
	}
	offer(`{`)
	red.yield(t.Context())
	if red.serves() || !red.retires() {
		t.Errorf("while it yields: %+v, want that it removes what it has", red)
	}
	offer(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7}}`)
	if !red.serves() || red.retires() {
		t.Errorf("with a configuration that it can use: %+v, want that it serves", red)
	}
}
