// SPDX-License-Identifier: Apache-2.0

package firewall_test

import (
	"errors"
	"testing"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// TestFollow checks which rule decides about a packet that passes several chains.
func TestFollow(t *testing.T) {
	rule := func(e firewall.Effect) firewall.Step {
		return firewall.Step{Met: firewall.Yes, Effect: e, Rule: "decides"}
	}
	to := func(e firewall.Effect, chain string) firewall.Step {
		return firewall.Step{Met: firewall.Yes, Effect: e, Chain: chain}
	}
	met := func(a firewall.Answer, s firewall.Step) firewall.Step {
		s.Met = a
		return s
	}
	drop, accept := rule(firewall.Drops), rule(firewall.Accepts)
	unreadable := errors.New("unreadable")
	for name, tt := range map[string]struct {
		base, other []firewall.Step
		want        firewall.Outcome
		err         error
	}{
		"no rules":             {},
		"accepted before":      {base: []firewall.Step{accept, drop}, want: firewall.Outcome{Effect: firewall.Accepts, Chain: "base", Rule: "decides"}},
		"not met":              {base: []firewall.Step{met(firewall.No, accept), drop}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "base", Rule: "decides"}},
		"maybe accepted":       {base: []firewall.Step{met(firewall.Unknown, accept), drop}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "base", Rule: "decides", Doubtful: true}},
		"maybe dropped":        {base: []firewall.Step{met(firewall.Unknown, drop)}, want: firewall.Outcome{May: firewall.Spot{Chain: "base", Rule: "decides"}}},
		"hardly dropped":       {base: []firewall.Step{met(firewall.Seldom, drop)}},
		"hardly accepted":      {base: []firewall.Step{met(firewall.Seldom, accept), drop}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "base", Rule: "decides", Doubtful: true}},
		"maybe, after accept":  {base: []firewall.Step{accept, met(firewall.Unknown, drop)}, want: firewall.Outcome{Effect: firewall.Accepts, Chain: "base", Rule: "decides"}},
		"maybe, then accept":   {base: []firewall.Step{met(firewall.Unknown, drop), accept}, want: firewall.Outcome{Effect: firewall.Accepts, Chain: "base", Rule: "decides", May: firewall.Spot{Chain: "base", Rule: "decides"}}},
		"maybe in a chain":     {base: []firewall.Step{to(firewall.Jumps, "other"), drop}, other: []firewall.Step{met(firewall.Unknown, drop)}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "base", Rule: "decides", May: firewall.Spot{Chain: "other", Rule: "decides"}}},
		"maybe a chain":        {base: []firewall.Step{met(firewall.Unknown, to(firewall.Jumps, "other"))}, other: []firewall.Step{drop}, want: firewall.Outcome{Doubtful: true, May: firewall.Spot{Chain: "other", Rule: "decides"}}},
		"hardly a chain":       {base: []firewall.Step{met(firewall.Seldom, to(firewall.Jumps, "other"))}, other: []firewall.Step{drop}, want: firewall.Outcome{Doubtful: true}},
		"jump":                 {base: []firewall.Step{to(firewall.Jumps, "other"), accept}, other: []firewall.Step{drop}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "other", Rule: "decides"}},
		"jump and back":        {base: []firewall.Step{to(firewall.Jumps, "other"), drop}, other: []firewall.Step{rule(firewall.Returns), accept}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "base", Rule: "decides"}},
		"no way back":          {base: []firewall.Step{to(firewall.GoesTo, "other"), drop}},
		"doubt before a jump":  {base: []firewall.Step{met(firewall.Unknown, accept), to(firewall.Jumps, "other")}, other: []firewall.Step{drop}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "other", Rule: "decides", Doubtful: true}},
		"doubt in a chain":     {base: []firewall.Step{to(firewall.Jumps, "other"), drop}, other: []firewall.Step{met(firewall.Unknown, accept)}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "base", Rule: "decides", Doubtful: true}},
		"loop":                 {base: []firewall.Step{to(firewall.Jumps, "other"), drop}, other: []firewall.Step{to(firewall.Jumps, "base")}, want: firewall.Outcome{Effect: firewall.Drops, Chain: "base", Rule: "decides"}},
		"chain cannot be read": {base: []firewall.Step{to(firewall.Jumps, "secret"), drop}, err: unreadable},
	} {
		chains := map[string][]firewall.Step{"base": tt.base, "other": tt.other}
		got, err := firewall.Steps(func(chain string, each func(firewall.Step) bool) error {
			for _, s := range chains[chain] {
				if !each(s) {
					break
				}
			}
			if chain == "secret" {
				return unreadable
			}
			return nil
		}).Follow("base")
		if got != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("%s: %+v, %v, want %+v, %v", name, got, err, tt.want, tt.err)
		}
	}
}
