// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/subnet"
)

// errRelist means that a watch cannot continue from its revision.
var errRelist = errors.New("watch cannot be resumed")

// listing is the part of a list besides the objects.
type listing struct {
	revision int64
	behind   bool   // the server's cache had not reached the revision that was asked for
	more     string // token for the request of the next page; empty: this is the last page
}

// query selects Nodes and a revision.
type query struct {
	metadata bool     // without spec and status
	name     string   // of one Node; empty for all
	hosts    []string // values of the label hostLabel; nil for all
	revision int64    // not older than that; 0: the present one, which the server asks its store for
	exact    bool     // as it was at revision, which the server asks its store for
	limit    int      // objects on a page; 0: all on one
	more     string   // of the page before
}

// hostLabel is a label that every kubelet gives its Node, with a value of its own.
// Field selectors cannot name several Nodes, label selectors can.
const hostLabel = "kubernetes.io/hostname"

// selects reports whether q is about single Nodes.
func (q query) selects() bool { return q.name != "" || q.hosts != nil }

func (q query) values() url.Values {
	v := url.Values{}
	if q.name != "" {
		v.Set("fieldSelector", "metadata.name="+q.name)
	}
	if q.hosts != nil {
		v.Set("labelSelector", hostLabel+" in ("+strings.Join(q.hosts, ",")+")")
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

// list calls on for every Node, one after the other as they arrive: an object
// is good until on returns. If it fails on may have been called.
//
// A server answers from its cache, and refuses a revision that the cache has not reached within
// 3 s. The cache of a server that has just started, that is slow, or whose etcd sends no progress
// (3.4 does not on request) may be far behind. Then list requests the present state, which the
// server reads from its store. A list from the cache would be wrong, because it may be older than
// the view.
func (c *client) list(ctx context.Context, d *decoder, q query, on func(*object) error) (listing, error) {
	l, err := c.listOnce(ctx, d, q, on)
	if q.revision == 0 || q.exact || !isTooLarge(err) {
		return l, err
	}
	level := 0
	if q.selects() {
		level = 1 // one Node of many
	}
	klog.FromContext(ctx).V(level).Info("the API server's cache is behind, its store is asked", "answer", err.Error())
	q.revision = 0
	l, err = c.listOnce(ctx, d, q, on)
	l.behind = true
	return l, err
}

func (c *client) listOnce(ctx context.Context, d *decoder, q query, on func(*object) error) (listing, error) {
	outer := ctx
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	stalled := time.AfterFunc(stallTimeout, stop)
	defer stalled.Stop()

	r := request{path: "nodes", query: q.values(), accept: acceptFull}
	if q.metadata {
		r.accept = acceptMetadataList
	}
	switch {
	case q.exact:
		r.query.Set("resourceVersionMatch", "Exact")
	case q.revision > 0:
		r.query.Set("resourceVersionMatch", "NotOlderThan")
	}
	l, err := c.readList(ctx, d, r, func(o *object) error {
		stalled.Reset(stallTimeout)
		return on(o)
	})
	switch {
	case outer.Err() != nil:
		return listing{}, outer.Err()
	case ctx.Err() != nil:
		return listing{}, c.explain(context.DeadlineExceeded)
	case err == nil && l.more != "" && q.limit == 0:
		return listing{}, c.explain(fmt.Errorf("%w: the list goes on, which was not asked for", errWire))
	}
	return l, err
}

// stallTimeout is how long a list may bring nothing.
const stallTimeout = 15 * time.Second

func (c *client) readList(ctx context.Context, d *decoder, r request, on func(*object) error) (listing, error) {
	resp, err := c.do(ctx, r)
	if err != nil {
		return listing{}, err
	}
	defer resp.Body.Close()
	l, err := d.list(resp.Body, on)
	if err != nil {
		err = c.explain(err)
	}
	return l, err
}

// list decodes a list from a stream, holding one object at a time.
func (d *decoder) list(from io.Reader, on func(*object) error) (l listing, err error) {
	r := &reader{Reader: bufio.NewReaderSize(from, 64<<10)}
	if head, err := r.take(uint64(len(magic))); err != nil || string(head) != magic {
		return l, fmt.Errorf("list: %w", oneline.Join(err, errWire))
	}
	var o object
	err = r.fields(-1, func(n protowire.Number, length uint64) error {
		if n != 2 { // of runtime.Unknown: raw
			return r.skip(length)
		}
		return r.fields(int64(length), func(n protowire.Number, length uint64) error {
			b, err := r.take(length)
			switch {
			case err != nil:
				return err
			case n == 1:
				revision, more, err := listMeta(b)
				l.revision, l.more = parseRevision(revision), string(more)
				return err
			case n == 2:
				if err := d.node(b, &o); err != nil {
					return err
				}
				return on(&o)
			}
			return nil
		})
	})
	if err == nil && l.revision == 0 {
		err = fmt.Errorf("%w: a list without a resource version", errWire)
	}
	return l, err
}

// reader reads messages whose length may be beyond memory.
type reader struct {
	*bufio.Reader
	buf  []byte
	read int64
}

// fields calls on for each field that holds bytes, with their length: on has
// to read them. A length of -1 means up to the end of the stream.
func (r *reader) fields(length int64, on func(protowire.Number, uint64) error) error {
	end := r.read + length
	for length < 0 || r.read < end {
		tag, err := r.varint()
		if errors.Is(err, io.EOF) && length < 0 {
			return nil
		}
		if err != nil {
			return err
		}
		number, kind := protowire.DecodeTag(tag)
		value, err := uint64(0), error(nil)
		switch kind {
		case protowire.VarintType:
			if _, err = r.varint(); err != nil {
				return eof(err)
			}
			continue
		case protowire.BytesType:
			value, err = r.varint()
		default:
			err = errWire
		}
		if err != nil {
			return eof(err)
		}
		if length >= 0 && value > uint64(max(0, end-r.read)) {
			return fmt.Errorf("%w: a field is longer than what it is in", errWire)
		}
		if err := on(number, value); err != nil {
			return eof(err)
		}
	}
	return nil
}

// eof turns the end of a stream inside of a message into an error.
func eof(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (r *reader) varint() (uint64, error) {
	var v uint64
	for shift := 0; shift < 64; shift += 7 {
		b, err := r.ReadByte()
		if err != nil {
			if shift > 0 {
				err = eof(err)
			}
			return 0, err
		}
		r.read++
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return v, nil
		}
	}
	return 0, errWire
}

// take returns the next n bytes, good until the next call.
func (r *reader) take(n uint64) ([]byte, error) {
	if n > maxObject {
		return nil, fmt.Errorf("%w: %d bytes in one object", errWire, n)
	}
	if uint64(cap(r.buf)) < n {
		r.buf = make([]byte, n+n/4)
	}
	b := r.buf[:n]
	m, err := io.ReadFull(r.Reader, b)
	r.read += int64(m)
	return b, eof(err)
}

func (r *reader) skip(n uint64) error {
	m, err := io.CopyN(io.Discard, r.Reader, int64(min(n, 1<<62)))
	r.read += m
	return eof(err)
}

// parseRevision returns 0 for what is no number, and so older than any.
func parseRevision(b []byte) int64 {
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// The kinds of watch events.
const (
	added    = "ADDED"
	modified = "MODIFIED"
	deleted  = "DELETED"
	bookmark = "BOOKMARK"
	failed   = "ERROR"
)

// watch calls on for every change of Nodes from q.revision on, which must not
// be 0: kind and object are good until on returns. alive is called when the
// server has taken the watch. It returns nil when the server ends the watch at
// the time agreed upon, which is every few minutes, errEnded when it ends
// otherwise, and errRelist when it cannot go on from that revision.
func (c *client) watch(ctx context.Context, d *decoder, q query, alive func(), on func(kind string, o *object) error) error {
	lasts := watchTime + rand.N(watchTime)
	r := request{path: "nodes", query: q.values(), accept: acceptFull}
	if q.metadata {
		r.accept = acceptMetadata
	}
	r.query.Set("watch", "true")
	r.query.Set("allowWatchBookmarks", "true")
	r.query.Set("timeoutSeconds", strconv.Itoa(int(lasts.Seconds())))

	outer, start := ctx, time.Now()
	ctx, cancel := context.WithTimeout(ctx, lasts+watchGrace)
	defer cancel()
	resp, err := c.begin(ctx, r)
	begun := err == nil
	if begun {
		defer resp.Body.Close()
		alive()
		err = c.frames(resp.Body, d, on)
	}
	e, _ := errors.AsType[*apiError](err)
	switch {
	case outer.Err() != nil:
		return outer.Err()
	case e != nil && e.code == http.StatusGone:
		return errRelist
	case begun && e != nil && e.code == 0, err == nil && time.Since(start) < lasts-time.Second:
		return errEnded // the next request will show what is the matter
	}
	return err
}

// watchTime is the least that a watch is asked to last; it lasts up to twice
// that, so that watches of thousands of nodes do not end together. A server
// that has not ended it by watchGrace later is stuck.
const (
	watchTime  = 5 * time.Minute
	watchGrace = 30 * time.Second
	beginTime  = 15 * time.Second
)

// begin sends a request whose answer has no end, but a beginning.
func (c *client) begin(ctx context.Context, r request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	late := time.AfterFunc(beginTime, func() { cancel(context.DeadlineExceeded) })
	resp, err := c.do(ctx, r)
	if !late.Stop() { // an answer that has come nevertheless has no body
		if err == nil {
			_ = resp.Body.Close()
		}
		err = c.explain(context.DeadlineExceeded)
	}
	if err != nil {
		cancel(nil)
		return nil, err
	}
	resp.Body = &body{resp.Body, func() { cancel(nil) }}
	return resp, nil
}

// body releases a request's context with it.
type body struct {
	io.ReadCloser
	release func()
}

// Close implements io.Closer.
func (b *body) Close() error {
	defer b.release()
	return b.ReadCloser.Close()
}

func (c *client) frames(from io.Reader, d *decoder, on func(string, *object) error) error {
	r := &reader{Reader: bufio.NewReaderSize(from, 32<<10)}
	var o object
	var length [4]byte
	for {
		if _, err := io.ReadFull(r.Reader, length[:]); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return c.explain(err)
		}
		b, err := r.take(uint64(binary.BigEndian.Uint32(length[:])))
		if err != nil {
			return c.explain(err)
		}
		kind, err := d.frame(b, &o)
		if err != nil {
			return c.failure(err)
		}
		if err := on(kind, &o); err != nil {
			return err
		}
	}
}

// failure completes an error in a watch.
func (c *client) failure(err error) error {
	if e, ok := errors.AsType[*apiError](err); ok {
		return c.complete(*e, "")
	}
	return c.explain(err)
}

// frame decodes one frame of a watch. An error is an *apiError if the server
// sent it.
func (d *decoder) frame(b []byte, o *object) (kind string, err error) {
	f, err := decodeFrame(b)
	if err != nil {
		return "", err
	}
	switch string(f.kind) {
	case added, modified, deleted:
		kind = known(f.kind)
		err = d.node(f.raw, o)
	case bookmark:
		kind = bookmark
		err = d.bookmark(f.raw, o)
	case failed:
		e, err := decodeStatus(f.raw)
		if err != nil {
			return "", err
		}
		return "", &e
	default:
		err = fmt.Errorf("%w: a watch event of type %q", errWire, subnet.Shorten(string(f.kind)))
	}
	return kind, err
}

// known returns the constant for kind, without allocating.
func known(kind []byte) string {
	switch string(kind) {
	case added:
		return added
	case deleted:
		return deleted
	}
	return modified
}

// bookmark decodes an object of which only the revision is set.
func (d *decoder) bookmark(b []byte, o *object) error {
	*o = object{}
	meta, err := stringOf(b, 1)
	if err == nil {
		err = d.metadata(meta, o)
	}
	return err
}
