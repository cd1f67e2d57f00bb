// SPDX-License-Identifier: Apache-2.0

// Package kube stores leases in the Kubernetes API, as flannel does: a node's subnets are the
// podCIDRs that the API has given it, and annotations of its Node contain the data for peers.
//
// All Nodes change all the time, but the fields that flanneld needs rarely do. So flanneld lists
// all Nodes in full once, and then watches only their metadata, without spec and status. It
// requests each new Node in full. podCIDRs come only from the spec, because a node could write any
// annotation.
//
// The methods of the Manager are in these files:
//
//   - Config: kube.go, and config.go, which watches the file
//   - Recall, PublicIPs and Location: ownnode.go, which reads and writes the own Node
//   - Acquire: acquire.go
//   - Keep: keep.go; events.go creates Events, and policies.go warns about NetworkPolicies
//   - Watch: watch.go, with the cache in nodecache.go. turns.go delays lists while the API server is
//     busy, fetch.go requests new Nodes, and probe.go finds out whether the watch is stale. restore.go
//     continues from the last known state, and audit.go compares that state with a list later.
//   - Lead and Leader: leader.go
//
// Below them, package annotation converts between annotations and leases, podcidrs.go reads the
// subnets of a Node, stream.go lists and watches, client.go sends requests, and package wire
// decodes Nodes. Functions for operators are in admin.go and daemons.go.
package kube

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/outage"
	"github.com/flanneld/flanneld/pkg/version"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/wire"
)

// Config says where the API server is and how to use it.
type Config struct {
	// APIURL and Kubeconfig, which is a path, say how to reach the API server. If both are empty,
	// the manager uses the service account of the pod.
	APIURL, Kubeconfig string
	// NodeName is the name of the own Node. If it is empty, the manager reads it from the pod that
	// PodName and PodNamespace name.
	NodeName, PodName, PodNamespace string
	// NetConfig is the path of the file with the network configuration.
	NetConfig string
	// AnnotationPrefix is the argument of annotation.Prefix. Empty means
	// annotation.DefaultPrefix.
	AnnotationPrefix string
	// LocationLabel is the key of the label of the own Node whose value is its location. If it is
	// empty, Location must not be called.
	LocationLabel string
	// Own and Known are the last known state. If the store is the same and still has the revision
	// of that state, the manager does not list the Nodes at the start, but reads only the changes
	// since then. Otherwise it lists only the metadata of the Nodes, because it knows most
	// podCIDRs. Both may be zero.
	Own   subnet.Lease
	Known subnet.LedgerState
	// Ready is closed by the caller when the node's network works. The manager then sets the
	// condition NetworkUnavailable to False, and keeps it so. If Ready is nil, it does not set the
	// condition.
	Ready <-chan struct{}
	// OnRepaired is called with the number of leases of Known that differed from the store's
	// although nothing has changed them since. It must not block, and must not call the manager.
	// It may be nil, like OnStatus.
	OnRepaired func(leases int)
	// OnStatus is called with the reason when the API becomes unusable, and with nil when it
	// becomes usable again. It must not block, and must not call the manager.
	OnStatus func(error)
}

// Manager is a subnet.Manager on the Kubernetes API. It is safe for concurrent use.
type Manager struct {
	cfg     Config
	timing  timing
	client  *client
	keys    *annotation.Keys
	decoder *wire.Decoder
	outage  *outage.Tracker
	events  *eventSender

	name  atomic.Pointer[string] // name of the own Node; nil until it is known
	uid   atomic.Pointer[string] // uid of the own Node when it was read last; empty if there was none
	nodes atomic.Int64           // number of Nodes when they were last listed, counted or restored
	// justRead is the own Node as one method has just read it, for the next method that needs it.
	justRead atomic.Pointer[ownNode]

	// lastKnown is the last known state in Config, for the first Watch. cache is the cache of a Watch
	// that has ended, for the next Watch.
	lastKnown atomic.Pointer[lastKnown]
	cache     atomic.Pointer[nodeCache]

	leases leaseTimes // when the Leases that name leaders have changed

	writing      sync.Mutex  // locked while the own Node is written
	policiesSeen atomic.Bool // warnPolicies has got an answer and does not ask again

	own      atomic.Pointer[subnet.Claim]
	warned   atomic.Pointer[string] // text of the configuration whose warnings were logged
	ignores  atomic.Pointer[string] // the last message about ignored annotations of the own Node; empty if none was ignored
	location atomic.Pointer[string] // value of the label Config.LocationLabel as Location has read it; nil before
}

var (
	_ subnet.Manager        = (*Manager)(nil)
	_ subnet.Warner         = (*Manager)(nil)
	_ subnet.PublicIPSource = (*Manager)(nil)
	_ subnet.LocationSource = (*Manager)(nil)
	_ subnet.ConfigWatcher  = (*Manager)(nil)
	_ subnet.Elector        = (*Manager)(nil)
)

