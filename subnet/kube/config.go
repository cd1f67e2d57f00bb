// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"time"
)

// WatchConfig calls sink with the text of the configuration file at once and
// whenever that has changed, nil if there is no file. It blocks until ctx ends,
// with its error. The file is read again every few seconds: in a ConfigMap's
// volume it is a link, through a link that is swapped, which may be on any file
// system.
func (m *Manager) WatchConfig(ctx context.Context, sink func(text []byte)) error {
	ticker := time.NewTicker(m.timing.poll)
	defer ticker.Stop()
	var before []byte
	for first := true; ; first = false {
		text, err := os.ReadFile(m.cfg.NetConfig)
		gone := errors.Is(err, fs.ErrNotExist)
		if (err == nil || gone) && (first || gone != (before == nil) || !bytes.Equal(text, before)) {
			before = text
			sink(text)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}
