// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/scripttest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire/wiretest"
)

// TestScripts runs the scripts in testdata. Each is the life of one host and of the API server that it asks, and
// prints the requests and updates of Watch on lines that begin with four blanks below the command.
// testdata/README.md lists the commands.
func TestScripts(t *testing.T) {
	scripttest.Run(t, func(t *testing.T, script string) (played string) {
		synctest.Test(t, func(t *testing.T) { played = runScript(t, script) })
		return played
	})
}

func runScript(t *testing.T, script string) string {
	s := &scriptedHost{T: t, start: time.Now(), nodes: map[string]*corev1.Node{}, config: filepath.Join(t.TempDir(), "net-conf.json")}
	s.write(`{"Network":"10.5.0.0/16"}`)
	defer s.stop()
	s.Play(script, s.command)
	s.stop()
	return s.String()
}

// scriptedHost is one host, and an API server whose only requests are those of the host.
type scriptedHost struct {
	*testing.T
	scripttest.Transcript
	start  time.Time
	config string // path of the configuration

	// The host.
	name   string
	ledger subnet.Ledger // survives restarts
	end    func()        // ends Watch, and waits for its end; nil if the host is stopped

	// The server.
	store    sync.Mutex // locked while the fields below are used
	nodes    map[string]*corev1.Node
	revision int
	history  []happening
	oldest   int            // events after this revision can be watched
	frozen   int            // the revision at which the server's cache stands still; 0 if it does not
	cached   []*corev1.Node // the Nodes in the server's cache while it stands still
	down     bool
	silent   bool          // the server sends no bookmarks
	slow     time.Duration // the time that an answer takes
	answers  []answer
	watches  map[*watcher]bool
}

// happening is a change in the store.
type happening struct {
	revision int
	kind     string
	node     *corev1.Node
}

// answer is what the server answers in place of the usual answer.
type answer struct {
	to          string // the first word of the request, as it is printed
	skip, times int    // requests that get the usual answer before, and those that get this one
	code        int
	retry       string
}

// watcher is a watch that the server has accepted.
type watcher struct{ send chan []byte }

// did prints what the host does, its requests last.
func (s *scriptedHost) did(request bool, format string, args ...any) {
	s.Did(time.Since(s.start), request, fmt.Sprintf(format, args...))
}

// command lets the host or the server do something, and waits until nothing more happens at that moment.
func (s *scriptedHost) command(name string, args []string) {
	defer synctest.Wait()
	switch name {
	case "start":
		s.name = args[0]
		s.run(subnet.LedgerState{})
	case "restart":
		s.stop()
		state := s.ledger.State()
		state.Store.Mark = cmp.Or(strings.ReplaceAll(s.option(args, "mark"), "/", " "), state.Store.Mark)
		forget := s.option(args, "forget")
		state.Peers = slices.DeleteFunc(state.Peers, func(p subnet.Peer) bool { return p.Lease.Key == forget })
		s.run(state)
	case "stop":
		s.stop()
	case "run":
		time.Sleep(s.duration(args[0]))
	case "network":
		s.write(fmt.Sprintf(`{"Network":%q,"EnableIPv6":%v,"IPv6Network":%q}`, args[0], len(args) > 1, strings.Join(args[1:], "")))
	default:
		s.store.Lock()
		defer s.store.Unlock()
		s.server(name, args)
	}
}

func (s *scriptedHost) option(args []string, key string) string {
	for _, a := range args {
		if value, ok := strings.CutPrefix(a, key+"="); ok {
			return value
		}
	}
	return ""
}

