// SPDX-License-Identifier: Apache-2.0

package loglimit

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/textlogger"
)

// TestLimit checks that of ten changes at once only the first Burst are reported, and that the next report
// contains the number of changes that were not.
func TestChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&out)))
		l, reported := NewChanges(Burst), 0
		change := func() {
			if log, ok := l.Next(log); ok {
				reported++
				log.Info("changed")
			}
		}
		for range 10 {
			change()
		}
		if reported != Burst || strings.Contains(out.String(), "changesNotLogged") {
			t.Errorf("%d changes reported, want %d:\n%s", reported, Burst, &out)
		}
		time.Sleep(every)
		change()
		if reported != Burst+1 || !strings.Contains(out.String(), "changesNotLogged=5") {
			t.Errorf("%d changes reported, want one more with the number of the others:\n%s", reported, &out)
		}
	})
}
