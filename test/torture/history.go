// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// history contains everything that a run has recorded. Its methods find violations of the
// promises.
type history struct {
	start  time.Time
	hosts  map[string]netip.Addr // public address of each host, by name
	serves []serving
	routes []routeLoss
	store  []change
	faults []fault
	lines  map[string]map[string]int // number of log lines, by host and by text without numbers
}

// serving is a time during which the subnet file of a host had one subnet.
type serving struct {
	host     string
	subnet   netip.Prefix
	from, to time.Time // when the file was first and last read with this subnet
}

// routeLoss is the removal of a route from a host's kernel.
type routeLoss struct {
	host string
	dst  netip.Prefix
	at   time.Time
}

// change is a change of a lease in the store: a new value or, if owner is zero, its
// removal.
type change struct {
	revision int64
	at       time.Time // when a watcher saw it
	subnet   netip.Prefix
	owner    netip.Addr
}

// fault is a fault that the run has caused, with its beginning and end.
type fault struct {
	name     string
	from, to time.Time
}

// slack is the largest difference between the times at which different recorders see the
// same event.
const slack = 2 * time.Second

// violations returns one line for each broken promise.
func (h *history) violations() []string {
	return slices.Concat(h.sharedSubnets(), h.lostRoutes(), h.leftSubnets(), h.repeatedLines())
}

// since returns the time from the start of the run until t.
func (h *history) since(t time.Time) time.Duration { return t.Sub(h.start).Round(time.Millisecond) }

// sharedSubnets returns a line each time that two hosts served the same subnet, or
// overlapping ones, at the same time.
func (h *history) sharedSubnets() (found []string) {
	for i, a := range h.serves {
		for _, b := range h.serves[i+1:] {
			if a.host == b.host || !a.subnet.Overlaps(b.subnet) || a.to.Before(b.from) || b.to.Before(a.from) {
				continue
			}
			found = append(found, fmt.Sprintf("%s and %s served %s at the same time, %s to %s", a.host, b.host, a.subnet,
				h.since(later(a.from, b.from)), h.since(earlier(a.to, b.to))))
		}
	}
	return found
}

// lostRoutes returns a line for each route to the subnet of another host that a host
// removed while the other one served that subnet. It ignores removals in the first two
// seconds of that time (slack).
func (h *history) lostRoutes() (found []string) {
	for _, loss := range h.routes {
		for _, s := range h.serves {
			if s.host != loss.host && s.subnet == loss.dst && loss.at.After(s.from.Add(slack)) && loss.at.Before(s.to) {
				found = append(found, fmt.Sprintf("%s removed the route to %s of %s at %s", loss.host, loss.dst, s.host, h.since(loss.at)))
			}
		}
	}
	return found
}

// leftSubnets returns a line each time that a host ceased to serve a subnet although the
// store had its lease at that time, and still when slack had passed. It ignores the last
// two seconds of the recording (slack), in which the entries of all hosts end.
func (h *history) leftSubnets() (found []string) {
	end := time.Time{}
	for _, s := range h.serves {
		end = later(end, s.to)
	}
	for _, s := range h.serves {
		if end.Sub(s.to) < slack {
			continue
		}
		if owner := h.owner(s.subnet, s.to); owner == h.hosts[s.host] && h.owner(s.subnet, s.to.Add(slack)) == owner {
			found = append(found, fmt.Sprintf("%s left %s at %s although it had the lease", s.host, s.subnet, h.since(s.to)))
		}
	}
	return found
}

// owner returns the host that had the lease of a subnet at the given time, or the zero
// Addr if none had.
func (h *history) owner(subnet netip.Prefix, at time.Time) netip.Addr {
	var last change
	for _, c := range h.store {
		if c.subnet == subnet && !c.at.After(at) && c.revision >= last.revision {
			last = c
		}
	}
	return last.owner
}

// repeatedLines returns a line for each log line that the daemons of one host wrote too
// often. Ten times are allowed for each fault, and ten more for the run. Lines that
// differ only in numbers count as the same line.
func (h *history) repeatedLines() (found []string) {
	const perFault = 10
	most := perFault * (len(h.faults) + 1)
	for _, host := range slices.Sorted(maps.Keys(h.lines)) {
		for _, text := range slices.Sorted(maps.Keys(h.lines[host])) {
			if n := h.lines[host][text]; n > most {
				found = append(found, fmt.Sprintf("%s logged %d times, more than %d: %s", host, n, most, text))
			}
		}
	}
	return found
}

// countLines adds the lines of a daemon's log to lines. It removes the header of each
// line, which contains the time, and replaces numbers and IPv4 addresses by #.
func (h *history) countLines(host, log string) {
	if h.lines == nil {
		h.lines = map[string]map[string]int{}
	}
	if h.lines[host] == nil {
		h.lines[host] = map[string]int{}
	}
	for line := range strings.Lines(log) {
		_, text, ok := strings.Cut(line, "] ") // the text follows the header of klog
		if !ok {
			text = line
		}
		h.lines[host][withoutNumbers(strings.TrimSpace(text))]++
	}
}

// withoutNumbers replaces each number or IPv4 address, with its port, by #.
func withoutNumbers(text string) string {
	var b strings.Builder
	number := false
	for _, r := range text {
		digit := r >= '0' && r <= '9'
		switch {
		case digit && !number:
			b.WriteByte('#')
		case !digit && (!number || r != '.' && r != ':'):
			b.WriteRune(r)
		}
		number = digit || number && (r == '.' || r == ':')
	}
	return b.String()
}

// byName returns a text with the number of faults of each kind.
func (h *history) byName() string {
	count := map[string]int{}
	for _, f := range h.faults {
		count[f.name]++
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(count)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, count[name]))
	}
	return strings.Join(parts, ", ")
}

func later(a, b time.Time) time.Time {
	if cmp.Compare(a.UnixNano(), b.UnixNano()) > 0 {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
