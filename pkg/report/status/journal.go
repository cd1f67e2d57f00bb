// SPDX-License-Identifier: Apache-2.0

package status

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// Event is one entry of the log.
type Event struct {
	Time  time.Time `json:"time"`
	Error bool      `json:"error,omitempty"`
	Text  string    `json:"text"`
}

// Journal keeps the most recent log messages, except those with a verbosity above 0. It is
// safe for concurrent use.
type Journal struct {
	size int

	mu     sync.Mutex
	events []Event // oldest first
}

// NewJournal returns a journal that keeps the latest size messages, but at least one.
func NewJournal(size int) *Journal { return &Journal{size: max(size, 1)} }

// Events returns the kept messages, oldest first.
func (j *Journal) Events() []Event {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]Event{}, j.events...) // not nil
}

func (j *Journal) add(e Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.events = append(j.events, e)
	j.events = j.events[max(0, len(j.events)-j.size):]
}

// Logger returns a logger that writes each message to j and to the given logger. Both get only the beginning
// of values that are too long for a line.
func (j *Journal) Logger(to logr.Logger) logr.Logger {
	return to.WithSink(&tee{LogSink: to.GetSink(), journal: j})
}

// tee is a log sink that writes to the journal and to another sink. It adds a frame to the
// call stack, which the other sink must skip, so that log lines still name the caller.
type tee struct {
	logr.LogSink
	journal *Journal
	values  []any
}

// WithCallDepth implements logr.CallDepthLogSink.
func (t *tee) WithCallDepth(depth int) logr.LogSink {
	return &tee{LogSink: deeper(t.LogSink, depth), journal: t.journal, values: t.values}
}

// deeper makes a sink skip frames of the call stack, if it can.
func deeper(sink logr.LogSink, frames int) logr.LogSink {
	if d, ok := sink.(logr.CallDepthLogSink); ok {
		return d.WithCallDepth(frames)
	}
	return sink
}

func (t *tee) WithValues(kv ...any) logr.LogSink {
	kv = short(kv)
	return &tee{LogSink: t.LogSink.WithValues(kv...), journal: t.journal, values: append(slices.Clip(t.values), kv...)}
}

func (t *tee) WithName(name string) logr.LogSink {
	return &tee{LogSink: t.LogSink.WithName(name), journal: t.journal, values: t.values}
}

func (t *tee) Info(level int, msg string, kv ...any) {
	kv = short(kv)
	if level == 0 {
		t.journal.add(Event{Time: time.Now(), Text: text(msg, nil, t.values, kv)})
	}
	deeper(t.LogSink, 1).Info(level, msg, kv...)
}

func (t *tee) Error(err error, msg string, kv ...any) {
	kv = short(kv)
	if err != nil && oneline.Cut(err.Error()) != err.Error() {
		err = errors.New(oneline.Cut(err.Error()))
	}
	t.journal.add(Event{Time: time.Now(), Error: true, Text: text(msg, err, t.values, kv)})
	deeper(t.LogSink, 1).Error(err, msg, kv...)
}

// short returns kv with the beginning of each value that is too long, because values may come from other
// programs and from users.
func short(kv []any) []any {
	kv = slices.Clone(kv)
	for i, v := range kv {
		text := fmt.Sprint(v)
		if cut := oneline.Cut(text); cut != text {
			kv[i] = cut
		}
	}
	return kv
}

// text formats a message like klog, on one line.
func text(msg string, err error, values ...[]any) string {
	var b strings.Builder
	b.WriteString(msg)
	if err != nil {
		fmt.Fprintf(&b, " err=%q", err)
	}

	for _, kv := range values {
		for i := 0; i+1 < len(kv); i += 2 {
			format := " %v=%v"
			switch kv[i+1].(type) {
			case string, error, fmt.Stringer:
				format = " %v=%q"
			}
			fmt.Fprintf(&b, format, kv[i], kv[i+1])
		}
	}
	return oneline.Collapse(b.String())
}
