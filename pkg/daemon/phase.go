// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"sync"
)

// phase is what a network does at present. Documentation/design.md draws the phases and the
// transitions between them.
type phase string

// The phases. In the first three this process has no session. The objects of earlier processes stay
// in the kernel.
const (
	phaseNoConfiguration phase = "waiting for the network configuration"
	phaseNoInterface     phase = "waiting for the external interface"
	phaseNoLease         phase = "waiting for a subnet"
	// phaseLastKnown is a session on the state of the last process. Meanwhile the start
	// continues: it reads the configuration and takes the lease as soon as the store answers.
	phaseLastKnown phase = "serving from the last known state"
	phaseServing   phase = "serving"
	// phaseRetiring is phaseServing while objects of a former configuration are still in the kernel.
	phaseRetiring phase = "serving, and removing what a former configuration left"
	// phaseMoving is the time between two sessions, because the external interface has changed.
	phaseMoving phase = "moving to the changed external interface"
)

// following contains, for each phase, those that can follow it. A network begins with
// phaseNoConfiguration.
var following = map[phase][]phase{
	phaseNoConfiguration: {phaseNoInterface, phaseLastKnown},
	phaseNoInterface:     {phaseNoLease, phaseLastKnown},
	phaseNoLease:         {phaseNoConfiguration, phaseLastKnown, phaseServing, phaseRetiring},
	phaseLastKnown:       {phaseNoLease, phaseServing, phaseRetiring, phaseMoving},
	phaseServing:         {phaseMoving},
	phaseRetiring:        {phaseServing, phaseMoving},
	phaseMoving:          {phaseLastKnown, phaseServing, phaseRetiring},
}

// progress holds the facts from which the phase of a network follows. Start-up and sessions set
// them.
type progress struct {
	// entered is called when the phase changes, and with the first one. It must not block. It
	// may be nil.
	entered func(phase)

	mu      sync.Mutex
	waiting phase // the start waits for this
	facts
	last phase
}

// facts are about the present session.
type facts struct {
	serving  bool // there is a session
	recalled bool // it uses the last known state
	retiring bool // it has not removed the objects of former configurations yet
	moving   bool // it has ended, because the external interface has changed
}

// phase returns the present phase.
func (p *progress) phase() phase {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.derive()
}

// derive returns the phase that follows from the facts. The caller holds p.mu.
func (p *progress) derive() phase {
	switch {
	case p.moving:
		return phaseMoving
	case p.recalled:
		return phaseLastKnown
	case p.retiring:
		return phaseRetiring
	case p.serving:
		return phaseServing
	case p.waiting == "":
		return phaseNoConfiguration
	}
	return p.waiting
}

// set changes the facts and announces the phase if it is another one then.
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
func (p *progress) waitFor(what phase) { p.set(func() { p.waiting = what }) }

// session records that a session has begun.
func (p *progress) session(recalled, retiring bool) {
	p.set(func() { p.facts = facts{serving: true, recalled: recalled, retiring: retiring} })
}

// retired records that nothing of former configurations is left.
func (p *progress) retired() { p.set(func() { p.retiring = false }) }

// move records that the session has ended and that another one will follow.
func (p *progress) move() { p.set(func() { p.moving = true }) }

// left records that the session has ended, because its subnet is not this node's any more.
func (p *progress) left() { p.set(func() { p.facts = facts{} }) }
