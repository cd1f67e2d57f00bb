// Package job is what the machine tells the guest's init to do.
package job

// Where the guest finds what init needs.
const (
	File      = "/jobs.json"       // a list of Job
	Test2JSON = "/tests/test2json" // go tool test2json
	Port      = "/dev/ttyS1"       // what goes to the machine
)

// Job is the tests of one package.
type Job struct {
	Package string   // import path
	Dir     string   // where they run
	Binary  string   // of go test -c
	Args    []string // for it
}
