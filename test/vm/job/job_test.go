// SPDX-License-Identifier: Apache-2.0

package job

import (
	"slices"
	"testing"
	"time"
)

func TestCommand(t *testing.T) {
	j := Job{Package: "p", Binary: "/tests/0.test", Args: []string{"-test.run=^TestVM"}, End: 9 * time.Minute}
	for uptime, want := range map[time.Duration]string{
		0:                "9m0s",
		2 * time.Minute:  "7m0s",
		9 * time.Minute:  "1s",
		10 * time.Minute: "1s",
	} {
		got := j.Command(uptime)
		if !slices.Contains(got, "-test.timeout="+want) || !slices.Contains(got, "-test.run=^TestVM") {
			t.Errorf("after %v: got %q, want a timeout of %s", uptime, got, want)
		}
	}
}
