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
//   - Config: networkconfig.go, which also watches the file
//   - Recall, PublicIPs and Location: recall.go
//   - Acquire: acquire.go
//   - Keep: keep.go; policies.go warns about NetworkPolicies
//   - Warn: events.go
//   - Watch: watch.go, with the cache in nodecache.go. turns.go delays lists while the API server is
//     busy, follow.go follows a watch, and fetch.go requests new Nodes. restore.go continues from the last
//     known state, and compares that state with a list later. testdata tells in scripts what Watch does.
//
// These methods use ownnode.go, which reads and writes this host's Node, and retry.go, which repeats requests and
// makes pauses between them. All of them share the state of the Manager in this file. These files do not
// need the Manager: podcidrs.go reads the subnets of a Node, stream.go lists and watches, and client.go
// sends requests.
// Package annotation converts between annotations and leases, and package wire decodes Nodes.
// Functions for operators are in admin.go and daemons.go.
package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/version"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// New returns a manager. It reads the files that say how to reach the API server but does not
// connect, so an error is a mistake in cfg. The caller must Close the manager.
func New(cfg Config) (*Manager, error) {
	if cfg.NodeName == "" && (cfg.PodName == "" || cfg.PodNamespace == "") {
		return nil, errors.New("the node's name is not known: NODE_NAME, or POD_NAME and POD_NAMESPACE, must be set in the environment")
	}
	k, err := cfg.keys()
	if err != nil {
		return nil, err
	}
	rc, err := restConfig(cfg)
	if err != nil {
		return nil, err
	}
	c, err := newClient(rc, "flanneld/"+version.Version)
	if err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, client: c, keys: k, decoder: wire.NewDecoder(k[:], cfg.LocationLabel), outage: loglimit.NewOutage("the Kubernetes API", cfg.OnStatus),
		timing: defaultTiming(),
	}

	known := newNodeCache(cfg, k)
	m.cache.Store(known)
	m.nodes.Store(int64(len(known.entries)))
	m.cfg.Known = subnet.LedgerState{}
	m.events = newEventSender(m)
	m.ignores.Store(new(string))
	if cfg.NodeName != "" {
		m.name.Store(&cfg.NodeName)
	}
	return m, nil
}

// Config says where the API server is and how to use it.
type Config struct {
	// APIURL and Kubeconfig, which is a path, say how to reach the API server. If both are empty,
	// the manager uses the service account of the pod.
	APIURL, Kubeconfig string
	// Context is the context in the kubeconfig, and ServiceAccount the folder with the token and the CA of
	// another pod, with its APIURL. Both are for the functions in admin.go and daemons.go only, and may be
	// empty. If all four are empty, these functions look for a kubeconfig like kubectl.
	Context, ServiceAccount string
	// NodeName is the name of this host's Node. If it is empty, the manager reads it from the pod that
	// PodName and PodNamespace name.
	NodeName, PodName, PodNamespace string
	// NetConfig is the path of the file with the network configuration.
	NetConfig string
	// AnnotationPrefix is the argument of annotation.Prefix. Empty means
	// annotation.DefaultPrefix.
	AnnotationPrefix string
	// LocationLabel is the key of the label of this host's Node whose value is its location. If it is
	// empty, Location must not be called.
	LocationLabel string
	// Own and Known are the last known state. If the store is the same and still has the revision
	// of that state, the manager does not list the Nodes at the start, but reads only the changes
	// since then. Otherwise it first lists only the metadata of the Nodes, because it knows most
	// podCIDRs. Both may be zero.
	Own   subnet.Lease
	Known subnet.LedgerState
	// Ready is closed by the caller when the node's network works. The manager then sets the
	// condition NetworkUnavailable to False, and keeps it so. If Ready is nil, it does not set the
	// condition.
	Ready <-chan struct{}
	// OnRepaired is called if the audit finds that Known was wrong, with the number of Nodes whose
	// leases were different in the store. It must not block, and must not call the manager. It may
	// be nil, like OnStatus.
	OnRepaired func(leases int)
	// OnStatus is called with nil at the first success and when the API becomes usable again. It is
	// called with the reason when the API becomes unusable, and for each new kind of failure after
	// that. It must not block, and must not call the manager.
	OnStatus func(error)

	operator bool // see restConfig
}

func (c Config) keys() (*annotation.Keys, error) {
	p, err := annotation.Prefix(cmp.Or(c.AnnotationPrefix, annotation.DefaultPrefix))
	if err != nil {
		return nil, fmt.Errorf("annotation prefix %q: %w", c.AnnotationPrefix, err)
	}
	return annotation.NewKeys(p), nil
}

// Manager is a subnet.Manager on the Kubernetes API. It is safe for concurrent use.
type Manager struct {
	cfg     Config
	timing  timing
	client  *client
	keys    *annotation.Keys
	decoder *wire.Decoder
	outage  *loglimit.Outage
	events  *eventSender

	name  atomic.Pointer[string]  // name of this host's Node; nil until it is known
	seen  atomic.Pointer[ownNode] // this host's Node as it was read or watched last; nil before
	nodes atomic.Int64            // number of Nodes when they were last listed, counted or restored

	// cache has the Nodes while no Watch has them: the last known state, or those of a Watch that has ended. It is
	// never nil.
	cache atomic.Pointer[nodeCache]

	writing      sync.Mutex  // locked while this host's Node is written
	policiesSeen atomic.Bool // warnPolicies has got an answer and does not ask again

	own      atomic.Pointer[subnet.Claim]
	ignores  atomic.Pointer[string] // the last message about ignored annotations of this host's Node; empty if none was ignored
	location atomic.Pointer[string] // value of the label Config.LocationLabel as Location has read it; nil before
}

var (
	_ subnet.Manager       = (*Manager)(nil)
	_ subnet.ConfigWatcher = (*Manager)(nil)
)

// Observe returns nothing, because the Nodes belong to one network.
func (*Manager) Observe(context.Context, subnet.Lease) (subnet.Observation, error) {
	return subnet.Observation{}, nil
}

// Release does nothing, because the control plane assigns the podCIDRs.
func (*Manager) Release(context.Context, subnet.Lease) error { return nil }

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

// timing contains the intervals that tests shorten.
type timing struct {
	request              time.Duration // deadline of a request
	backoffMin, backoff  time.Duration
	vary                 float64       // share by which pauses of the backoff vary
	restoreMin, restored time.Duration // shortest and longest pause after this host's Node had to be written again
	fresh                time.Duration // the age up to which Manager.seen is used without another request
	spread               time.Duration // multiplied by the number of Nodes, the time over which the lists of all nodes are spread; see turns too
	requestPause         time.Duration // multiplied by the number of Nodes, the pause between requests for new Nodes
	silence              time.Duration // shortest silence of a watch after which it is probed
	late                 time.Duration // the time that a change in the store may need to reach a watch
	event                time.Duration // multiplied by the number of Nodes, the time over which the same Events of all nodes are spread
	poll                 time.Duration // interval between reads of the configuration file
	audit                time.Duration // latest time of the audit of a restored cache
}

func defaultTiming() timing {
	return timing{
		request: 10 * time.Second, backoffMin: 100 * time.Millisecond, backoff: 5 * time.Second, vary: 0.5,
		restoreMin: time.Second, restored: time.Minute, fresh: 2 * time.Second, spread: time.Millisecond,
		requestPause: 100 * time.Microsecond, silence: 2 * time.Minute, late: 10 * time.Second,
		event: 10 * time.Millisecond, poll: 10 * time.Second, audit: time.Hour,
	}
}
