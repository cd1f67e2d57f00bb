// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// StepClock makes the next flanneld of the host see what it would see if the clock had
// been stepped by d since the last flanneld ended. A process cannot have a clock of its
// own. But a starting flanneld compares the clock only with the times in its state
// files, so StepClock moves these by -d. It returns an error if they contain no time.
func (h *Host) StepClock(d time.Duration) error {
	files, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-*.json"))
	if err != nil {
		return err
	}

	moved := 0
	for _, file := range files {
		n, err := moveTimes(file, -d)
		if err != nil {
			return fmt.Errorf("step clock of %s: %w", h.Name(), err)
		}
		moved += n
	}
	if moved == 0 {
		return fmt.Errorf("step clock of %s: no time in %q", h.Name(), files)
	}
	return nil
}

// moveTimes adds d to all times in a JSON file.
func moveTimes(file string, d time.Duration) (moved int, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}

	var content any
	if err := json.Unmarshal(text, &content); err != nil {
		return 0, err
	}

	var move func(v any) any
	move = func(v any) any {
		switch v := v.(type) {
		case map[string]any:
			for k := range v {
				v[k] = move(v[k])
			}

		case []any:
			for i := range v {
				v[i] = move(v[i])
			}

		case string:
			if at, err := time.Parse(time.RFC3339Nano, v); err == nil && !at.IsZero() {
				moved++
				return at.Add(d).Format(time.RFC3339Nano)
			}
		}
		return v
	}

	if text, err = json.Marshal(move(content)); err != nil {
		return 0, err
	}
	return moved, os.WriteFile(file, text, 0o600)
}
