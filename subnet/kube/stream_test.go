// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"syscall"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire/wiretest"
)

// answersAtTheEnd answers a request when the context of the request ends.
type answersAtTheEnd struct{}

func (answersAtTheEnd) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(iotest.ErrReader(r.Context().Err()))}, nil
}

// TestWatchAcceptedAtTheDeadline makes a server accept a watch at the moment at which the client
// ends the request. watch must return an error after which Keep tries again.
func TestWatchAcceptedAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &client{random: randomTime, base: &url.URL{Scheme: "https", Host: "api"}, http: &http.Client{Transport: answersAtTheEnd{}}}
		err := c.watch(t.Context(), wire.NewDecoder(nil, ""), query{revision: 1}, func() { t.Error("the watch counts as accepted") }, nil)
		if !loglimit.Passes(err) {
			t.Errorf("got %v, want an error that passes", err)
		}
	})
}

// TestDeadConnectionIsGivenUp reads the options of a connection, and expects that the kernel closes
// it after at most 45 s without an answer. Otherwise a watch over HTTP/1.1 would wait for ever on a
// dead connection.
func TestDeadConnectionIsGivenUp(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := newDialer().DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		get := func(option int) int {
			n, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, option)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		if after := get(syscall.TCP_KEEPIDLE) + get(syscall.TCP_KEEPINTVL)*get(syscall.TCP_KEEPCNT); after > 45 {
			t.Errorf("it is given up after %d s, want 45", after)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// firstPage answers every request with an empty first page of a list that has more pages.
type firstPage struct{ t *testing.T }

// RoundTrip implements http.RoundTripper.
func (p firstPage) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(wiretest.List(p.t, "1", "token")))}, nil
}

// TestPageThatWasNotAskedFor expects an error if the server answers with a page although the whole
// list was requested.
func TestPageThatWasNotAskedFor(t *testing.T) {
	c := &client{random: randomTime, host: "host", base: &url.URL{Scheme: "http", Host: "host"}, http: &http.Client{Transport: firstPage{t}}}
	on := func(*wire.Node) {}
	if _, err := c.list(t.Context(), newDecoder(), query{}, on); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("the first page counts as the complete list: %v", err)
	}
	if l, err := c.list(t.Context(), newDecoder(), query{limit: 1}, on); err != nil || l.Continue != "token" {
		t.Errorf("the first page continues with %q, %v, want the token", l.Continue, err)
	}
}
