// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/flanneld/flanneld/test/vm/job"
)

// report prints the guest's output and counts the results of tests.
type report struct {
	out    io.Writer
	json   bool
	passed map[string]int  // number of passed tests, by package
	failed int             // number of failed and skipped tests, and of failed packages
	ended  map[string]bool // packages whose tests have ended
}

func newReport(out io.Writer, asJSON bool) *report {
	return &report{out: out, json: asJSON, passed: map[string]int{}, ended: map[string]bool{}}
}

// event is a line of go test -json. See `go doc test2json`.
type event struct {
	Action, Package, Test, Output string `json:",omitempty"`
}

func (r *report) read(from io.Reader) error {
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadString('\n')
		r.line(line)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read from guest: %w", err)
		}
	}
}

func (r *report) line(line string) {
	var e event
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &e) != nil {
		fmt.Fprint(r.out, line)
		return
	}

	switch {
	case e.Test == "" && (e.Action == "pass" || e.Action == "fail"):
		r.ended[e.Package] = true
		if e.Action == "fail" {
			r.failed++
		}
	case e.Action == "pass":
		r.passed[e.Package]++
	case e.Action == "fail", e.Action == "skip":
		r.failed++
	}
	if r.json {
		fmt.Fprint(r.out, line)
	} else {
		fmt.Fprint(r.out, e.Output)
	}
}

// close reports and counts every package whose tests did not end as failed. It
// returns an error if a test failed or was skipped, or if a package has no passed
// test.
func (r *report) close(jobs []job.Job) error {
	for _, j := range jobs {
		if r.ended[j.Package] {
			continue
		}

		for _, e := range []event{
			{Action: "output", Package: j.Package, Output: "the tests did not end\n"},
			{Action: "fail", Package: j.Package},
		} {
			text, err := json.Marshal(e)
			if err != nil {
				return err
			}
			r.line(string(text) + "\n")
		}
	}

	total := 0
	for _, n := range r.passed {
		total += n
	}
	if r.failed > 0 {
		return fmt.Errorf("%d tests passed, not all", total)
	}

	for _, j := range jobs {
		if r.passed[j.Package] == 0 {
			return fmt.Errorf("no test ran in %s", j.Package)
		}
	}
	if !r.json {
		fmt.Fprintf(r.out, "%d tests passed\n", total)
	}
	return nil
}