// server is a command that changes the server or its Nodes.
func (s *scriptedHost) server(name string, args []string) {
	switch name {
	case "node":
		s.node(args[0], args[1:])
	case "nodes":
		for n := range s.number(args[0]) {
			s.node(fmt.Sprintf("x%03d", n), []string{fmt.Sprintf("cidr=10.5.%d.0/24", n), fmt.Sprintf("ip=198.51.100.%d", n)})
		}
	case "annotate":
		s.change(args[0], func(n *corev1.Node) {
			for _, a := range args[1:] {
				key, value, _ := strings.Cut(a, "=")
				if n.Annotations[annotationKey(key)] = value; value == "" {
					delete(n.Annotations, annotationKey(key))
				}
			}
		})
	case "beat":
		s.change(args[0], func(*corev1.Node) {})
	case "delete":
		n := s.nodes[args[0]]
		delete(s.nodes, args[0])
		s.happen(wire.Deleted, n)
	case "other":
		s.revision += s.number(args[0])
	case "compact":
		s.oldest = s.revision
	case "revision":
		s.revision, s.history, s.oldest = s.number(args[0]), nil, 0
	case "wipe":
		s.nodes, s.revision, s.history, s.oldest = map[string]*corev1.Node{}, s.number(args[0]), nil, 0
		s.breakWatches()
	case "freeze":
		s.frozen, s.cached = s.revision, s.sorted()
	case "thaw":
		for _, h := range s.history {
			if h.revision > s.frozen {
				s.broadcast(s.event(h))
			}
		}
		s.frozen = 0
	case "silent":
		s.silent = true
	case "break":
		s.breakWatches()
	case "down":
		s.down = true
		s.breakWatches()
	case "up":
		s.down = false
	case "slow":
		s.slow = s.duration(args[0])
	case "refuse":
		a := answer{to: args[0], code: s.number(args[1]), retry: s.option(args, "retry"), times: 1}
		if times := s.option(args, "times"); times != "" {
			a.times = s.number(times)
		}
		if skip := s.option(args, "skip"); skip != "" {
			a.skip = s.number(skip)
		}
		s.answers = append(s.answers, a)
	default:
		s.Fatalf("there is no command %q", name)
	}
}

func (s *scriptedHost) write(config string) {
	if err := os.WriteFile(s.config, []byte(config), 0o600); err != nil {
		s.Fatal(err)
	}
}

func (s *scriptedHost) duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		s.Fatal(err)
	}
	return d
}

func (s *scriptedHost) number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		s.Fatal(err)
	}
	return n
}

// node creates a Node, or gives it podCIDRs.
func (s *scriptedHost) node(name string, options []string) {
	n := s.nodes[name]
	kind := wire.Modified
	if n == nil {
		kind = wire.Added
		n = newNode(name, s.revision+1)
		n.Labels = map[string]string{wire.HostnameLabel: name}
		s.nodes[name] = n
	}
	for _, o := range options {
		key, value, _ := strings.Cut(o, "=")
		switch key {
		case "cidr":
			n.Spec.PodCIDRs = strings.Split(value, ",")
		case "ip":
			n.Annotations[annotationKey("kube-subnet-manager")] = "true"
			n.Annotations[annotationKey("backend-type")] = "host-gw"
			n.Annotations[annotationKey("public-ip")] = value
		}
	}
	s.happen(kind, n)
}

func (s *scriptedHost) change(name string, change func(*corev1.Node)) {
	n := s.nodes[name].DeepCopy()
	change(n)
	s.nodes[name] = n
	s.happen(wire.Modified, n)
}

// happen gives a Node the next revision, and sends the event.
func (s *scriptedHost) happen(kind string, n *corev1.Node) {
	s.revision++
	n = n.DeepCopy()
	n.ResourceVersion = strconv.Itoa(s.revision)
	if kind != wire.Deleted {
		s.nodes[n.Name] = n
	}
	h := happening{s.revision, kind, n}
	s.history = append(s.history, h)
	if s.frozen == 0 {
		s.broadcast(s.event(h))
	}
}

func (s *scriptedHost) event(h happening) []byte {
	return wiretest.Event(s, h.kind, wiretest.Metadata(h.node))
}

func (s *scriptedHost) broadcast(event []byte) {
	for w := range s.watches {
		w.send <- event
	}
}

