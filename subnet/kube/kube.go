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
//   - Warn: manager.go, with the creation of Events in events.go
//   - Watch: watch.go, with the cache in nodecache.go. turns.go delays lists while the API server is
//     busy, fetch.go requests new Nodes, and probe.go finds out whether the watch is stale. restore.go
//     continues from the last known state in lastknown.go, and audit.go compares that state with a
//     list later.
//
// These methods use readnode.go and writenode.go, which read and write this host's Node, and retry.go,
// which repeats requests and makes pauses between them. All of them share the state of the Manager in
// manager.go. These files do not need the Manager: ownnode.go says what is known of this host's Node,
// podcidrs.go reads the subnets of a Node, stream.go lists and watches, and client.go sends requests.
// Package annotation converts between annotations and leases, and package wire decodes Nodes.
// Functions for operators are in admin.go and daemons.go.
package kube

import (
	"errors"
	"fmt"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/version"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
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
	rc, err := restConfig(cfg)
	if err != nil {
		return nil, err
	}
	c, err := newClient(rc, "flanneld/"+version.Version)
	if err != nil {
		return nil, err
	}
	k := annotation.NewKeys(p)
	m := &Manager{
		cfg: cfg, client: c, keys: k, decoder: newDecoder(k).WithLabel(cfg.LocationLabel), outage: loglimit.NewOutage("the Kubernetes API", cfg.OnStatus),
		timing: defaultTiming(),
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
