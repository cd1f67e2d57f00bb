// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

func TestMain(m *testing.M) {
	lab.RunChild()
	os.Exit(m.Run())
}

// TestTorture checks that flanneld keeps all promises in a short run with few hosts. Each
// version gets another seed.
//
//stages:rest it runs for more than a minute
func TestTorture(t *testing.T) {
	o := options{
		hosts: 5, duration: time.Minute, seed: lab.Seed(t, "../../bin/flanneld"), dir: t.TempDir(),
		flanneld: "../../bin/flanneld", etcd: "../../bin/tools/etcd-3.5,../../bin/tools/etcd-3.6",
	}
	var report strings.Builder
	err := run(t.Context(), o, &report)
	t.Log(report.String())
	if err != nil {
		t.Errorf("%v\nThe same run: %s", err, fmt.Sprintf("make torture TORTUREFLAGS='-seed %d -runs 1 -hosts %d -duration %s'", o.seed, o.hosts, o.duration))
	}
}

// TestFailure checks that only a run that has broken promises reports some.
func TestFailure(t *testing.T) {
	cause := errors.New("no lab")
	for _, tt := range []struct {
		broken []string
		err    error
		want   string
	}{
		{nil, nil, "<nil>"},
		{nil, cause, "no lab"},
		{[]string{"one", "two"}, nil, "broken promises:\n  one\n  two"},
		{[]string{"one"}, cause, "broken promises:\n  one\nno lab"},
	} {
		if got := fmt.Sprint(failure(tt.broken, tt.err)); got != tt.want {
			t.Errorf("failure(%q, %v) = %q, want %q", tt.broken, tt.err, got, tt.want)
		}
	}
}

// TestRunWithoutLogsLeavesNoFolder checks that a run that has written no logs leaves nothing in the folder
// for temporary files. The run fails because etcd's program does not exist.
func TestRunWithoutLogsLeavesNoFolder(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	if err := run(t.Context(), options{hosts: 1, etcd: filepath.Join(dir, "missing")}, io.Discard); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v, want ErrNotExist", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("the run has left %v, %v", left, err)
	}
}