func (s *scriptedHost) breakWatches() {
	for w := range s.watches {
		close(w.send)
	}
	clear(s.watches)
}

func (s *scriptedHost) sorted() []*corev1.Node {
	var all []*corev1.Node
	for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
		all = append(all, s.nodes[name])
	}
	return all
}

// run starts Watch with that last known state.
func (s *scriptedHost) run(known subnet.LedgerState) {
	cfg := Config{
		APIURL: "http://api", NodeName: s.name, NetConfig: s.config, Known: known,
		OnRepaired: func(n int) { s.did(false, "leases of the last known state that were wrong: %d", n) },
	}
	if own := s.nodes[s.name]; own != nil {
		cfg.Own = subnet.Lease{Key: s.name, Order: uint64(own.CreationTimestamp.Unix())}
		for _, cidr := range own.Spec.PodCIDRs {
			cfg.Own.Endpoints = append(cfg.Own.Endpoints, subnet.Endpoint{Subnet: netip.MustParsePrefix(cidr)})
		}
	}
	m, err := New(cfg)
	if err != nil {
		s.Fatal(err)
	}
	m.client.http = &http.Client{Transport: s}
	m.client.random = func(most time.Duration) time.Duration { return most * 2 / 5 }
	m.timing.vary = 1e-9
	s.ledger = subnet.Ledger{}
	s.ledger.Restore(known, time.Now())
	s.watches = map[*watcher]bool{}

	log := funcr.New(func(_, args string) {
		_, text, _ := strings.Cut(args, `"msg"=`)
		s.did(false, "log %s", strings.Replace(text, ` "error"=null`, "", 1))
	}, funcr.Options{})
	ctx, cancel := context.WithCancel(klog.NewContext(s.Context(), log))
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = m.Watch(ctx, s.sink)
	}()
	s.end = func() {
		cancel()
		<-done
		m.Close()
	}
	synctest.Wait()
}

func (s *scriptedHost) stop() {
	if s.end != nil {
		s.end()
		s.end = nil
		synctest.Wait()
	}
}

// sink applies an update to the ledger, and prints it.
func (s *scriptedHost) sink(u subnet.Update) {
	var words []string
	add := func(l *subnet.Lease) {
		for _, e := range l.Endpoints {
			words = append(words, fmt.Sprintf("%s=%s,%s", l.Key, e.Subnet, e.PublicIP))
		}
	}
	what := "publish"
	undecodable := u.Undecodable
	if u.Changed == nil {
		what = "publish all"
		all := u.Snapshot()
		undecodable = all.Undecodable
		for _, l := range all.Leases {
			add(l)
		}
	}
	for name, l := range u.Changed {
		if l == nil {
			words = append(words, name+" has no lease")
			continue
		}
		add(l)
	}
	for _, name := range undecodable {
		words = append(words, name+" cannot be read")
	}
	slices.Sort(words)
	if len(words) > 6 {
		words = []string{fmt.Sprintf("%d leases", len(words))}
	}
	if u.Store.Mark != "" {
		what = "publish the mark " + strconv.Quote(u.Store.Mark)
	}
	s.did(false, "%s at %d: %s", what, u.Store.Revision, cmp.Or(strings.Join(words, " "), "nothing has changed"))

	if _, ok := s.ledger.Follow(u, time.Now()); !ok {
		s.ledger.Apply(u.Snapshot(), time.Now())
	}
}

// quick is the time that each answer takes, so that what happens at one moment is not overtaken by answers.
const quick = 10 * time.Millisecond

