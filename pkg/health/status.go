// Package health tells probes and systemd how the daemon is: whether its main
// loop is alive, and whether it is ready or which parts of it are not.
package health

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

var errPending = errors.New("not up yet")

// Status is the daemon's health as its parts report it. It is safe for
// concurrent use.
type Status struct {
	maxAge time.Duration

	mu    sync.Mutex
	parts []*part
	beat  time.Time // zero before the first
}

// part is one component. Components are few: a list keeps the order in which
// reasons are shown.
type part struct {
	name   string
	err    error
	since  time.Time     // when err became non-nil; zero before the first report
	grace  time.Duration // how long err may stand before it counts
	turned time.Time     // when it was last reported to have turned bad or good
}

// counts reports whether the part keeps the daemon from being ready.
func (p *part) counts(now time.Time) bool {
	return p.err != nil && (p.since.IsZero() || now.Sub(p.since) >= p.grace)
}

// New returns the status of a daemon that is ready once every one of the
// required components was reported good. maxAge is how old the last Beat may
// get before the main loop counts as stuck; zero means any age.
func New(maxAge time.Duration, required ...string) *Status {
	s := &Status{maxAge: maxAge}
	for _, name := range required {
		s.parts = append(s.parts, &part{name: name, err: errPending})
	}
	return s
}

// Set reports the state of a component: nil means good. A component that was
// not required at the start may be reported as well.
func (s *Status) Set(component string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.part(component)
	if (err == nil) != (p.err == nil) || p.turned.IsZero() {
		p.turned = time.Now()
	}
	if err != nil && (p.err == nil || p.since.IsZero()) {
		p.since = time.Now()
	}
	p.err = err
}

// SetGrace says how long a component may be bad, counted from the first bad
// report after a good one, before the daemon is not ready. Zero, which every
// component starts with, means not at all. A required component that was
// never reported counts at once whatever its grace.
func (s *Status) SetGrace(component string, grace time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.part(component).grace = grace
}

// Part returns what was last reported of a component, and since when it has
// been good or bad: zero if it was never reported.
func (s *Status) Part(component string) (since time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.parts {
		if p.name == component {
			return p.turned, p.err
		}
	}
	return time.Time{}, nil
}

// part finds or adds a component. s.mu is held.
func (s *Status) part(name string) *part {
	i := slices.IndexFunc(s.parts, func(p *part) bool { return p.name == name })
	if i < 0 {
		s.parts = append(s.parts, &part{name: name})
		i = len(s.parts) - 1
	}
	return s.parts[i]
}

// Ready reports whether nothing is known to be broken and, if something is,
// the reasons: one line each, the required components first.
func (s *Status) Ready() (ready bool, reasons []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for _, p := range s.parts {
		if p.counts(now) {
			reasons = append(reasons, p.name+": "+OneLine(p.err))
		}
	}
	return len(reasons) == 0, reasons
}

// Beat reports that the main loop goes round.
func (s *Status) Beat() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beat = time.Now()
}

// Alive returns nil while the main loop goes round, and before its first
// Beat, when the daemon still starts.
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

// OneLine joins the lines of an error, as joined errors have them.
func OneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}
