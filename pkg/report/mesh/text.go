// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

const (
	// maxWords is the number of hosts up to which the cells in a terminal have words and figures.
	maxWords = 6
	// maxLetters is the number of hosts up to which a terminal shows every cell, as a letter.
	maxLetters = 40
	// maxLines is the greatest length of each list: of the broken paths, of the hosts without an answer
	// and of the worst hosts.
	maxLines = 10
)

// class is a range of round trips.
type class struct {
	below float64 // milliseconds
	mark  string  // one character for a cell
	text  string
}

func classes() [4]class {
	return [...]class{{1, "1", "less than 1 ms"}, {10, "2", "less than 10 ms"}, {100, "3", "less than 100 ms"}, {2 * maxRTT, "4", "100 ms or more"}}
}

// class returns the index in classes of the range of the round trip.
func (c Cell) class() int {
	all := classes()
	for i, one := range all[:len(all)-1] {
		if c.RTT < one.below {
			return i
		}
	}
	return len(all) - 1
}

// mark returns one character for a cell.
func (c Cell) mark() string {
	switch c.Result {
	case OK:
		return classes()[c.class()].mark
	case Unknown:
		return "?"
	}
	return strings.ToUpper(string(c.Result[:1]))
}

// words returns a few words for a cell.
func (c Cell) words() string {
	switch {
	case c.Result != OK:
		return string(c.Result)
	case c.RTT == 0:
		return "ok"
	}
	return fmt.Sprintf("%.2f ms", c.RTT)
}

// legend says what the marks mean.
func legend() string {
	var parts []string
	for _, c := range classes() {
		parts = append(parts, c.mark+" "+c.text)
	}
	all := results()
	for i := len(all) - 1; i >= 0; i-- {
		if all[i] != OK {
			parts = append(parts, Cell{Result: all[i]}.mark()+" "+string(all[i]))
		}
	}
	return strings.Join(parts, ", ")
}

// String returns the name of the host with its addresses.
func (h Host) String() string {
	return strings.Join(append([]string{h.Name}, oneline.Strings(h.PublicIPs)...), " ")
}

// Text writes the matrix for a terminal. With wide all cells have words. Without it, of more than maxLetters hosts only
// the worst are shown.
func (m *Matrix) Text(w io.Writer, wide bool) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	s := m.Summary()
	n := len(m.Hosts)
	letters := n > maxWords && n <= maxLetters && !wide
	if wide || n <= maxLetters {
		m.writeCells(t, letters)
	} else {
		m.writeWorst(t, "WORST FROM", s.From)
		m.writeWorst(t, "WORST TO", s.To)
	}
	if letters {
		fmt.Fprintln(t, legend())
	}

	fmt.Fprintln(t)
	fmt.Fprintln(t, "paths:", s.Counts)
	for _, p := range m.Broken(maxLines) {
		fmt.Fprintf(t, "%s -> %s: %s: %s\n", p.From, p.To, p.Result, p.Advice)
	}

	more(t, s.Broken, "broken paths")
	for _, i := range s.CutOff[:min(len(s.CutOff), maxLines)] {
		fmt.Fprintf(t, "pods of %s are cut off: %s\n", m.Hosts[i], m.CutOff(i))
	}
	more(t, len(s.CutOff), "hosts whose pods are cut off")
	for _, i := range s.Silent[:min(len(s.Silent), maxLines)] {
		fmt.Fprintf(t, "nothing is known from %s: %s\n", m.Hosts[i], m.Problem(i))
	}
	more(t, len(s.Silent), "hosts of which nothing is known")
	return t.Flush()
}

// more writes how many of n elements a list of at most maxLines has left out. It writes nothing if the list
// has all elements.
func more(w io.Writer, n int, what string) {
	if n > maxLines {
		fmt.Fprintf(w, "and %d more %s\n", n-maxLines, what)
	}
}

// writeCells writes every cell: with letters, or with words and the names of the hosts above.
func (m *Matrix) writeCells(w io.Writer, letters bool) {
	var names, labels []string
	for _, h := range m.Hosts {
		names = append(names, h.Name)
		labels = append(labels, h.String())
	}
	Grid(w, "FROM", names, labels, letters, func(from, to int) string {
		switch {
		case from == to:
			return "-"
		case letters:
			return m.Cell(from, to).mark()
		}
		return m.Cell(from, to).words()
	})
}

// Grid writes a cell for each pair, as rows whose cells tabs separate. Above the columns are names or, if numbered is
// set, numbers, which are then also before the labels of the rows.
func Grid(w io.Writer, corner string, names, labels []string, numbered bool, cell func(from, to int) string) {
	fmt.Fprint(w, corner)
	for to, name := range names {
		if numbered {
			fmt.Fprintf(w, "\t%d", to+1)
		} else {
			fmt.Fprint(w, "\tTO ", name)
		}
	}

	for from, label := range labels {
		fmt.Fprintln(w)
		if numbered {
			fmt.Fprintf(w, "%d ", from+1)
		}
		fmt.Fprint(w, label)
		for to := range names {
			fmt.Fprint(w, "\t", cell(from, to))
		}
	}
	fmt.Fprintln(w)
}

// writeWorst writes the hosts with most broken paths in one direction. counts has the numbers of each host
// in this direction.
func (m *Matrix) writeWorst(w io.Writer, title string, counts []Counts) {
	fmt.Fprintf(w, "%s\tBROKEN\tUNKNOWN\tOK\n", title)
	for _, i := range worst(counts, maxLines) {
		if counts[i].Broken == 0 {
			break
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\n", m.Hosts[i], counts[i].Broken, counts[i].Unknown, counts[i].OK)
	}
}
