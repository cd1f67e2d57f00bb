// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"fmt"
	"slices"
)

// Counts are the numbers of pairs of hosts with each result.
type Counts struct {
	OK      int `json:"ok"`
	Broken  int `json:"broken"`
	Unknown int `json:"unknown"`
}

// String returns the numbers in words.
func (c Counts) String() string {
	return fmt.Sprintf("%d ok, %d broken, %d unknown", c.OK, c.Broken, c.Unknown)
}

func (c *Counts) add(r Result) {
	switch r {
	case OK:
		c.OK++
	case Unknown:
		c.Unknown++
	default:
		c.Broken++
	}
}

// Summary counts a Matrix.
type Summary struct {
	Counts
	From   []Counts // paths from a host, by its number
	To     []Counts // paths to a host, by its number
	Silent []int    // numbers of the hosts from which no paths are known
	CutOff []int    // numbers of the hosts whose pods are cut off, see Matrix.CutOff
}

// Summary counts the paths.
func (m *Matrix) Summary() Summary {
	n := len(m.Hosts)
	s := Summary{From: make([]Counts, n), To: make([]Counts, n)}
	for from, r := range m.rows {
		if r.cells == nil {
			s.Silent = append(s.Silent, from)
		}
		if r.cutOff != "" {
			s.CutOff = append(s.CutOff, from)
		}

		for to := range n {
			if from == to {
				continue
			}
			result := m.result(from, to)
			s.add(result)
			s.From[from].add(result)
			s.To[to].add(result)
		}
	}
	return s
}

// Broken returns paths that do not work, at most limit of them, in the order of hosts. If there are more,
// the hosts that report them have equal parts of the limit, so that no host can hide what others report.
func (m *Matrix) Broken(limit int) []CellData {
	var pairs [][2]int
	next := make([]int, len(m.rows)) // by host: the first path that was not looked at
	for found := true; found; {
		found = false
		for from := range m.rows { // one more of each host
			to := next[from]
			for to < len(m.rows) && !m.result(from, to).Broken() {
				to++
			}
			next[from] = to + 1
			if to < len(m.rows) && len(pairs) < limit {
				pairs = append(pairs, [2]int{from, to})
				found = true
			}
		}
	}

	slices.SortFunc(pairs, func(a, b [2]int) int { return slices.Compare(a[:], b[:]) })
	broken := make([]CellData, len(pairs))
	for i, p := range pairs {
		broken[i] = m.data(p[0], p[1])
	}
	return broken
}

// worst returns the numbers of the n worst hosts, the worst first: those with most broken paths in counts,
// and then those with most unknown ones.
func worst(counts []Counts, n int) []int {
	all := make([]int, len(counts))
	for i := range all {
		all[i] = i
	}
	slices.SortStableFunc(all, func(a, b int) int {
		return cmp.Or(cmp.Compare(counts[b].Broken, counts[a].Broken), cmp.Compare(counts[b].Unknown, counts[a].Unknown))
	})
	return all[:min(n, len(all))]
}

// drawn returns the numbers of the hosts that a picture of at most n hosts shows, in ascending order. If
// there are more hosts, the picture shows the worst ones, by their paths in both directions.
func (m *Matrix) drawn(n int) []int {
	s := m.Summary()
	both := make([]Counts, len(m.Hosts))
	for i := range both {
		both[i] = Counts{Broken: s.From[i].Broken + s.To[i].Broken, Unknown: s.From[i].Unknown + s.To[i].Unknown}
	}
	chosen := worst(both, n)
	slices.Sort(chosen)
	return chosen
}
