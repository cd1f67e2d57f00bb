// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// Manager is a subnet.Manager on the Kubernetes API. It is safe for concurrent use.
type Manager struct {
	cfg     Config
	timing  timing
	client  *client
	keys    *annotation.Keys
	decoder *wire.Decoder
	outage  *loglimit.Outage
	events  *eventSender

	name atomic.Pointer[string] // name of this host's Node; nil until it is known
	uid  atomic.Pointer[string] // uid of this host's Node when it was read last; empty if there was none
	// internal has the InternalIPs of this host's Node when it was seen last.
	internal atomic.Pointer[[]netip.Addr]
	nodes    atomic.Int64 // number of Nodes when they were last listed, counted or restored
	// justRead is this host's Node as one method has just read it, for the next method that needs it.
	justRead atomic.Pointer[ownNode]

	// lastKnown is the last known state in Config, for the first Watch. cache is the cache of a Watch
	// that has ended, for the next Watch.
	lastKnown atomic.Pointer[lastKnown]
	cache     atomic.Pointer[nodeCache]

	writing      sync.Mutex  // locked while this host's Node is written
	policiesSeen atomic.Bool // warnPolicies has got an answer and does not ask again

	own      atomic.Pointer[subnet.Claim]
	ignores  atomic.Pointer[string] // the last message about ignored annotations of this host's Node; empty if none was ignored
	location atomic.Pointer[string] // value of the label Config.LocationLabel as Location has read it; nil before
}

var (
	_ subnet.Manager        = (*Manager)(nil)
	_ subnet.Warner         = (*Manager)(nil)
	_ subnet.AddressSource  = (*Manager)(nil)
	_ subnet.LocationSource = (*Manager)(nil)
	_ subnet.ConfigWatcher  = (*Manager)(nil)
)

// Close closes the connections. It does not end methods that are still running: the next request of
// such a method makes a new connection.
func (m *Manager) Close() error {
	m.client.renew()
	return nil
}

// Reconnect closes the connections. The next request makes a new one. The caller must call
// Reconnect when this host has lost an address, because a connection from that address would be
// silent for a long time.
func (m *Manager) Reconnect() { m.client.renew() }

func (m *Manager) ready() bool {
	select {
	case <-m.cfg.Ready: // nil blocks
		return true
	default:
		return false
	}
}

// Warn implements subnet.Warner: it queues an Event about this host's Node. The sender runs during
// Keep. It drops the Event if the same one was created within eventRepeat, if there are many
// others, or if there is no own Node.
func (m *Manager) Warn(reason, message string) { m.events.enqueue(reason, message) }