// timing contains the intervals that tests shorten.
type timing struct {
	request              time.Duration // deadline of a request
	backoffMin, backoff  time.Duration
	restoreMin, restored time.Duration // shortest and longest pause after the own Node had to be written again
	fresh                time.Duration // the age up to which justRead is used
	spread               time.Duration // multiplied by the number of Nodes, the time over which the lists of all nodes are spread; see turns too
	requestPause         time.Duration // multiplied by the number of Nodes, the pause between requests for new Nodes
	silence              time.Duration // shortest silence of a watch after which it is probed
	late                 time.Duration // the time that a change in the store may need to reach a watch
	event                time.Duration // multiplied by the number of Nodes, the time over which the same Events of all nodes are spread
	poll                 time.Duration // interval between reads of the configuration file
	audit, auditPage     time.Duration // latest time of the audit of a restored cache, and the pause between the pages of its list
	leader               time.Duration // time after which another node may become the leader if the present one does not renew its Lease
}

// The activities that talk to the API server.
const (
	starting    = "start"
	maintaining = "own node"
	watching    = "watch"
	getting     = "get node " // the name of the Node follows
)

// New returns a manager. It reads the files that say how to reach the API server but does not
// connect, so an error is a mistake in cfg. The caller must Close the manager.
func New(cfg Config) (*Manager, error) {
	if cfg.NodeName == "" && (cfg.PodName == "" || cfg.PodNamespace == "") {
		return nil, errors.New("the node's name is not known: NODE_NAME, or POD_NAME and POD_NAMESPACE, must be set in the environment")
	}
	if cfg.AnnotationPrefix == "" {
		cfg.AnnotationPrefix = annotation.DefaultPrefix
	}
	p, err := annotation.Prefix(cfg.AnnotationPrefix)
	if err != nil {
		return nil, fmt.Errorf("annotation prefix %q: %w", cfg.AnnotationPrefix, err)
	}
	rc, err := restConfig(cfg.APIURL, cfg.Kubeconfig)
	if err != nil {
		return nil, err
	}
	c, err := newClient(rc, "flanneld/"+version.Version)
	if err != nil {
		return nil, err
	}
	k := annotation.NewKeys(p)
	m := &Manager{
		cfg: cfg, client: c, keys: k, decoder: newDecoder(k).WithLabel(cfg.LocationLabel), outage: outage.New("the Kubernetes API", cfg.OnStatus),
		timing: timing{
			request: 10 * time.Second, backoffMin: 100 * time.Millisecond, backoff: 5 * time.Second,
			restoreMin: time.Second, restored: time.Minute, fresh: 2 * time.Second, spread: time.Millisecond,
			requestPause: 100 * time.Microsecond, silence: 2 * time.Minute, late: 10 * time.Second,
			event: 10 * time.Millisecond, poll: 10 * time.Second, audit: time.Hour, auditPage: time.Second,
			leader: 30 * time.Second,
		},
	}
	m.lastKnown.Store(&lastKnown{cfg.Own, cfg.Known})
	m.cfg.Known = subnet.LedgerState{}
	m.events = newEventSender(c, &m.timing, &m.name, &m.uid, &m.nodes)
	m.ignores.Store(new(string))
	m.uid.Store(new(string))
	if cfg.NodeName != "" {
		m.name.Store(&cfg.NodeName)
	}
	return m, nil
}

// Close closes the connections.
func (m *Manager) Close() error {
	m.client.renew()
	return nil
}

// Reconnect closes the connections. The next request makes a new one. The caller uses it when this
// host has lost an address, because a connection from that address would be silent for a long time.
func (m *Manager) Reconnect() { m.client.renew() }

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
	cfg, warnings, err := subnet.ParseConfig(raw)
	if err != nil {
		return subnet.Config{}, fmt.Errorf("file %s: %w", m.cfg.NetConfig, err)
	}
	text := string(raw)
	if old := m.warned.Swap(&text); old == nil || *old != text {
		for _, w := range warnings {
			klog.FromContext(ctx).Error(nil, "network configuration", "file", m.cfg.NetConfig, "warning", w)
		}
	}
	return cfg, nil
}

// report records the outcome of an activity. It ignores errEnded: connections that were closed on
// purpose, and watches that have ended early.
func (m *Manager) report(ctx context.Context, activity string, err error) {
	if !errors.Is(err, errEnded) {
		m.outage.Report(ctx, activity, err)
	}
}

// retry runs f, which is part of the start, until it succeeds, or fails for a reason that does not
// pass, or ctx ends. It returns the last error of f, or the error of ctx.
func (m *Manager) retry(ctx context.Context, f func() error) error {
	b := m.backoff()
	for {
		err := f()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		m.report(ctx, starting, err)
		if !passes(err) {
			return err
		}
		if err := b.Wait(ctx, retryAfter(err)); err != nil {
			return err
		}
	}
}

// passes reports whether a caller tries again after err: after a failure of the API server, and
// after errEnded.
func passes(err error) bool {
	_, ok := errors.AsType[*apiError](err)
	return ok || errors.Is(err, errEnded)
}

func (m *Manager) backoff() *wait.Backoff {
	return &wait.Backoff{Least: m.timing.backoffMin, Most: m.timing.backoff, Share: 0.5}
}
