// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

func TestMain(m *testing.M) {
	lab.RunChild()
	os.Exit(m.Run())
}

// TestTorture checks that flanneld keeps all promises in a short run with few hosts. The seed is
// random.
//
//stages:rest it runs for more than a minute
func TestTorture(t *testing.T) {
	o := options{
		hosts: 5, duration: time.Minute, seed: rand.Uint64(), dir: t.TempDir(),
		flanneld: "../../bin/flanneld", etcd: "../../bin/tools/etcd-3.5,../../bin/tools/etcd-3.6",
	}
	var report strings.Builder
	err := run(t.Context(), o, &report)
	t.Log(report.String())
	if err != nil {
		t.Errorf("%v\nThe same run: %s", err, fmt.Sprintf("make torture TORTUREFLAGS='-seed %d -runs 1 -hosts %d -duration %s'", o.seed, o.hosts, o.duration))
	}
}