// RoundTrip implements http.RoundTripper: it is the API server.
func (s *scriptedHost) RoundTrip(r *http.Request) (*http.Response, error) {
	what := describe(r)
	s.store.Lock()
	slow, refused := s.slow, s.refused(what)
	down := s.down
	s.store.Unlock()
	switch {
	case down:
		s.did(true, "%s: connection refused", what)
		return nil, syscall.ECONNREFUSED
	case refused.code > 0:
		s.did(true, "%s: %d", what, refused.code)
		return &http.Response{StatusCode: refused.code, Header: http.Header{"Retry-After": {refused.retry}}, Body: http.NoBody}, nil
	}

	s.did(true, "%s", what)
	if trace := httptrace.ContextClientTrace(r.Context()); trace != nil {
		trace.WroteRequest(httptrace.WroteRequestInfo{})
	}
	time.Sleep(slow + quick)
	q := r.URL.Query()
	from, _ := strconv.Atoi(q.Get("resourceVersion"))
	if s.ahead(q, from) { // a server waits until its cache has the revision
		time.Sleep(3 * time.Second)
		return response(http.StatusGatewayTimeout, wiretest.Object(s, statusOf(http.StatusGatewayTimeout, metav1.StatusReasonTimeout, "ResourceVersionTooLarge"))), nil
	}
	s.store.Lock()
	defer s.store.Unlock()
	if q.Has("watch") {
		return s.watch(r.Context(), q, from), nil
	}
	return s.list(r, from), nil
}

// refused returns the refusal of a request, or the zero answer.
func (s *scriptedHost) refused(what string) answer {
	verb, _, _ := strings.Cut(what, " ")
	for i := range s.answers {
		a := &s.answers[i]
		switch {
		case a.to != verb || a.times == 0:
		case a.skip > 0:
			a.skip--
		default:
			a.times--
			return *a
		}
	}
	return answer{}
}

// describe says what a request asks for.
func describe(r *http.Request) string {
	q := r.URL.Query()
	revision := q.Get("resourceVersion")
	name, one := strings.CutPrefix(q.Get("fieldSelector"), "metadata.name=")
	what := ""
	switch metadata := strings.Contains(r.Header.Get("Accept"), "Metadata"); {
	case q.Has("watch"):
		return "watch from " + revision
	case one:
		what = "read " + name
	case q.Get("labelSelector") != "":
		_, hosts, _ := strings.Cut(strings.TrimSuffix(q.Get("labelSelector"), ")"), "(")
		what = fmt.Sprintf("read %d Nodes by label", strings.Count(hosts, ",")+1)
	case q.Get("limit") == "1":
		what = "count the Nodes"
	case q.Has("limit"):
		what = strings.TrimSpace("page of metadata " + q.Get("continue"))
	case metadata:
		what = "list metadata"
	default:
		what = "list whole Nodes"
	}
	switch {
	case one && q.Get("resourceVersionMatch") == "Exact":
		return fmt.Sprintf("check %s at %s", name, revision)
	case q.Get("resourceVersionMatch") == "Exact":
		return what + " at " + revision
	case revision != "":
		return what + " not older than " + revision
	}
	return what
}

// ahead reports whether the server's cache has not reached the revision of a list.
func (s *scriptedHost) ahead(q url.Values, from int) bool {
	s.store.Lock()
	defer s.store.Unlock()
	return !q.Has("watch") && q.Get("resourceVersionMatch") != "Exact" && s.frozen > 0 && from > s.frozen
}

