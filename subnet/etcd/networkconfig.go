// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/flanneld/flanneld/subnet"
)

// Config reads the configuration. See subnet.Manager.
func (m *Manager) Config(ctx context.Context) (subnet.Config, error) {
	var cfg subnet.Config
	err := m.retry(ctx, sourceConfig, func() (err error) {
		cfg, _, err = m.config(ctx)
		return err
	})
	return cfg, err
}

// config reads the configuration once. It returns subnet.ErrNoConfig, wrapped, if there is none. It
// also returns the pools, so that a configuration without usable pools is refused as early as one
// that cannot be read.
func (m *Manager) config(ctx context.Context) (cfg subnet.Config, pools []subnet.Pool, err error) {
	text, _, err := m.configText(ctx)
	switch {
	case err != nil:
		return subnet.Config{}, nil, err
	case text == nil:
		return subnet.Config{}, nil, fmt.Errorf("%w: etcd key %s does not exist (it must be put with the etcd v3 API)",
			subnet.ErrNoConfig, m.configKey())
	}

	if cfg, err = subnet.ParseConfig(text); err == nil {
		pools, err = cfg.Pools()
	}
	if err != nil {
		return subnet.Config{}, nil, fmt.Errorf("etcd key %s: %w", m.configKey(), err)
	}
	return cfg, pools, nil
}

// configText reads the text of the configuration, which is nil if there is none, and the present revision of the
// store.
func (m *Manager) configText(ctx context.Context) (text []byte, revision int64, err error) {
	resp, err := m.get(ctx, m.configKey())
	if err != nil {
		return nil, 0, err
	}
	for _, kv := range resp.Kvs {
		text = given(kv.Value)
	}
	return text, resp.Header.Revision, nil
}

// reportConfig reads the configuration, passes it to OnConfig, and records in cache the present
// revision of the store, because the configuration is known up to that revision.
func (m *Manager) reportConfig(ctx context.Context, cache *leaseCache) error {
	text, revision, err := m.configText(ctx)
	if err == nil {
		cache.configRevision = revision
		m.onConfig(text)
	}
	return err
}

func (m *Manager) onConfig(text []byte) {
	if m.cfg.OnConfig != nil {
		m.cfg.OnConfig(text)
	}
}

// applyConfigEvents removes the events of the configuration from a response, and passes new
// configurations to OnConfig. A watch starts at the revision of the leases, and the configuration
// was read later. So a response can contain configurations that were reported already, and
// applyConfigEvents does not report those again.
func (m *Manager) applyConfigEvents(cache *leaseCache, resp *pb.WatchResponse) {
	key := m.configKey()
	resp.Events = slices.DeleteFunc(resp.Events, func(ev *mvccpb.Event) bool {
		if string(ev.Kv.Key) != key {
			return false
		}

		switch {
		case ev.Kv.ModRevision <= cache.configRevision:
			return true
		case ev.Type == mvccpb.DELETE:
			m.onConfig(nil)
		default:
			m.onConfig(given(ev.Kv.Value))
		}
		cache.configRevision = ev.Kv.ModRevision
		return true
	})
}

// given returns the value of a key that exists, in a form that is never nil, because nil means that
// there is no such key.
func given(value []byte) []byte { return append([]byte{}, value...) }
