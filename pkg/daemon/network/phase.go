// SPDX-License-Identifier: Apache-2.0

package network

import (
	"sync"
)

// Phase is what a network does at present. Documentation/design.md draws the phases and the
// transitions between them.
type Phase string

// The phases. In the first three this process has no session. The objects of earlier processes stay
// in the kernel.
const (
	PhaseNoConfiguration Phase = "waiting for the network configuration"
	PhaseNoInterface     Phase = "waiting for the external interface"
	PhaseNoLease         Phase = "waiting for a subnet"
	// PhaseLastKnown is a session on the state of the last process. Meanwhile the start
	// continues: it reads the configuration and takes the lease as soon as the store answers.
	PhaseLastKnown Phase = "serving from the last known state"
	PhaseServing   Phase = "serving"
	// PhaseRetiring is PhaseServing while objects of a former configuration are still in the kernel.
	PhaseRetiring Phase = "serving, and removing what a former configuration left"
	// PhaseMoving is the time between two sessions, because the external interface has changed.
	PhaseMoving Phase = "moving to the changed external interface"
	// PhaseChanging is the time between two sessions, because the network configuration has changed.
	PhaseChanging Phase = "changing to the new network configuration"
)

// following contains, for each phase, those that can follow it. A network begins with
// PhaseNoConfiguration.
var following = map[Phase][]Phase{
	PhaseNoConfiguration: {PhaseNoInterface, PhaseLastKnown},
	PhaseNoInterface:     {PhaseNoLease, PhaseLastKnown},
	PhaseNoLease:         {PhaseNoConfiguration, PhaseLastKnown, PhaseServing, PhaseRetiring},
	PhaseLastKnown:       {PhaseNoLease, PhaseServing, PhaseRetiring, PhaseMoving},
	PhaseServing:         {PhaseMoving, PhaseChanging},
	PhaseRetiring:        {PhaseServing, PhaseMoving, PhaseChanging},
	PhaseMoving:          {PhaseLastKnown, PhaseServing, PhaseRetiring},
	PhaseChanging:        {PhaseServing, PhaseRetiring},
}

// progress holds the facts from which the phase of a network follows. Start-up and sessions set
// them.
type progress struct {
	// entered is called when the phase changes, and with the first one. It must not block. It
	// may be nil.
	entered func(Phase)

	mu      sync.Mutex
	waiting Phase // the start waits for this
	facts
	last Phase
}

// facts are about the present session.
type facts struct {
	serving  bool // there is a session
	recalled bool // it uses the last known state
	retiring bool // it has not removed the objects of former configurations yet
	moving   bool // it has ended, because the external interface has changed
	changing bool // it has ended, because the network configuration has changed
}

// phase returns the present phase.
func (p *progress) phase() Phase {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.derive()
}

// derive returns the phase that follows from the facts. The caller holds p.mu.
func (p *progress) derive() Phase {
	switch {
	case p.moving:
		return PhaseMoving
	case p.changing:
		return PhaseChanging
	case p.recalled:
		return PhaseLastKnown
	case p.retiring:
		return PhaseRetiring
	case p.serving:
		return PhaseServing
	case p.waiting == "":
		return PhaseNoConfiguration
	}
	return p.waiting
}

// set calls change, which changes the facts, and announces the phase if that has changed too.
func (p *progress) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	if now := p.derive(); now != p.last {
		p.last = now
		if p.entered != nil {
			p.entered(now)
		}
	}
}

// waitFor records what the start waits for: one of the first three phases.
func (p *progress) waitFor(what Phase) { p.set(func() { p.waiting = what }) }

// session records that a session has begun.
func (p *progress) session(recalled, retiring bool) {
	p.set(func() { p.facts = facts{serving: true, recalled: recalled, retiring: retiring} })
}

// retired records that nothing of former configurations is left.
func (p *progress) retired() { p.set(func() { p.retiring = false }) }

// move records that the session has ended and that another one will follow, on the changed external
// interface.
func (p *progress) move() { p.set(func() { p.moving = true }) }

// change records that the session has ended and that another one will follow, with another
// configuration.
func (p *progress) change() { p.set(func() { p.changing = true }) }

// left records that the session has ended, because its subnet is not this host's any more.
func (p *progress) left() { p.set(func() { p.facts = facts{} }) }
