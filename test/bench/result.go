// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/test/chart"
	"github.com/flanneld/flanneld/test/figures"
)

// report is the result of one run of the benchmark.
type report struct {
	Commit string    `json:"commit"` // of flanneld, as its --version prints it
	Date   time.Time `json:"date"`
	figures.Machine
	Quick   bool    `json:"quick"`
	Seconds float64 `json:"seconds"`
	// OthersCPU is how many CPUs other programs used on average. Above 0.1 the machine
	// was not quiet enough.
	OthersCPU float64   `json:"othersCPU"`
	Metrics   []*metric `json:"metrics"`
}

// metric is a measured quantity, with one value for each round.
type metric struct {
	Group  string    `json:"group"` // the group of related metrics that this one belongs to
	Name   string    `json:"name"`
	N      int       `json:"n"` // number of peers, networks, hosts or foreign rules; -1 if there is none
	Unit   string    `json:"unit"`
	Values []float64 `json:"values"`
	// Target is the largest allowed median; nil if there is no target.
	Target *float64 `json:"target,omitempty"`
	// Floor makes Target the smallest allowed median.
	Floor bool `json:"floor,omitempty"`
}

func (m *metric) median() float64 { return quantile(m.Values, 0.5) }

// met reports whether the median meets the target. It also returns true if there is no
// target. A target of zero must be met in every round.
func (m *metric) met() bool {
	switch {
	case m.Target == nil:
		return true
	case m.Floor:
		return m.median() >= *m.Target
	case *m.Target == 0:
		return slices.Max(m.Values) <= 0 // a value below zero counts as no growth
	default:
		return m.median() <= *m.Target
	}
}

// quantile returns the value below which the fraction q of the sorted values lies,
// interpolated between two of them. It returns NaN if there are no values.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low+1 == len(sorted) {
		return sorted[low]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}

// add records the value of a metric in one round. Only the first call for a metric uses
// target, which may be missing.
func (r *report) add(group, name string, n int, unit string, value float64, target ...float64) {
	if m := r.find(group, name, n); m != nil {
		m.Values = append(m.Values, value)
		return
	}
	m := &metric{Group: group, Name: name, N: n, Unit: unit, Values: []float64{value}}
	if len(target) > 0 {
		m.Target = &target[0]
	}
	r.Metrics = append(r.Metrics, m)
}

func (r *report) find(group, name string, n int) *metric {
	i := slices.IndexFunc(r.Metrics, func(m *metric) bool { return m.Group == group && m.Name == name && m.N == n })
	if i < 0 {
		return nil
	}
	return r.Metrics[i]
}

func (r *report) sizes(group, name string) (sizes []int) {
	for _, m := range r.Metrics {
		if m.Group == group && m.Name == name {
			sizes = append(sizes, m.N)
		}
	}
	return sizes
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func mb(bytes float64) float64 { return bytes / 1e6 }

// groups returns the metrics by group. The groups are in the order of their first value,
// and the metrics of a group in the order of N.
func (r *report) groups() [][]*metric {
	var names []string
	by := map[string][]*metric{}
	for _, m := range r.Metrics {
		if by[m.Group] == nil {
			names = append(names, m.Group)
		}
		by[m.Group] = append(by[m.Group], m)
	}

	var groups [][]*metric
	for _, name := range names {
		slices.SortStableFunc(by[name], func(a, b *metric) int { return cmp.Compare(a.N, b.N) })
		groups = append(groups, by[name])
	}
	return groups
}

func (r *report) heading() string {
	size := "full"
	if r.Quick {
		size = "quick"
	}
	return fmt.Sprintf("%s, %s run of %.0f s on %s, %s, other work on %.2f of them",
		r.Commit, size, r.Seconds, r.Date.UTC().Format("2006-01-02 15:04 UTC"), r.Machine, r.OthersCPU)
}

func (r *report) verdict() string {
	targets := 0
	missed := 0
	for _, m := range r.Metrics {
		if m.Target != nil {
			targets++
		}
		if !m.met() {
			missed++
		}
	}

	return fmt.Sprintf("%d of %d targets met", targets-missed, targets)
}

// The number of measures beyond which a table has only those with a target: on the page of the
// documentation, and in a terminal.
const (
	judgedMeasures = 12
	allMeasures    = math.MaxInt
)

// markdown writes a table for each group, with a column for each number of peers.
func (r *report) markdown(out io.Writer, tableSize int) {
	fmt.Fprintf(out, "%s.\n%s.\n", r.heading(), r.verdict())

	for _, group := range r.groups() {
		var sizes []int
		var names []string
		for _, m := range group {
			if !slices.Contains(sizes, m.N) {
				sizes = append(sizes, m.N)
			}
			if !slices.Contains(names, m.Name) {
				names = append(names, m.Name)
			}
		}

		fmt.Fprintf(out, "\n### %s\n\n| measure |", group[0].Group)
		for _, n := range sizes {
			if n < 0 {
				fmt.Fprint(out, " value |")
			} else {
				fmt.Fprintf(out, " N=%d |", n)
			}
		}

		fmt.Fprintf(out, "\n|%s\n", strings.Repeat("---|", len(sizes)+1))

		for _, name := range names {
			title := name
			cells := make([]string, len(sizes))
			judged := false
			for i, n := range sizes {
				if m := r.find(group[0].Group, name, n); m != nil {
					title = m.title()
					cells[i] = m.cell()
					judged = judged || m.Target != nil
				}
			}
			if len(names) > tableSize && !judged {
				continue
			}
			fmt.Fprintf(out, "| %s | %s |\n", title, strings.Join(cells, " | "))
		}
	}
}

func (m *metric) title() string {
	if m.Unit == "" {
		return m.Name
	}
	return m.Name + ", " + m.Unit
}

func (m *metric) cell() string {
	text := chart.Number(m.median())
	if least, most := slices.Min(m.Values), slices.Max(m.Values); least < most {
		text += fmt.Sprintf(" (%s–%s)", chart.Number(least), chart.Number(most))
	}
	if m.Target == nil {
		return text
	}

	sign := "≤"
	if m.Floor {
		sign = "≥"
	}

	text += " " + sign + chart.Number(*m.Target)
	if !m.met() {
		text += " missed"
	}
	return text
}
