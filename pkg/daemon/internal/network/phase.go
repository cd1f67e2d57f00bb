// SPDX-License-Identifier: Apache-2.0

package network

import (
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

// Progress knows the phase of a network. Start-up, sessions and a daemon with several networks tell it what
// they know. Such a daemon opens a network again after a failure, so a Progress outlasts a Network.
type Progress struct {
	entered func(Phase) // called with each new phase; must not block or call the Progress, which is locked meanwhile

	mu       sync.Mutex
	waiting  Phase // the one of the first three phases in which the start is, or was last before a session began; "" while no Network runs
	session  Phase // of the last session, which may have ended; "" if there was none, or if its subnet is not this host's any more
	refused  bool  // the daemon has refused the configuration
	removing bool  // the configuration was deleted, and this host still has something of the network
	last     Phase // "" before the first one
}

// NewProgress returns the progress of a network that has not started yet. It logs each phase.
func NewProgress(log klog.Logger) *Progress {
	return &Progress{entered: func(now Phase) { log.V(1).Info("network", "phase", now) }}
}

// Phase returns the present phase.
func (p *Progress) Phase() Phase {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.derive()
}

// derive returns the phase that follows from what p knows. The caller holds p.mu.
func (p *Progress) derive() Phase {
	switch {
	case p.removing:
		return PhaseRemoving
	case p.session != "":
		return p.session
	case p.waiting != "":
		return p.waiting
	case p.refused:
		return PhaseRefused
	}
	return PhaseNoConfiguration
}

// set calls change, and announces the phase if that has changed.
func (p *Progress) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	if now := p.derive(); now != p.last {
		p.last = now
		p.entered(now)
	}
}

// Decided records what a daemon with several networks has decided: whether it has refused the
// configuration, and whether the network was deleted and is not removed yet.
func (p *Progress) Decided(refused, removing bool) {
	p.set(func() { p.refused, p.removing = refused, removing })
}

// Stopped records that the Network has ended, although the daemon continues.
func (p *Progress) Stopped() { p.set(func() { p.waiting, p.session = "", "" }) }

// waitFor records what the start waits for: one of the first three phases.
func (p *Progress) waitFor(what Phase) { p.set(func() { p.waiting = what }) }

// enter records the phase of a session, or of the time after its end. It is empty if there is no session any more.
func (p *Progress) enter(session Phase) { p.set(func() { p.session = session }) }

// retired records that nothing of former configurations is left.
func (p *Progress) retired() {
	p.set(func() {
		if p.session == PhaseRetiring {
			p.session = PhaseServing
		}
	})
}
