// SPDX-License-Identifier: Apache-2.0

// Package mesh puts what all hosts know of their paths into one matrix. A row is about
// the paths from one host to all others.
//
//   - answer.go reads the status of one host.
//   - summary.go counts, and finds the worst hosts.
//   - data.go, text.go and svg.go show a matrix: for programs, in a terminal and as a picture.
//
// An answer comes from another host, which may be hostile. So names come only from the caller, and
// text from answers is limited and escaped.
package mesh

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unique"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/probe/paths"
)

// Host is a row and a column of a Matrix.
type Host struct {
	Key       string       `json:"key"`  // of its lease
	Name      string       `json:"name"` // for people
	PublicIPs []netip.Addr `json:"publicIPs"`
}

// Result is the result of the check of a path. If the path is broken, it is the broken part, a paths.Part.
type Result string

// The results of paths that are not broken.
const (
	OK      Result = "ok"
	Unknown Result = "unknown" // the host has not answered, has not checked this path, or cannot judge it
)

// Broken reports whether it is known that a path with this result does not work.
func (r Result) Broken() bool { return r != OK && r != Unknown }

// Cell is what one host knows of the paths to another one. If there is a path in each address family, Cell
// describes the worse one.
type Cell struct {
	Result Result  `json:"result"`
	RTT    float64 `json:"rttMilliseconds,omitempty"` // zero unless the path works
	Advice string  `json:"advice,omitempty"`          // one line for operators
}

// Matrix is what all hosts know of their paths. Different goroutines may call Answer, Set and Fail for different
// hosts. All other methods may be called only after these calls have returned.
type Matrix struct {
	Hosts []Host

	index map[string]int // of the hosts, by key
	rows  []row
}

// row is what one host knows.
type row struct {
	problem string                        // why the paths are not known; empty if they are
	held    string                        // see Held
	cutOff  string                        // see CutOff
	cells   []cell                        // by the number of the other host; nil if the paths are not known
	advice  map[int]unique.Handle[string] // by the number of the other host; for at most maxAdvice paths, which have few different texts
}

// cell is a Cell in little memory, because a matrix of 5,000 hosts has 25 million cells.
type cell struct {
	result uint8 // index in results
	oneWay bool  // see paths.Result
	rtt    float32
}

// results returns all results. Each result is worse than those before it. Unknown is the first one, so
// that it is the result of the zero cell, and every other result replaces it.
func results() [6]Result {
	return [...]Result{Unknown, OK, Result(paths.Checksum), Result(paths.MTU), Result(paths.Tunnel), Result(paths.Underlay)}
}

// New returns a matrix of hosts that have not answered. It sorts the hosts by subnet or name. The number of
// a host in other methods is its index in Matrix.Hosts.
func New(hosts []Host) *Matrix {
	m := &Matrix{Hosts: slices.SortedFunc(slices.Values(hosts), compareHosts), index: make(map[string]int, len(hosts)), rows: make([]row, len(hosts))}
	for i := range m.Hosts {
		h := &m.Hosts[i]
		h.Name = Printable(h.Name)
		m.index[h.Key] = i
		m.Fail(i, errors.New("it was not asked"))
	}
	return m
}

// Fail records err as the reason why no paths are known from host i.
func (m *Matrix) Fail(i int, err error) {
	why := Printable(err.Error())
	m.rows[i] = row{problem: why, held: why}
}

// Held returns why a migration of the backend must not be finished yet: host i still sends to peers by the present
// backend, or nothing is known about that. Otherwise it returns an empty string. Host i need not check paths.
func (m *Matrix) Held(i int) string { return m.rows[i].held }

// Problem returns why nothing is known from host i, or an empty string.
func (m *Matrix) Problem(i int) string { return m.rows[i].problem }

// CutOff returns why pods of host i do not reach others although the paths between hosts work, as the host
// itself says, or an empty string.
func (m *Matrix) CutOff(i int) string { return m.rows[i].cutOff }

// Cell returns what host from knows of the paths to host to. The result is Unknown if host from has not
// answered, and for a host and itself.
func (m *Matrix) Cell(from, to int) Cell {
	now := Cell{Result: m.result(from, to)}
	if now.Result == Unknown {
		return now
	}
	r := m.rows[from]
	now.RTT = float64(r.cells[to].rtt)
	if advice, ok := r.advice[to]; ok {
		now.Advice = advice.Value()
	}
	if d := m.direction(from, to); d != "" && now.Result.Broken() {
		now.Advice = strings.TrimSuffix(d+"; "+now.Advice, "; ")
	}
	return now
}

func (m *Matrix) result(from, to int) Result {
	if from == to || m.rows[from].cells == nil {
		return Unknown
	}
	return results()[m.rows[from].cells[to].result]
}

// direction says which packets between two hosts are lost, if one of them knows. That is the sender.
func (m *Matrix) direction(a, b int) string {
	for _, p := range [][2]int{{a, b}, {b, a}} {
		if cells := m.rows[p[0]].cells; cells != nil && cells[p[1]].oneWay {
			return fmt.Sprintf("packets from %[1]s to %[2]s are lost, %[2]s to %[1]s arrive", m.Hosts[p[0]].Name, m.Hosts[p[1]].Name)
		}
	}
	return ""
}

// maxText is the size in bytes of the longest text of an answer that is shown whole. It counts the text
// before characters are escaped.
const maxText = 400

// Printable returns text from another host as one line of limited length that is safe to print:
// characters that are not visible are escaped.
func Printable(text string) string {
	quoted := strconv.Quote(oneline.Shorten(text, maxText))
	return strings.ReplaceAll(strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`), `\\`, `\`)
}

// compareHosts orders hosts whose names are subnets by these subnets, before all others, which it orders by
// name.
func compareHosts(a, b Host) int {
	x, errX := netip.ParsePrefix(a.Name)
	y, errY := netip.ParsePrefix(b.Name)
	switch {
	case errX == nil && errY != nil:
		return -1
	case errX != nil && errY == nil:
		return 1
	}
	return cmp.Or(x.Compare(y), cmp.Compare(a.Name, b.Name))
}
