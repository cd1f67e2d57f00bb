// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/report/mesh"
)

// TestHostileHosts checks that each bad answer of a host is recorded as the problem of that host: an
// endless answer, a redirect, an error, no answer, a part of an answer, and an empty one. The redirect
// must not be followed.
func TestHostileHosts(t *testing.T) {
	var followed atomic.Bool
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { followed.Store(true) }))
	defer other.Close()
	for _, tc := range []struct {
		name   string
		answer http.HandlerFunc
		want   string // part of the problem
	}{
		{"endless", func(w http.ResponseWriter, _ *http.Request) {
			for block := bytes.Repeat([]byte(" "), 1<<20); ; {
				if _, err := w.Write(block); err != nil {
					return
				}
			}
		}, "its answer is larger than 264192 bytes"},
		{"redirect", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, other.URL, http.StatusFound) }, "302 Found"},
		{"error", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "\x1b[2J", http.StatusTeapot) }, "418 I'm a teapot"},
		{"silent", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "it does not answer within 2s"},
		{"slow", func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write([]byte("{"))
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, "read its answer: it does not answer within 2s"},
		{"empty", func(http.ResponseWriter, *http.Request) {}, "its answer is not a status"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := httptest.NewServer(tc.answer)
			defer server.Close()
			at := netip.MustParseAddrPort(server.Listener.Addr().String())
			f := meshFlags{port: at.Port(), clusterFlags: clusterFlags{timeout: 2 * time.Second}}
			c := cluster{hosts: []mesh.Host{{Key: "a", Name: "a", PublicIPs: []netip.Addr{at.Addr()}}}, ask: f.overHTTP()}
			var told string
			c.failed = func(h mesh.Host, why string) { told = h.Name + ": " + why }
			m, err := c.collect(t.Context(), f.timeout)
			if err != nil {
				t.Fatal(err)
			}
			if got := m.Problem(0); !strings.Contains(got, tc.want) || told != "a: "+got {
				t.Errorf("the problem is %q, want %q; told: %q", got, tc.want, told)
			}
		})
	}
	if followed.Load() {
		t.Error("a redirect was followed")
	}
}

// TestSecondFamily checks that a host is asked at its second public address if the first does not answer.
func TestSecondFamily(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.String() != "/statusz.json?network=red&paths=all" {
			t.Errorf("%s is requested", r.URL)
		}
		_, _ = w.Write([]byte("hello"))
	}))
	defer server.Close()
	at, network := netip.MustParseAddrPort(server.Listener.Addr().String()), "red"
	f := meshFlags{port: at.Port(), clusterFlags: clusterFlags{timeout: 10 * time.Second}}
	f.store.network = network
	h := mesh.Host{PublicIPs: []netip.Addr{netip.MustParseAddr("127.0.0.2"), at.Addr()}}
	answer, err := f.overHTTP()(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Close()
	if body, err := io.ReadAll(answer); err != nil || string(body) != "hello" {
		t.Errorf("%q, %v", body, err)
	}
}

// TestMeshChanges checks that an update prints only what differs from the last one, and that a broken
// path stays broken while nothing is known about it.
func TestMeshChanges(t *testing.T) {
	const status = `{"lease":{"key":"a"},"paths":{"worst":[{"peer":"b",%s}]}}`
	answer := func(path string) func(*mesh.Matrix) {
		return func(m *mesh.Matrix) { m.Answer(0, []byte(strings.Replace(status, "%s", path, 1))) }
	}
	b := func(m *mesh.Matrix) { m.Answer(1, []byte(`{"lease":{"key":"b"},"paths":{"worst":[]}}`)) }
	var reported meshReport
	for i, step := range []struct {
		change func(*mesh.Matrix)
		want   string
	}{
		{answer(`"ok":true`), "= 1 ok, 0 broken, 1 unknown\n"},
		{answer(`"broken":"mtu","advice":"up to 1300"`), "! a -> b mtu: up to 1300\n"},
		{answer(`"broken":"mtu","advice":"up to 1290"`), ""},
		{answer(`"broken":"underlay","advice":"look"`), "! a -> b underlay: look\n"},
		{func(m *mesh.Matrix) { m.Fail(0, errors.New("no answer")) }, "! a nothing is known: no answer\n"},
		{func(m *mesh.Matrix) { m.Fail(0, errors.New("another reason")) }, ""},
		{answer(`"broken":"underlay","advice":"look"`), "+ a ok\n"},
		{answer(`"ok":true`), "+ a -> b ok\n"},
	} {
		m := mesh.New([]mesh.Host{{Key: "a", Name: "a"}, {Key: "b", Name: "b"}})
		step.change(m)
		b(m)
		if got := updateOf(&reported, m); got != step.want {
			t.Errorf("step %d prints %q, want %q", i+1, got, step.want)
		}
	}
	// Now there is also a lease of c, which does not answer. After that, the leases of b and c end.
	m := mesh.New([]mesh.Host{{Key: "a", Name: "a"}, {Key: "b", Name: "b"}, {Key: "c", Name: "c"}})
	answer(`"broken":"underlay","advice":"look"`)(m)
	b(m)
	m.Fail(2, errors.New("no answer"))
	if got, want := updateOf(&reported, m), "! a -> b underlay: look\n! c nothing is known: no answer\n"; got != want {
		t.Errorf("before they end: %q, want %q", got, want)
	}
	m = mesh.New([]mesh.Host{{Key: "a", Name: "a"}})
	m.Answer(0, []byte(`{"lease":{"key":"a"},"paths":{"worst":[]}}`))
	if got, want := updateOf(&reported, m), "- a -> b gone\n- c gone\n"; got != want {
		t.Errorf("after they have ended: %q, want %q", got, want)
	}
}