// list answers a request for Nodes.
func (s *scriptedHost) list(r *http.Request, from int) *http.Response {
	q := r.URL.Query()
	revision, all := s.revision, s.sorted()
	begin := 0
	exact := q.Get("resourceVersionMatch") == "Exact"
	if n, _ := fmt.Sscanf(q.Get("continue"), "%d at %d", &begin, &from); n == 2 {
		exact = true
	}
	switch {
	case exact && from < s.oldest:
		return response(http.StatusGone, wiretest.Object(s, statusOf(http.StatusGone, metav1.StatusReasonExpired, "")))
	case exact:
		revision, all = from, s.at(from)
	case from > 0 && s.frozen > 0:
		revision, all = s.frozen, s.cached
	}

	if name, ok := strings.CutPrefix(q.Get("fieldSelector"), "metadata.name="); ok {
		all = slices.DeleteFunc(slices.Clone(all), func(n *corev1.Node) bool { return n.Name != name })
	}
	if selector := q.Get("labelSelector"); selector != "" {
		all = slices.DeleteFunc(slices.Clone(all), func(n *corev1.Node) bool { return !strings.Contains(selector, n.Labels[wire.HostnameLabel]) })
	}

	next := ""
	var remaining *int64
	if limit, _ := strconv.Atoi(q.Get("limit")); limit > 0 {
		end := min(begin+limit, len(all))
		if left := int64(len(all) - end); left > 0 {
			next = fmt.Sprintf("%d at %d", end, revision)
			remaining = &left
		}
		all = all[begin:end]
	}
	meta := metav1.ListMeta{ResourceVersion: strconv.Itoa(revision), Continue: next, RemainingItemCount: remaining}
	if strings.Contains(r.Header.Get("Accept"), "Metadata") {
		l := &metav1.PartialObjectMetadataList{ListMeta: meta}
		for _, n := range all {
			l.Items = append(l.Items, *wiretest.Metadata(n))
		}
		return response(http.StatusOK, wiretest.Object(s, l))
	}
	l := &corev1.NodeList{ListMeta: meta}
	for _, n := range all {
		l.Items = append(l.Items, *n)
	}
	return response(http.StatusOK, wiretest.Object(s, l))
}

// at returns the Nodes as they were at a revision.
func (s *scriptedHost) at(revision int) []*corev1.Node {
	was := map[string]*corev1.Node{}
	for _, h := range s.history {
		if h.revision > revision {
			break
		}
		was[h.node.Name] = h.node
		if h.kind == wire.Deleted {
			delete(was, h.node.Name)
		}
	}
	return slices.SortedFunc(maps.Values(was), func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
}

func response(code int, body []byte) *http.Response {
	return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(body))}
}

func statusOf(code int, reason metav1.StatusReason, cause metav1.CauseType) *metav1.Status {
	status := &metav1.Status{Code: int32(code), Reason: reason, Message: cmp.Or(string(cause), string(reason))}
	if cause != "" {
		status.Details = &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: cause}}}
	}
	return status
}

// watch accepts a watch. As a server does, it answers a watch from a compacted revision with an event.
func (s *scriptedHost) watch(ctx context.Context, q url.Values, from int) *http.Response {
	body, to := io.Pipe()
	w := &watcher{send: make(chan []byte, 1000)}
	if from < s.oldest {
		w.send <- wiretest.Event(s, "ERROR", statusOf(http.StatusGone, metav1.StatusReasonExpired, ""))
	} else {
		for _, h := range s.history {
			if h.revision > from && (s.frozen == 0 || h.revision <= s.frozen) {
				w.send <- s.event(h)
			}
		}
	}
	s.watches[w] = true
	seconds, _ := strconv.Atoi(q.Get("timeoutSeconds"))
	go func() {
		to.CloseWithError(s.serve(ctx, w, time.Duration(seconds)*time.Second, to))
		s.store.Lock()
		defer s.store.Unlock()
		delete(s.watches, w)
	}()
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: body}
}

// serve sends events and bookmarks. It returns nil when the watch ends after its time.
func (s *scriptedHost) serve(ctx context.Context, w *watcher, lasts time.Duration, to io.Writer) error {
	ends := time.After(lasts)
	minutes := time.NewTicker(time.Minute)
	defer minutes.Stop()
	for {
		var event []byte
		var open bool
		select {
		case event, open = <-w.send:
			if !open {
				return errors.New("connection reset by peer")
			}
		case <-minutes.C:
			event = s.bookmark()
		case <-ends:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
		if _, err := to.Write(event); err != nil {
			return err
		}
	}
}

// bookmark returns the event with the server's revision, or nothing.
func (s *scriptedHost) bookmark() []byte {
	s.store.Lock()
	defer s.store.Unlock()
	if s.silent || s.frozen > 0 {
		return nil
	}
	return wiretest.Event(s, wire.Bookmark, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(s.revision)}})
}
