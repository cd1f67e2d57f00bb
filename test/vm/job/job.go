// Package job is what the machine tells the guest's init to do.
package job

import "time"

// Where the guest finds what init needs.
const (
	File      = "/jobs.json"       // a list of Job
	Test2JSON = "/tests/test2json" // go tool test2json
	Port      = "/dev/ttyS1"       // what goes to the machine
)

// Job is the tests of one package.
type Job struct {
	Package string        // import path
	Dir     string        // where they run
	Binary  string        // of go test -c
	Args    []string      // for it
	End     time.Duration // of the guest's uptime, by when they have ended
}

// Command is what runs the tests in a guest that is up for so long. Tests that hang
// say where, and fail, when their time is over.
func (j Job) Command(uptime time.Duration) []string {
	left := max(j.End-uptime, time.Second) // 0 would be no limit
	return append([]string{Test2JSON, "-t", "-p", j.Package, j.Binary, "-test.timeout=" + left.String()}, j.Args...)
}
