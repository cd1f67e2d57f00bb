// SPDX-License-Identifier: Apache-2.0

package network

import (
	"slices"
	"sync"

	"k8s.io/klog/v2"
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
	// PhaseRefused is one of several networks that the daemon does not start, because its
	// configuration cannot be used.
	PhaseRefused Phase = "refused"
	// PhaseRemoving is one of several networks whose configuration was deleted, until everything of it
	// is gone from this host.
	PhaseRemoving Phase = "removing the deleted network"
)

// inUse stands for all phases except PhaseRefused and PhaseRemoving. It begins with
// PhaseNoConfiguration.
const inUse Phase = "in use"

// following contains, for each phase, those that can follow it. A network begins with
// PhaseNoConfiguration. PhaseLastKnown does not follow PhaseNoLease, because the start ends the attempts
// to use the last known state before it takes a subnet. inUse follows itself if one of several networks
// has failed and is opened again.
var following = map[Phase][]Phase{
	PhaseNoConfiguration: {PhaseNoInterface, PhaseLastKnown},
	PhaseNoInterface:     {PhaseNoLease, PhaseLastKnown},
	PhaseNoLease:         {PhaseNoConfiguration, PhaseServing, PhaseRetiring},
	PhaseLastKnown:       {PhaseNoLease, PhaseServing, PhaseRetiring, PhaseMoving},
	PhaseServing:         {PhaseMoving, PhaseChanging},
	PhaseRetiring:        {PhaseServing, PhaseMoving, PhaseChanging},
	PhaseMoving:          {PhaseNoLease, PhaseLastKnown, PhaseServing, PhaseRetiring},
	PhaseChanging:        {PhaseServing, PhaseRetiring},
	inUse:                {inUse, PhaseRefused, PhaseRemoving},
	PhaseRefused:         {inUse, PhaseRemoving},
	PhaseRemoving:        {inUse},
}

// follows reports whether the drawing has a way from one phase to another.
func follows(before, now Phase) bool {
	if slices.Contains(following[before], now) {
		return true
	}
	begins := outer(now) == now || now == PhaseNoConfiguration
	return begins && slices.Contains(following[outer(before)], outer(now))
}

// outer returns inUse for the phases for which it stands, and p for the others.
func outer(p Phase) Phase {
	if p == PhaseRefused || p == PhaseRemoving {
		return p
	}
	return inUse
}

// Progress holds the facts from which the phase of a network follows. Start-up and sessions set
// them, and so does a daemon with several networks. Such a daemon opens a network again after a failure,
// so a Progress outlasts a Network.
type Progress struct {
	entered func(before, now Phase)

	mu sync.Mutex
	// waiting is the one of the first three phases in which the start is, or was last before a session
	// began. It is empty while no Network runs.
	waiting Phase
	facts
	refused  bool  // the daemon has refused the configuration
	removing bool  // the configuration was deleted, and this host still has something of the network
	last     Phase // "" before the first one
}

// facts are about the present session.
type facts struct {
	serving  bool // there is a session
	recalled bool // it uses the last known state
	retiring bool // it has not removed the objects of former configurations yet
	moving   bool // it has ended, because the external interface has changed
	changing bool // it has ended, because the network configuration has changed
}

// NewProgress returns the progress of a network that has not started yet. entered is called for each
// change of the phase. For the first phase, before is "". entered must not block or call the Progress,
// which is locked meanwhile.
func NewProgress(entered func(before, now Phase)) *Progress { return &Progress{entered: entered} }

// LogPhases returns a function for NewProgress that logs each phase. If the drawing has no way to the
// phase, it logs that too: the drawing or the code is wrong.
func LogPhases(log klog.Logger) func(before, now Phase) {
	return func(before, now Phase) {
		log.V(1).Info("network", "phase", now)
		if !follows(before, now) {
			log.V(1).Info("the phase does not follow from the one before", "before", before, "phase", now)
		}
	}
}

// Phase returns the present phase.
func (p *Progress) Phase() Phase {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.derive()
}

// derive returns the phase that follows from the facts. The caller holds p.mu.
func (p *Progress) derive() Phase {
	switch {
	case p.removing:
		return PhaseRemoving
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
	case p.waiting != "":
		return p.waiting
	case p.refused:
		return PhaseRefused
	}
	return PhaseNoConfiguration
}

// set calls change, which changes the facts, and announces the phase if that has changed too.
func (p *Progress) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	if before, now := p.last, p.derive(); now != before {
		p.last = now
		p.entered(before, now)
	}
}

// Decided records what a daemon with several networks has decided: whether it has refused the
// configuration, and whether the network was deleted and is not removed yet.
func (p *Progress) Decided(refused, removing bool) {
	p.set(func() { p.refused, p.removing = refused, removing })
}

// Stopped records that the Network has ended, although the daemon goes on.
func (p *Progress) Stopped() { p.set(func() { p.waiting, p.facts = "", facts{} }) }

// waitFor records what the start waits for: one of the first three phases.
func (p *Progress) waitFor(what Phase) { p.set(func() { p.waiting = what }) }

// session records that a session has begun.
func (p *Progress) session(recalled, retiring bool) {
	p.set(func() { p.facts = facts{serving: true, recalled: recalled, retiring: retiring} })
}

// retired records that nothing of former configurations is left.
func (p *Progress) retired() { p.set(func() { p.retiring = false }) }

// move records that the session has ended and that another one will follow, on the changed external
// interface.
func (p *Progress) move() { p.set(func() { p.moving = true }) }

// change records that the session has ended and that another one will follow, with another
// configuration.
func (p *Progress) change() { p.set(func() { p.changing = true }) }

// left records that the session has ended, because its subnet is not this host's any more.
func (p *Progress) left() { p.set(func() { p.facts = facts{} }) }
