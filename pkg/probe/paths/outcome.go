// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Result is what the prober knows of one path.
type Result struct {
	Peer string `json:"peer"` // key of the peer's lease
	Path
	Verdict
	// OneWay says that this host's packets to the peer are lost, and those of the peer arrive. If it is false,
	// a path that does not work may fail in both directions, or only in the other one.
	OneWay  bool      `json:"oneWay,omitempty"`
	Checked time.Time `json:"checked"` // zero if it was not checked yet
	Since   time.Time `json:"since"`   // when OK last changed, or the first check if it has not; zero before that
}

// Text returns the advice, after the direction if that is known.
func (r Result) Text() string {
	if !r.OneWay {
		return r.Advice
	}
	return fmt.Sprintf("packets from this host to %s are lost, those from there arrive; %s", r.Subnet, r.Advice)
}

// Outcome is what the prober knows of all paths.
type Outcome struct {
	// Results counts the paths by result: ok, waiting (not checked yet), unknown (the check did not show whether the
	// path works), or the part that is broken. Each has an entry.
	Results map[string]int `json:"results"`
	// Worst are the worst paths: first the broken ones, then those with the longest round trips. It does
	// not contain paths that were not checked yet.
	Worst []Result `json:"worst"`
}

// Unreachable returns the number of paths that are known not to work.
func (o Outcome) Unreachable() (n int) {
	for _, part := range Parts() {
		n += o.Results[string(part)]
	}
	return n
}

// outcome summarizes results, which it may reorder. The field Worst gets at most as many paths as the parameter
// worst says.
func outcome(results []Result, worst int) Outcome {
	const waiting = "waiting"
	o := Outcome{Results: map[string]int{"ok": 0, waiting: 0}, Worst: []Result{}}
	for _, part := range append(Parts(), Unknown) {
		o.Results[string(part)] = 0
	}

	for _, r := range results {
		if r.Checked.IsZero() {
			o.Results[waiting]++
		} else {
			o.Results[r.Result()]++
		}
	}
	if worst == 0 {
		return o
	}

	slices.SortFunc(results, func(a, b Result) int {
		return cmp.Or(compareBroken(a, b), -cmp.Compare(a.RTT, b.RTT), a.Subnet.Compare(b.Subnet))
	})
	for _, r := range results[:min(worst, len(results))] {
		if !r.Checked.IsZero() {
			o.Worst = append(o.Worst, r)
		}
	}
	return o
}

// compareBroken puts broken paths before others, and orders them by the time since which they are broken,
// the earliest first.
func compareBroken(a, b Result) int {
	switch x, y := a.broken(), b.broken(); {
	case x && y:
		return a.Since.Compare(b.Since)
	case x:
		return -1
	case y:
		return 1
	}
	return 0
}

// broken reports whether it is known that the path does not work.
func (r Result) broken() bool { return !r.Checked.IsZero() && !r.OK && r.Broken != Unknown }
