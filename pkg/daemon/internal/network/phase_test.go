// SPDX-License-Identifier: Apache-2.0

package network

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPhasesAreDrawn checks that the diagram in design.md has the phases of this package, and
// the same transitions between them.
func TestPhasesAreDrawn(t *testing.T) {
	page, err := os.ReadFile("../../../../Documentation/design.md")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]Phase{}
	for _, m := range regexp.MustCompile(`(?m)^ +state "(.*)" as (\w+)( {)?$`).FindAllStringSubmatch(string(page), -1) {
		names[m[2]] = Phase(m[1])
	}
	drawn := map[Phase][]Phase{}
	for _, m := range regexp.MustCompile(`(?m)^ +(\w+) --> (\w+)$`).FindAllStringSubmatch(string(page), -1) {
		from, to := names[m[1]], names[m[2]]
		drawn[from] = append(drawn[from], to)
	}
	for _, ways := range []map[Phase][]Phase{following, drawn} {
		for _, to := range ways {
			slices.Sort(to) // the order has no meaning
		}
	}
	if diff := cmp.Diff(following, drawn); diff != "" {
		t.Errorf("the drawing differs from the code (-code +drawing):\n%s", diff)
	}
}

// TestFollows checks ways that the drawing has, and some that it does not have. Every network in use can
// fail or be deleted, and then begins again.
func TestFollows(t *testing.T) {
	for _, tt := range []struct {
		before, now Phase
		want        bool
	}{
		{"", PhaseNoConfiguration, true},
		{"", PhaseRefused, true},
		{PhaseServing, PhaseMoving, true},
		{PhaseServing, PhaseNoConfiguration, true},
		{PhaseServing, PhaseNoLease, false},
		{PhaseMoving, PhaseRemoving, true},
		{PhaseChanging, PhaseMoving, false},
		{PhaseRefused, PhaseNoConfiguration, true},
		{PhaseRefused, PhaseServing, false},
		{PhaseRemoving, PhaseRefused, false},
	} {
		if got := follows(tt.before, tt.now); got != tt.want {
			t.Errorf("%q follows %q: %v, want %v", tt.now, tt.before, got, tt.want)
		}
	}
}