// updateOf calls update and returns what it prints, without the times.
func updateOf(r *meshReport, m *mesh.Matrix) string {
	var out bytes.Buffer
	r.update(&out, m)
	return regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d `).ReplaceAllString(out.String(), "")
}

// TestMeshChangesAreLimited checks that an update prints a limited number of lines, and that the report
// keeps a limited number of paths, if all paths of many hosts are broken. Repaired paths must be noticed
// nevertheless.
func TestMeshChangesAreLimited(t *testing.T) {
	const n = 60
	var all []mesh.Host
	for i := range n {
		all = append(all, mesh.Host{Key: fmt.Sprint(i), Name: fmt.Sprint(i)})
	}
	// build returns a mesh. All paths from the first hosts are in order, and all paths from the other
	// hosts are broken. work is the number of the first hosts.
	build := func(work int) *mesh.Matrix {
		m := mesh.New(all)
		for i, h := range m.Hosts {
			result := `"broken":"network","advice":"x"`
			if i < work {
				result = `"ok":true`
			}
			var list []string
			for to := range n {
				list = append(list, fmt.Sprintf(`{"peer":"%d",%s}`, to, result))
			}
			m.Answer(i, []byte(`{"lease":{"key":"`+h.Key+`"},"paths":{"worst":[`+strings.Join(list, ",")+`]}}`))
		}
		return m
	}
	var r meshReport
	lines := func(m *mesh.Matrix) []string { return strings.Split(strings.TrimSpace(updateOf(&r, m)), "\n") }
	got := lines(build(0))
	if len(got) != maxChanges+2 || got[0] != "= 0 ok, 3540 broken, 0 unknown; 2540 of the broken paths are not listed" || got[len(got)-1] != "! and 950 more" || len(r.known) != maxWatched {
		t.Errorf("%d lines, %d paths are watched, first %q, last %q", len(got), len(r.known), got[0], got[len(got)-1])
	}
	if got := lines(build(0)); got[0] != "" {
		t.Errorf("nothing has changed, and %q is printed", got)
	}
	for range 5 { // with each update, paths that were not listed take the places of repaired ones
		lines(build(n / 2))
	}
	if len(r.known) != maxWatched || r.unlisted != n/2*(n-1)-maxWatched {
		t.Errorf("%d paths are watched, %d are not", len(r.known), r.unlisted)
	}
	if got := lines(build(n)); len(got) != maxChanges+2 || got[0] != "= 3540 ok, 0 broken, 0 unknown" || got[len(got)-1] != "+ and 950 more" || len(r.known) != 0 {
		t.Errorf("%d lines, first %q, last %q", len(got), got[0], got[len(got)-1])
	}
}

// TestRest checks that a watch pauses at least as long as the last round of questions took.
func TestRest(t *testing.T) {
	for _, tc := range []struct{ took, want time.Duration }{{0, 10 * time.Second}, {time.Second, 9 * time.Second}, {6 * time.Second, 6 * time.Second}, {time.Minute, time.Minute}} {
		if got := restAfter(tc.took, 10*time.Second); got != tc.want {
			t.Errorf("after %s: %s, want %s", tc.took, got, tc.want)
		}
	}
}

// TestDeadHosts asks hundreds of hosts that do not answer, and as many that do. It checks that the time
// is limited, and that meshReading answers are read at the same time, but no more.
func TestDeadHosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const dead, alive = 300, 300
		var reading, most atomic.Int64
		var all []mesh.Host
		for i := range dead + alive {
			all = append(all, mesh.Host{Key: fmt.Sprint(i), Name: fmt.Sprint(i)})
		}
		c := cluster{hosts: all, ask: func(ctx context.Context, h mesh.Host) (io.ReadCloser, error) {
			if n, _ := strconv.Atoi(h.Key); n < dead {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return &countedAnswer{Reader: strings.NewReader(`{"lease":{"key":"` + h.Key + `"},"paths":{"worst":[]}}`), reading: &reading, most: &most}, nil
		}}
		begin := time.Now()
		m, err := c.collect(t.Context(), 500*time.Millisecond)
		if took := time.Since(begin); err != nil || took > 5*time.Second {
			t.Errorf("it took %s, %v", took, err)
		}
		for i, h := range m.Hosts {
			n, _ := strconv.Atoi(h.Key)
			if got := m.Problem(i); n < dead && got != "it does not answer within 500ms" || n >= dead && got != "" {
				t.Errorf("host %s: %q", h.Key, got)
			}
		}
		if n := most.Load(); n != meshReading {
			t.Errorf("%d answers were read at the same time, want %d", n, meshReading)
		}
	})
}

// countedAnswer counts the answers that are being read: from the first byte to the end.
type countedAnswer struct {
	io.Reader
	reading, most *atomic.Int64
	begun         bool
}

func (a *countedAnswer) Read(b []byte) (int, error) {
	if !a.begun {
		a.begun = true
		for n := a.reading.Add(1); ; {
			if was := a.most.Load(); n <= was || a.most.CompareAndSwap(was, n) {
				break
			}
		}
		time.Sleep(time.Millisecond) // so that more answers are read at the same time
	}
	n, err := a.Reader.Read(b)
	if err != nil {
		a.reading.Add(-1)
	}
	return n, err
}

func (*countedAnswer) Close() error { return nil }
