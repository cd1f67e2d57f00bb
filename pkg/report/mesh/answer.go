// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unique"

	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/doctor"
)

// MaxAnswer returns the size in bytes of the largest answer that is accepted in a mesh of that many hosts.
// An answer that reports the paths to 5,000 hosts as broken in both families has 4 MB.
func MaxAnswer(hosts int) int { return min(256<<10+hosts*2<<10, 8<<20) }

// maxAdvice is the number of paths of each host whose advice is kept. It limits the memory, because a host
// may send a different text for each path.
const maxAdvice = 256

// answer is the part of a status.Report that a matrix needs. Lists remain text until they are read one
// element after the other, because an element may take a hundred times the memory of its text.
type answer struct {
	Lease    struct{ Key string }
	Network  struct{ Waiting *int }
	Reasons  []string // why the host is not ready
	Networks json.RawMessage
	Paths    *struct{ Worst json.RawMessage }
}

// Answer records body, the status in JSON that host i sent. If body is not usable, Answer records the
// reason.
func (m *Matrix) Answer(i int, body []byte) {
	r, err := m.parse(i, body)
	if err != nil {
		m.Fail(i, err)
		return
	}
	m.rows[i] = r
}

// held returns the text for Matrix.Held.
func (a answer) held() string {
	switch n := a.Network.Waiting; {
	case n == nil:
		return "it does not run NextBackend yet"
	case *n > 0:
		return fmt.Sprintf("it sends to %d peers by the present backend", *n)
	}
	return ""
}

func (m *Matrix) parse(i int, body []byte) (r row, err error) {
	var a answer
	if most := MaxAnswer(len(m.Hosts)); len(body) > most {
		return r, fmt.Errorf("its answer is larger than %d bytes", most)
	}
	if err := json.Unmarshal(body, &a); err != nil {
		return r, fmt.Errorf("its answer is not a status: %w", err)
	}

	switch {
	case len(a.Networks) > 0 && string(a.Networks) != "null":
		return r, errors.New("it serves several networks: choose one of them with --network")
	case a.Lease.Key != m.Hosts[i].Key:
		return r, fmt.Errorf("the host that answers there has the lease %q", a.Lease.Key)
	case a.Paths == nil:
		return row{held: a.held(), problem: "it does not check paths: start it with --probe"}, nil
	}
	r = m.newRow(a.held())
	for _, reason := range a.Reasons {
		if why, ok := strings.CutPrefix(reason, doctor.Part+": "); ok {
			r.cutOff = Printable(why)
		}
	}
	return r, eachPath(a.Paths.Worst, func(p paths.Result) error { return m.add(&r, i, p) })
}

// Set records the paths of host i. If one is wrong, Set records the reason.
func (m *Matrix) Set(i int, all []paths.Result) {
	r := m.newRow("")
	for _, p := range all {
		if err := m.add(&r, i, p); err != nil {
			m.Fail(i, err)
			return
		}
	}
	m.rows[i] = r
}

func (m *Matrix) newRow(held string) row {
	return row{held: held, cells: make([]cell, len(m.Hosts)), advice: map[int]unique.Handle[string]{}}
}

// eachPath calls f with each path of a list in JSON. It ends with the first error, and adds the number of
// the path, counted from 1.
func eachPath(list json.RawMessage, f func(paths.Result) error) error {
	fail := func(n int, err error) error { return fmt.Errorf("its answer has a wrong path %d: %w", n, err) }
	if len(list) == 0 || list[0] != '[' {
		return errors.New("its answer has no list of paths")
	}

	d := json.NewDecoder(bytes.NewReader(list))
	_, _ = d.Token() // the bracket

	for n := 1; d.More(); n++ {
		var p paths.Result
		if err := d.Decode(&p); err != nil {
			return fail(n, err)
		}
		if err := f(p); err != nil {
			return fail(n, err)
		}
	}
	return nil // the syntax of the list is right, because that of the answer is
}

// maxRTT is the longest round trip in milliseconds that is accepted. Probes wait only for seconds.
const maxRTT = 1e6

// add records a path of host i in its row r. Of two paths to the same host it keeps the worse one. It
// returns an error if the fields of p contradict each other or have impossible values. It ignores a path
// to host i itself, and a path to a host that is not in the matrix, because that host has joined or left
// in the meantime.
func (m *Matrix) add(r *row, i int, p paths.Result) error {
	if p.RTT < 0 || p.RTT > maxRTT {
		return fmt.Errorf("a round trip of %v ms", p.RTT)
	}

	if p.OK != (p.Broken == "") || Result(p.Broken) == OK {
		return fmt.Errorf("ok is %v, and what is broken is %q", p.OK, p.Broken)
	}

	result := Result(p.Result())
	all := results()
	rank := slices.Index(all[:], result)
	if rank < 0 {
		return fmt.Errorf("the result is %q, expected one of %v", p.Broken, all)
	}

	to, known := m.index[p.Peer]
	if !known || to == i {
		return nil
	}

	now := cell{result: uint8(rank), oneWay: p.OneWay && result.Broken()} //nolint:gosec // results has six elements
	if result == OK {
		now.rtt = float32(p.RTT)
	}
	if was := r.cells[to]; was.result > now.result || was.result == now.result && was.rtt >= now.rtt && was.result != 0 {
		return nil // the path of the other family is worse
	}

	r.cells[to] = now
	delete(r.advice, to)
	if result.Broken() && p.Advice != "" && len(r.advice) < maxAdvice {
		r.advice[to] = unique.Make(Printable(p.Advice))
	}
	return nil
}
