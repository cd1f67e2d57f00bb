// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/report/mesh"
)

const (
	// findEvery is the time after which a watch reads the list of hosts again. It is long because on
	// Kubernetes this lists all Nodes and all pods of flanneld.
	findEvery = time.Minute
	// leastInterval is the least value of --interval.
	leastInterval = time.Second
	// maxWatched is the number of broken paths that a watch lists. It only counts further ones.
	maxWatched = 1000
	// maxChanges limits the lines about one kind of change that are printed at once.
	maxChanges = 50
)

// watchMesh prints the paths that do not work and the hosts that do not answer, and then every change,
// until ctx ends. It returns an error only if it cannot find the hosts at the beginning.
func watchMesh(ctx context.Context, w io.Writer, f *meshFlags) error {
	c, err := f.find(ctx)
	if err != nil {
		return err
	}
	defer func() { c.close() }()
	var reported meshReport
	found := time.Now()
	for {
		begin := time.Now()
		if time.Since(found) > findEvery {
			if now, err := f.find(ctx); err == nil { // if the store does not answer, continue with the known hosts
				c.close()
				c, found = now, time.Now()
			}
		}

		m, err := c.collect(ctx, f.timeout)
		if err != nil { // the command was interrupted
			return nil //nolint:nilerr // that is how a watch ends
		}
		reported.update(w, m)
		if wait.For(ctx, restAfter(time.Since(begin), f.interval)) != nil {
			return nil
		}
	}
}

// restAfter returns the pause between the end of a round of questions, which took that long, and the
// next round. The pause is at least as long as the round was, even if that exceeds the interval, so
// that slow hosts are asked at most half of the time.
func restAfter(took, interval time.Duration) time.Duration { return max(interval-took, took) }

// meshReport records what a watch has printed. Its zero value means that nothing was printed yet.
type meshReport struct {
	// known contains broken paths and, without To, hosts from which nothing is known, by path or name of the host. It is
	// nil before the first update.
	known    map[string]mesh.CellData
	unlisted int // number of broken paths that are not in known, which is limited to maxWatched paths
}

// update prints how m differs from the mesh of the last update: failures that are new or have another
// result, failures that have ended, and those of hosts that are gone. In the first update, and if the
// number of unlisted paths has changed, it prints a summary before them.
func (r *meshReport) update(w io.Writer, m *mesh.Matrix) {
	number := map[string]int{}
	for i, h := range m.Hosts {
		number[h.Name] = i
	}

	now, unlisted := r.present(m, number)
	if r.known == nil || unlisted != r.unlisted {
		line := fmt.Sprint(m.Summary().Counts)
		if unlisted > 0 {
			line += fmt.Sprintf("; %d of the broken paths are not listed", unlisted)
		}
		fmt.Fprintln(w, time.Now().Format(time.TimeOnly), "=", line)
	}

	var begun, ended, gone []string
	for _, path := range slices.Sorted(maps.Keys(now)) {
		if c := now[path]; r.known[path].Result != c.Result {
			begun = append(begun, fmt.Sprintf("%s %s: %s", path, c.Result, c.Advice))
		}
	}

	for _, path := range slices.Sorted(maps.Keys(r.known)) {
		was := r.known[path]
		_, from := number[was.From]
		_, to := number[was.To]
		switch _, still := now[path]; {
		case still:
		case !from || !to && was.To != "":
			gone = append(gone, path+" gone")
		default:
			ended = append(ended, path+" ok")
		}
	}

	printChanges(w, "!", begun)
	printChanges(w, "+", ended)
	printChanges(w, "-", gone)
	r.known = now
	r.unlisted = unlisted
}

// present returns the present failures of a mesh. They contain at most maxWatched paths; unlisted is
// the number of the other broken paths. number is the index of each host in m.Hosts, by name. If
// nothing is known about a path any more, its last known failure remains.
func (r *meshReport) present(m *mesh.Matrix, number map[string]int) (now map[string]mesh.CellData, unlisted int) {
	now = map[string]mesh.CellData{}
	unlisted = m.Summary().Broken
	for path, was := range r.known {
		from, okFrom := number[was.From]
		to, okTo := number[was.To] // false if the failure is about a host
		if !okFrom || !okTo {
			continue
		}

		switch c := m.Cell(from, to); {
		case c.Result.Broken():
			now[path] = mesh.CellData{From: was.From, To: was.To, Cell: c}
			unlisted--
		case c.Result == mesh.Unknown:
			now[path] = was
		}
	}

	for _, p := range m.Broken(maxWatched + len(r.known)) {
		path := p.From + " -> " + p.To
		if _, known := now[path]; !known && len(now) < maxWatched {
			now[path] = p
			unlisted--
		}
	}

	for i, h := range m.Hosts {
		if why := m.Problem(i); why != "" {
			now[h.Name] = mesh.CellData{From: h.Name, Cell: mesh.Cell{Result: "nothing is known", Advice: why}}
		}
	}
	return now, unlisted
}

// printChanges prints at most maxChanges changes of one kind, a line each, and the number of the rest.
func printChanges(w io.Writer, sign string, changes []string) {
	at := time.Now().Format(time.TimeOnly)
	for _, c := range changes[:min(len(changes), maxChanges)] {
		fmt.Fprintln(w, at, sign, c)
	}
	if n := len(changes) - maxChanges; n > 0 {
		fmt.Fprintln(w, at, sign, "and", n, "more")
	}
}
