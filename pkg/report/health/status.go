// SPDX-License-Identifier: Apache-2.0

// Package health reports the daemon's health to probes and to systemd: whether its main
// loop is alive, whether it is ready, and which components are not.
package health

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

var errPending = errors.New("not up yet")

// Status collects the health that each component reports. It is safe for concurrent use.
type Status struct {
	maxAge time.Duration

	mu    sync.Mutex
	parts []*part
	beat  time.Time // the last Beat; zero before the first and after a Pause
}

// part is one component. There are few, and a list keeps the order in which reasons are
// shown.
type part struct {
	name   string
	err    error
	grace  time.Duration // how long err may last before the daemon is not ready
	turned time.Time     // when the component last changed between good and bad; zero before its first report
}

// counts reports whether the part makes the daemon not ready.
func (p *part) counts(now time.Time) bool {
	return p.err != nil && (p.turned.IsZero() || now.Sub(p.turned) >= p.grace)
}

// New returns the status of a daemon that becomes ready once all required components have
// reported that they are good. If the last Beat is older than maxAge, the main loop
// counts as stuck. With maxAge 0 it never does.
func New(maxAge time.Duration, required ...string) *Status {
	s := &Status{maxAge: maxAge}
	for _, name := range required {
		s.parts = append(s.parts, &part{name: name, err: errPending})
	}
	return s
}

// Set reports the state of a component; nil means good. Components that are not required
// may report as well.
func (s *Status) Set(component string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.part(component)
	if (err == nil) != (p.err == nil) || p.turned.IsZero() {
		p.turned = time.Now()
	}
	p.err = err
}

// SetGrace sets how long a component may be bad before the daemon is not ready, counted
// from the first bad report after a good one. The default is zero: a bad component counts
// at once. The grace does not apply to a required component that has not reported yet: it
// counts at once.
func (s *Status) SetGrace(component string, grace time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.part(component).grace = grace
}

// Part returns the last error that a component reported, nil if it is good, and the time
// since which it has been good or bad. If the component has never reported, the time is
// zero, and the error is nil unless the component is required.
func (s *Status) Part(component string) (since time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.part(component)
	return p.turned, p.err
}

// part returns the component called name and adds it if it is new. The caller has locked s.mu.
func (s *Status) part(name string) *part {
	i := slices.IndexFunc(s.parts, func(p *part) bool { return p.name == name })
	if i < 0 {
		s.parts = append(s.parts, &part{name: name})
		i = len(s.parts) - 1
	}
	return s.parts[i]
}

// Ready reports whether the daemon is ready: every required component has reported, and no
// component has been bad for its grace or longer. If not, it returns the reasons, one line
// each, required components first.
func (s *Status) Ready() (ready bool, reasons []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for _, p := range s.parts {
		if p.counts(now) {
			reasons = append(reasons, p.name+": "+oneline.Text(p.err))
		}
	}
	return len(reasons) == 0, reasons
}

// Beat reports that the main loop has completed a round.
func (s *Status) Beat() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beat = time.Now()
}

// Pause reports that there is no main loop until the next Beat.
func (s *Status) Pause() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beat = time.Time{}
}

// Alive returns an error if the last Beat is older than the maxAge of New. It returns nil
// before the first Beat, while the daemon is starting, and after a Pause.
func (s *Status) Alive() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.maxAge == 0 || s.beat.IsZero() {
		return nil
	}
	if age := time.Since(s.beat); age > s.maxAge {
		return fmt.Errorf("main loop stands still for %s, expected a round every %s",
			age.Round(time.Second), s.maxAge)
	}
	return nil
}
