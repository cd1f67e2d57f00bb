// SPDX-License-Identifier: Apache-2.0

// Package job defines the list of tests that test/vm passes to the guest's init.
package job

import "time"

// Paths in the guest.
const (
	File      = "/jobs.json"       // a list of Job, as JSON
	Test2JSON = "/tests/test2json" // the program go tool test2json
	Port      = "/dev/ttyS1"       // the serial line to the host machine
)

// Job describes the tests of one package.
type Job struct {
	Package string        // import path
	Dir     string        // working directory of the tests
	Binary  string        // test program, built by go test -c
	Args    []string      // arguments of Binary
	End     time.Duration // uptime of the guest at which the tests must have ended
}

// Command returns the command that runs the tests, for a guest with the given uptime.
// Tests that still run at End fail and print their stacks, but they have at least a
// second.
func (j Job) Command(uptime time.Duration) []string {
	left := max(j.End-uptime, time.Second) // zero would mean no limit
	return append([]string{Test2JSON, "-t", "-p", j.Package, j.Binary, "-test.timeout=" + left.String()}, j.Args...)
}
