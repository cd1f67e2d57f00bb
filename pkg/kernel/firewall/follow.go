// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"cmp"
	"slices"
	"strings"
)

// Answer says whether a packet meets conditions. It is Unknown if the rules do not tell.
type Answer int

// The answers.
const (
	Unknown Answer = iota
	No
	Yes
	Seldom // as Unknown, but few packets do: too many of them, or those with a mark of another program
)

// Effect is what a rule does with the packets that meet its conditions.
type Effect int

// The effects.
const (
	Continues Effect = iota // the next rule decides
	Accepts
	Drops
	Redirects // the packet gets another destination
	Rewrites  // the packet gets another source
	Returns
	Jumps
	GoesTo // jumps without a way back
)

// Step is a rule of any program, as far as it is about one packet.
type Step struct {
	Met    Answer
	Effect Effect
	Chain  string // to which the rule jumps or goes
	Rule   string // as the operator finds it
}

// Outcome is what becomes of a packet in a chain.
type Outcome struct {
	Effect      Effect // Accepts, Drops, Redirects or Rewrites, or Continues if no rule decides
	Chain, Rule string // the rule that decides, and its chain
	// Doubtful means that an earlier rule may have decided. It is not known whether the packet meets its conditions.
	Doubtful bool
	// May is the first rule that may drop the packet: it is not known whether the packet meets its conditions.
	May Spot
}

// Spot is a rule and its chain.
type Spot struct{ Chain, Rule string }

// Blocks reports whether a rule keeps the packet from its destination.
func (o Outcome) Blocks() bool { return o.Effect == Drops || o.Effect == Redirects }

// Block returns what keeps p from its destination in a base chain with that policy, in upper or lower case, or certainly
// changes its source. ok is false if nothing does.
func (o Outcome) Block(p Packet, base, policy string) (b Block, ok bool) {
	b = Block{Packet: p, Chain: o.Chain, Rule: o.Rule, Redirects: o.Effect == Redirects, Rewrites: o.Effect == Rewrites, Doubtful: o.Doubtful}
	if o.Effect == Continues && strings.EqualFold(policy, "drop") {
		b.Chain = base
		b.Rule = "policy " + policy
		return b, true
	}
	if !o.Blocks() && o.May != (Spot{}) {
		return Block{Packet: p, Chain: o.May.Chain, Rule: o.May.Rule, Doubtful: true}, true
	}
	return b, o.Blocks() || b.Rewrites && !b.Doubtful // before such a rule, kube-proxy returns by a mark
}

// Steps calls each with the rules of a chain, in their order, until it returns false. It returns an error if it cannot
// read them.
type Steps func(chain string, each func(Step) (more bool)) error

// Follow returns what becomes of the packet in a chain. through are the chains that led to this one, so that a loop of
// chains ends.
func (all Steps) Follow(chain string, through ...string) (o Outcome, err error) {
	if slices.Contains(through, chain) {
		return o, nil
	}

	failed := all(chain, func(s Step) (more bool) {
		if s.Met == No || s.Effect == Continues {
			return true
		}
		doubtful := o.Doubtful || s.Met != Yes && s.Effect != Drops && s.Effect != Redirects && s.Effect != Rewrites
		next := Outcome{Effect: s.Effect, Chain: chain, Rule: s.Rule}
		switch {
		case s.Met == Seldom, s.Effect == Returns:
			o.Doubtful = doubtful
			return s.Met != Yes
		case s.Effect == Jumps, s.Effect == GoesTo:
			next, err = all.Follow(s.Chain, append(through, chain)...)
		}

		may := cmp.Or(o.May, next.May)
		if s.Met == Unknown { // it does not apply, but may
			if next.Effect == Drops {
				may = cmp.Or(may, Spot{next.Chain, next.Rule})
			}
			next = Outcome{}
		}
		o = next
		o.May = may
		o.Doubtful = o.Doubtful || doubtful
		return err == nil && o.Effect == Continues && (s.Met == Unknown || s.Effect == Jumps)
	})
	return o, cmp.Or(err, failed)
}
