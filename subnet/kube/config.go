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

// WatchConfig implements subnet.ConfigWatcher for the configuration file. It passes nil to sink if
// the file does not exist. It reads the file again every few seconds. Notifications of the kernel
// would not be sufficient, because the file may be on any file system, and in a ConfigMap's volume
// its path leads through a link that is replaced.
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
