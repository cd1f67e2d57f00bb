// SPDX-License-Identifier: Apache-2.0

package loglimit

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

func TestRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const burst, passes = 10, 100
		l := NewRepairs(2, burst, "repaired", "times")
		start := time.Now()
		for i := range passes {
			l.Note(t.Context(), 3)
			if pause := l.Pause(); (pause > 0) != (i >= burst) {
				t.Errorf("pause of %s after %d passes, want none within the burst of %d", pause, i+1, burst)
			}
			time.Sleep(l.Pause())
		}
		if took, want := time.Since(start), (passes-burst)*time.Second/2; took < want-time.Second || took > want+time.Second {
			t.Errorf("%d passes with repairs took %s, want %s", passes, took, want)
		}
		time.Sleep(time.Minute)
		for range passes {
			l.Note(t.Context(), 0)
		}
		if pause := l.Pause(); pause != 0 {
			t.Errorf("pause of %s after passes without repairs, want none", pause)
		}
	})
}

func TestLogOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
		l := NewRepairs(2, 10, "repaired", "entries")
		l.Note(ctx, 0)
		if log.Len() > 0 {
			t.Errorf("log without a repair: %s", &log)
		}
		l.Note(ctx, 3)
		for start := time.Now(); time.Since(start) < 59*time.Second; time.Sleep(time.Second) {
			l.Note(ctx, 2)
		}
		if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, `"repaired" entries=3`) {
			t.Errorf("in the first minute: %s", text)
		}
		time.Sleep(time.Second)
		l.Note(ctx, 0)
		if text := log.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "entries=118") {
			t.Errorf("in the second minute: %s", text)
		}
	})
}
