// SPDX-License-Identifier: Apache-2.0

package network

import (
	"os"
	"regexp"
	"slices"
	"sync"
	"testing"
)

// inUse stands for all phases except PhaseRefused and PhaseRemoving. It begins with PhaseNoConfiguration, and follows
// itself if one of several networks has failed and is opened again.
const inUse Phase = "in use"

// following contains, for each phase, those that can follow it according to the diagram in design.md. PhaseLastKnown does
// not follow PhaseNoLease, because the start ends the attempts to use the last known state before it takes a subnet.
var following = sync.OnceValue(func() map[Phase][]Phase {
	page, err := os.ReadFile("../../../../Documentation/design.md")
	if err != nil {
		panic(err)
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
	return drawn
})

// follows reports whether the diagram has a way from one phase to another.
func follows(before, now Phase) bool {
	if slices.Contains(following()[before], now) {
		return true
	}
	begins := outer(now) == now || now == PhaseNoConfiguration
	return begins && slices.Contains(following()[outer(before)], outer(now))
}

// outer returns inUse for the phases for which it stands, and p for the others.
func outer(p Phase) Phase {
	if p == PhaseRefused || p == PhaseRemoving {
		return p
	}
	return inUse
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
