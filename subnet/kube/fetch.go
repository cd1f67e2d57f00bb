// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
)

// nodeRequest is one request for the Nodes with these names.
type nodeRequest struct {
	query
	names []string
	found map[string]*ownNode // the Nodes in the answer, by name
	shown int64               // the revision of the store that the answer shows
}

const (
	fetchers = 8 // the most requests at the same time
	fewNodes = 4 // up to this number, Nodes are requested one by one: the server finds a name faster than a label
	// together is the most Nodes in one request, so that its URL has less than 8 kB.
	together = 100
	// atOnce is the largest number of Nodes in a cluster with which all daemons may request one new
	// Node at the same time: the API server needs as much time to send them the event as to answer
	// them.
	atOnce = 5000
)

// requests returns the requests for the Nodes with these names. Each Node is requested at the
// revision of its last event or a later one. The server that has sent the event has that revision
// in its cache. If the server's cache is behind, the Nodes are requested from the store.
func (c *nodeCache) requests(names []string) []nodeRequest {
	var all []nodeRequest
	var labelled []string
	for _, name := range names {
		e := c.entries[name]
		if e.host != "" && len(names) > fewNodes {
			labelled = append(labelled, name)
			continue
		}
		all = append(all, nodeRequest{query: query{name: name, revision: c.ifUpToDate(e.version)}, names: []string{name}})
	}

	for chunk := range slices.Chunk(labelled, together) {
		a := nodeRequest{names: chunk}
		for _, name := range chunk {
			e := c.entries[name]
			a.hosts = append(a.hosts, e.host)
			a.revision = max(a.revision, c.ifUpToDate(e.version))
		}
		all = append(all, a)
	}
	return all
}

// ifUpToDate returns revision, or 0 if the server's cache is behind.
func (c *nodeCache) ifUpToDate(revision int64) int64 {
	if c.server != upToDate {
		return 0
	}
	return revision
}

// requestOnce sends one request for Nodes.
func (m *Manager) requestOnce(ctx context.Context, a *nodeRequest) error {
	a.found = make(map[string]*ownNode, len(a.names))
	l, err := m.readNodes(ctx, a.query, func(name string, s *ownNode) { a.found[name] = s })
	if err != nil {
		return fmt.Errorf("read node %s: %w", a, err)
	}
	a.shown = l.Revision
	return nil
}

// requestAll sends requests, several at a time.
func (m *Manager) requestAll(ctx context.Context, requests []nodeRequest) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(fetchers)
	for i := range requests {
		group.Go(func() error { return m.requestOnce(ctx, &requests[i]) })
	}
	return group.Wait()
}

// String returns the names of the Nodes, or the first one and the number of the others.
func (a *nodeRequest) String() string {
	if len(a.names) > 1 {
		return fmt.Sprintf("%s and %d others", a.names[0], len(a.names)-1)
	}
	return a.names[0]
}

// isMissing reports whether a Node is missing in the answer to a request by label. Such a request
// selects several Nodes by their label kubernetes.io/hostname, and the label may have changed
// since. The next request for a missing Node is by its name. isMissing reports false for the answer
// to a request by name.
func (a *nodeRequest) isMissing(name string) bool { return a.hosts != nil && a.found[name] == nil }

// applyAnswer puts the podCIDRs in the answer to a request for Nodes into the cache.
func (c *nodeCache) applyAnswer(got *nodeRequest) {
	for _, name := range got.names {
		e := c.entries[name]
		s := got.found[name]
		switch {
		case e == nil:
		case s != nil && s.uid == e.uid:
			c.setCIDRs(e, s.cidrs, s.cidrsErr)
			c.decode(e)
			e.host = ""
		case got.isMissing(name):
			e.host = ""
		}
	}
}
