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

	"github.com/flanneld/flanneld/subnet/kube/wire"
	"github.com/flanneld/flanneld/subnet/kube/wire/wiretest"
)

// lastMoment answers a request when its context ends.
type lastMoment struct{}

func (lastMoment) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(iotest.ErrReader(r.Context().Err()))}, nil
}

// A watch that is taken as it is given up is one that came to nothing, which Keep
// tries again, not the end of what it is for.
func TestWatchTakenAtTheLastMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &client{base: &url.URL{Scheme: "https", Host: "api"}, http: &http.Client{Transport: lastMoment{}}}
		err := c.watch(t.Context(), wire.NewDecoder(nil), query{revision: 1}, func() { t.Error("it is taken for one that lives") }, nil)
		if !passes(err) {
			t.Errorf("got %v, want an error that passes", err)
		}
	})
}

// A connection that leads nowhere any more says nothing: how long a watch waits for
// it is the kernel's affair, unless HTTP/2 asks.
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

// firstPage answers every request with the first page of a list.
type firstPage struct{ t *testing.T }

// RoundTrip implements http.RoundTripper.
func (p firstPage) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(wiretest.List(p.t, "1", "token")))}, nil
}

// TestPageThatWasNotAskedFor expects that a part of a list does not pass for the whole list.
func TestPageThatWasNotAskedFor(t *testing.T) {
	c := &client{host: "host", base: &url.URL{Scheme: "http", Host: "host"}, http: &http.Client{Transport: firstPage{t}}}
	on := func(*wire.Node) {}
	if _, err := c.list(t.Context(), defaultKeys().newDecoder(), query{}, on); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("the first page passes for the whole list: %v", err)
	}
	if l, err := c.list(t.Context(), defaultKeys().newDecoder(), query{limit: 1}, on); err != nil || l.Continue != "token" {
		t.Errorf("the first page goes on with %q, %v, want the token", l.Continue, err)
	}
}
