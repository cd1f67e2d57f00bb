// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/flanneld/flanneld/subnet"
)

// Config reads the configuration. See subnet.Manager.
func (m *Manager) Config(ctx context.Context) (subnet.Config, error) {
	if ctx.Err() != nil {
		return subnet.Config{}, ctx.Err()
	}
	raw, err := os.ReadFile(m.cfg.NetConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return subnet.Config{}, fmt.Errorf("%w: file %s does not exist", subnet.ErrNoConfig, m.cfg.NetConfig)
	}
	if err != nil {
		return subnet.Config{}, fmt.Errorf("%w: %w", subnet.ErrNoConfig, err)
	}
	cfg, err := subnet.ParseConfig(raw)
	if err != nil {
		return subnet.Config{}, fmt.Errorf("file %s: %w", m.cfg.NetConfig, err)
	}
	return cfg, nil
}

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
