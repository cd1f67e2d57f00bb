// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// errRelist means that a watch cannot continue from its revision, so that the Nodes have to be
// listed.
var errRelist error = loglimit.Again{Text: "watch cannot be resumed", Answered: true}

// listing is what a list contains besides the Nodes.
type listing struct {
	wire.ListMeta
	behind bool // the server's cache had not reached the requested revision, so the list comes from its store
}

// query selects Nodes, and the revision of the store at which they are read.
type query struct {
	metadata bool     // without spec and status
	name     string   // name of one Node; empty for all
	hosts    []string // values of the label wire.HostnameLabel, which differs between Nodes; nil for all
	revision int64    // the answer must not be older; 0: the present state, which the server reads from its store
	exact    bool     // the answer must be of exactly revision, which the server reads from its store
	limit    int      // objects on a page; 0: all on one
	more     string   // the token from the previous page; empty for the first page
}

// selects reports whether q selects only some Nodes.
func (q query) selects() bool { return q.name != "" || q.hosts != nil }

func (q query) values() url.Values {
	v := url.Values{}
	if q.name != "" {
		v.Set("fieldSelector", "metadata.name="+q.name)
	}
	if q.hosts != nil {
		// A field selector cannot name several Nodes.
		v.Set("labelSelector", wire.HostnameLabel+" in ("+strings.Join(q.hosts, ",")+")")
	}
	if q.revision > 0 {
		v.Set("resourceVersion", strconv.FormatInt(q.revision, 10))
	}
	if q.limit > 0 {
		v.Set("limit", strconv.Itoa(q.limit))
	}
	if q.more != "" {
		v.Set("continue", q.more)
	}
	return v
}

// list calls on for every Node of a list as it arrives. The Node is valid until on returns. on may
// have been called even if list returns an error.
//
// A server answers from its cache, and refuses a revision that the cache has not reached within 3
// s. The cache of a server may be far behind if the server has just started or is slow, or if its
// etcd sends no progress on request, like 3.4. In that case list requests the present state, which
// the server reads from its store. A list from the server's cache would be wrong, because it may be
// older than the nodeCache.
func (c *client) list(ctx context.Context, d *wire.Decoder, q query, on func(*wire.Node)) (listing, error) {
	l, err := c.listOnce(ctx, d, q, on)
	if q.revision == 0 || q.exact || !apiErrorOf(err).tooLarge {
		return l, err
	}
	level := 0
	if q.selects() {
		level = 1 // there may be many such requests
	}

	klog.FromContext(ctx).V(level).Info("the API server's cache is behind, its store is asked", "answer", err.Error())
	q.revision = 0
	l, err = c.listOnce(ctx, d, q, on)
	l.behind = true
	return l, err
}

func (c *client) listOnce(ctx context.Context, d *wire.Decoder, q query, on func(*wire.Node)) (listing, error) {
	outer := ctx
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	stalled := time.AfterFunc(stallTimeout, stop)
	defer stalled.Stop()

	// Two thirds of the server's CPU time for a list of whole Nodes are those of its compression, and
	// when all hosts boot at the same moment, the server is the bottleneck.
	busy := time.Since(time.Unix(0, c.slow.Load())) < time.Minute
	r := request{path: "nodes", query: q.values(), accept: acceptFull, compressed: !q.selects() && (q.metadata || !busy)}
	if q.metadata {
		r.accept = acceptMetadataList
	}

	switch {
	case q.exact:
		r.query.Set("resourceVersionMatch", "Exact")
	case q.revision > 0:
		r.query.Set("resourceVersionMatch", "NotOlderThan")
	}

	var l listing
	resp, err := c.do(ctx, r)
	if err == nil {
		defer resp.Body.Close()
		l.ListMeta, err = c.readList(resp, d, func(n *wire.Node) {
			stalled.Reset(stallTimeout)
			on(n)
		})
	}

	switch {
	case outer.Err() != nil:
		return listing{}, outer.Err()
	case ctx.Err() != nil:
		return listing{}, c.explain(context.DeadlineExceeded)
	case err == nil && l.Continue != "" && q.limit == 0:
		return listing{}, c.explain(fmt.Errorf("%w: the list goes on, which was not asked for", wire.ErrMalformed))
	}
	return l, err
}

// stallTimeout is how long a list may bring no Node. A busy API server lets a request wait for 15 s
// before it refuses it.
const stallTimeout = 30 * time.Second

func (c *client) readList(resp *http.Response, d *wire.Decoder, on func(*wire.Node)) (meta wire.ListMeta, err error) {
	var body io.Reader = resp.Body
	if resp.Header.Get("Content-Encoding") == "gzip" { // the server decides: it does not compress small answers
		body, err = gzip.NewReader(resp.Body)
	}
	if err == nil {
		meta, err = d.List(body, on)
	}
	if err != nil {
		err = c.explain(err)
	}
	return meta, err
}

// watch calls on for every change of the selected Nodes after q.revision, which must not be 0. The
// event is valid until on returns. watch calls alive when the server has accepted the watch. It
// returns nil when the server ends the watch after the requested time, which is some minutes. It
// returns errEnded when an accepted watch ends earlier or its connection breaks, and errRelist when
// the server cannot continue from that revision. It returns an error of on as it is, and an
// apiError if the server does not accept the watch.
func (c *client) watch(ctx context.Context, d *wire.Decoder, q query, alive func(), on func(wire.Event) error) error {
	lasts := watchTime + c.random(watchTime)
	r := request{path: "nodes", query: q.values(), accept: acceptFull}
	if q.metadata {
		r.accept = acceptMetadata
	}

	r.query.Set("watch", "true")
	r.query.Set("allowWatchBookmarks", "true")
	r.query.Set("timeoutSeconds", strconv.Itoa(int(lasts.Seconds())))

	outer := ctx
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, lasts+watchGrace)
	defer cancel()
	late := time.AfterFunc(beginTime, cancel)
	resp, err := c.do(ctx, r)
	if err == nil {
		defer resp.Body.Close()
	}
	if !late.Stop() { // an answer may have come at the same moment, but its body cannot be read any more
		err = c.explain(context.DeadlineExceeded)
	}
	begun := err == nil
	if begun {
		alive()
		err = c.events(resp.Body, d, on)
	}

	e := apiErrorOf(err)
	switch {
	case outer.Err() != nil:
		return outer.Err()
	case e.code == http.StatusGone:
		return errRelist
	case begun && e.kind != "" && e.code == 0, err == nil && time.Since(start) < lasts-time.Second:
		return errEnded // the next request shows the reason
	}
	return err
}

// watchTime is the shortest time for which a watch is requested. The time is random and up to twice
// as long, so that watches of thousands of nodes do not end together. If a server has not ended the
// watch when watchGrace has passed after that time, it hangs. beginTime is the deadline for the
// beginning of a watch.
const (
	watchTime  = 5 * time.Minute
	watchGrace = 30 * time.Second
	beginTime  = stallTimeout
)

// events calls on for every event of a watch, until from ends, and returns nil. It ends with an
// error before if on returns one, or if the watch brings one.
func (c *client) events(from io.Reader, d *wire.Decoder, on func(wire.Event) error) error {
	for e, err := range d.Events(from) {
		if status, ok := errors.AsType[*wire.StatusError](err); ok {
			return c.refused(status, "")
		}
		if err != nil {
			return c.explain(err)
		}
		if err := on(e); err != nil {
			return err
		}
	}
	return nil
}
