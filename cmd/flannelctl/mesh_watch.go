// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/mesh"
)

// findEvery is the time after which the list of hosts is read again. On Kubernetes that is a list of all
// pods of flanneld and of all Nodes.
const findEvery = time.Minute

// watchMesh prints the paths that do not work and the hosts that do not answer, and then every change.
func watchMesh(ctx context.Context, w io.Writer, f *meshFlags) error {
	c, err := f.find(ctx)
	if err != nil {
		return err
	}
	defer func() { c.close() }()
	var known troubles
	found, tick := time.Now(), time.NewTicker(f.interval)
	defer tick.Stop()
	for {
		if time.Since(found) > findEvery {
			if now, err := f.find(ctx); err == nil { // without the store the hosts are still those of before
				c.close()
				c, found = now, time.Now()
			}
		}
		m, err := c.collect(ctx, f.timeout)
		if err != nil { // the command was interrupted
			return nil //nolint:nilerr // that is how a watch ends
		}
		if known == nil {
			fmt.Fprintln(w, time.Now().Format(time.TimeOnly), "=", m.Summary().Counts)
		}
		now := troublesOf(m, known)
		printChanges(w, known, now)
		known = now
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// pair is the path from one host to another, by name. Without a second host it is about the first one.
type pair struct{ from, to string }

func (p pair) String() string {
	if p.to == "" {
		return p.from
	}
	return p.from + " -> " + p.to
}

// trouble is a path that does not work, or a host of which nothing is known.
type trouble struct {
	result mesh.Result
	text   string
}

// troubles are all of them. It is nil before the hosts were asked.
type troubles map[pair]trouble

// troublesOf returns the troubles of a mesh. A path that did not work stays one until its host says that
// it works.
func troublesOf(m *mesh.Matrix, known troubles) troubles {
	now := troubles{}
	for _, p := range m.Broken(-1) {
		now[pair{m.Hosts[p.From].Name, m.Hosts[p.To].Name}] = trouble{p.Result, string(p.Result) + ": " + p.Advice}
	}
	number := map[string]int{}
	for i, h := range m.Hosts {
		number[h.Name] = i
		if why := m.Problem(i); why != "" {
			now[pair{from: h.Name}] = trouble{mesh.Unknown, "nothing is known: " + why}
		}
	}
	for path, was := range known {
		from, okFrom := number[path.from]
		to, okTo := number[path.to] // not if the trouble is one of a host
		if okFrom && okTo && m.Cell(from, to).Result == mesh.Unknown {
			now[path] = was
		}
	}
	return now
}

// printChanges prints troubles that are new or different, and those that have ended.
func printChanges(w io.Writer, known, now troubles) {
	line := func(sign string, p pair, text string) {
		fmt.Fprintln(w, time.Now().Format(time.TimeOnly), sign, p, text)
	}
	order := func(a, b pair) int { return strings.Compare(a.String(), b.String()) }
	for _, p := range slices.SortedFunc(maps.Keys(now), order) {
		if known[p].result != now[p].result {
			line("!", p, now[p].text)
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(known), order) {
		if _, still := now[p]; !still {
			line("+", p, "ok")
		}
	}
}
