// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/mesh"
)

// TestHostileHosts asks hosts that answer without an end, with a redirect, with an error and not at all.
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
		}, "its answer is larger than 8388608 bytes"},
		{"redirect", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, other.URL, http.StatusFound) }, "302 Found"},
		{"error", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "\x1b[2J", http.StatusTeapot) }, "418 I'm a teapot"},
		{"silent", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "deadline exceeded"},
		{"empty", func(http.ResponseWriter, *http.Request) {}, "its answer is not a status"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := httptest.NewServer(tc.answer)
			defer server.Close()
			at := netip.MustParseAddrPort(server.Listener.Addr().String())
			f := meshFlags{port: at.Port(), timeout: 2 * time.Second}
			f.store.network = new(string)
			c := cluster{hosts: []mesh.Host{{Key: "a", Name: "a", PublicIPs: []netip.Addr{at.Addr()}}}, ask: f.overHTTP()}
			m, err := c.collect(t.Context(), f.timeout)
			if err != nil {
				t.Fatal(err)
			}
			if got := m.Problem(0); !strings.Contains(got, tc.want) {
				t.Errorf("the problem is %q, want %q", got, tc.want)
			}
		})
	}
	if followed.Load() {
		t.Error("a redirect was followed")
	}
}

// TestSecondFamily asks the second public address of a host if the first does not answer.
func TestSecondFamily(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.String() != "/statusz.json?network=red&paths=all" {
			t.Errorf("%s is requested", r.URL)
		}
		_, _ = w.Write([]byte("hello"))
	}))
	defer server.Close()
	at, network := netip.MustParseAddrPort(server.Listener.Addr().String()), "red"
	f := meshFlags{port: at.Port(), timeout: 10 * time.Second}
	f.store.network = &network
	h := mesh.Host{PublicIPs: []netip.Addr{netip.MustParseAddr("127.0.0.2"), at.Addr()}}
	if body, err := f.overHTTP()(t.Context(), h); err != nil || string(body) != "hello" {
		t.Errorf("%q, %v", body, err)
	}
}

// TestMeshChanges prints what differs between questions. A path of which nothing is known for a while
// stays broken.
func TestMeshChanges(t *testing.T) {
	const status = `{"lease":{"key":"a"},"paths":{"worst":[{"peer":"b",%s}]}}`
	answer := func(path string) func(*mesh.Matrix) {
		return func(m *mesh.Matrix) { m.Answer(0, []byte(strings.Replace(status, "%s", path, 1))) }
	}
	b := func(m *mesh.Matrix) { m.Answer(1, []byte(`{"lease":{"key":"b"},"paths":{"worst":[]}}`)) }
	var known troubles
	for i, step := range []struct {
		change func(*mesh.Matrix)
		want   string
	}{
		{answer(`"ok":true`), ""},
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
		now := troublesOf(m, known)
		var out bytes.Buffer
		printChanges(&out, known, now)
		known = now
		if got := regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d `).ReplaceAllString(out.String(), ""); got != step.want {
			t.Errorf("step %d prints %q, want %q", i+1, got, step.want)
		}
	}
}
