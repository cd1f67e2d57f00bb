// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/test/vm/job"
)

func TestReport(t *testing.T) {
	const (
		pass = `{"Action":"pass","Package":"p","Test":"TestVMOne"}` + "\n"
		fail = `{"Action":"fail","Package":"p","Test":"TestVMTwo"}` + "\n"
		skip = `{"Action":"skip","Package":"p","Test":"TestVMTwo"}` + "\n"
		end  = `{"Action":"pass","Package":"p"}` + "\n"
		bad  = `{"Action":"fail","Package":"p"}` + "\n"
	)
	for _, tt := range []struct {
		name, said string
		err        string   // part of the error; empty: success is expected
		packages   []string // packages of the jobs; empty: only p
		out        string   // expected part of the output
	}{
		{name: "passed", said: pass + end, out: "1 tests passed"},
		{name: "failed", said: pass + fail + bad, err: "1 tests passed, not all"},
		{name: "skipped", said: pass + skip + end, err: "not all"},
		{name: "none", said: end, err: "no test ran in p"},
		{name: "none in one", said: pass + end + `{"Action":"pass","Package":"q"}` + "\n", packages: []string{"p", "q"}, err: "no test ran in q"},
		{name: "broken off", said: pass, err: "not all", out: "the tests did not end"},
		{name: "silent", err: "not all", out: "the tests did not end"},
		{name: "other lines", said: "{ not an event\n" + pass + end, out: "{ not an event"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			r := newReport(&out, false)
			if err := r.read(strings.NewReader(tt.said)); err != nil {
				t.Fatal(err)
			}
			if tt.packages == nil {
				tt.packages = []string{"p"}
			}
			var jobs []job.Job
			for _, p := range tt.packages {
				jobs = append(jobs, job.Job{Package: p})
			}
			err := r.close(jobs)
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("got error %v, want %q", err, tt.err)
			}
			if !strings.Contains(out.String(), tt.out) {
				t.Errorf("%q is missing in:\n%s", tt.out, &out)
			}
		})
	}
}
