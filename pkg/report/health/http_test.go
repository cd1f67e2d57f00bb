// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHandler(t *testing.T) {
	good := New(0)
	bad := New(0, "network")
	bad.Set("subnet file", errors.New("disk full"))

	type reply struct {
		Code int
		Body string
	}
	tests := map[string]struct {
		status       *Status
		method, path string
		want         reply
	}{
		"running":             {bad, "GET", "/healthz", reply{200, "flanneld is running"}},
		"any method":          {good, "POST", "/healthz", reply{200, "flanneld is running"}},
		"query":               {good, "GET", "/healthz?verbose", reply{200, "flanneld is running"}},
		"ready":               {good, "GET", "/readyz", reply{200, "flanneld is ready"}},
		"not ready":           {bad, "GET", "/readyz", reply{503, "flanneld is not ready yet\nnetwork: not up yet\nsubnet file: disk full"}},
		"trailing slash":      {good, "GET", "/healthz/", reply{404, "404 page not found\n"}},
		"doubled slash":       {good, "GET", "//healthz", reply{404, "404 page not found\n"}},
		"root":                {good, "GET", "/", reply{404, "404 page not found\n"}},
		"no debug pages":      {good, "GET", "/debug/requests", reply{404, "404 page not found\n"}},
		"no metrics yet":      {good, "GET", "/metrics", reply{404, "404 page not found\n"}},
		"no profiling":        {good, "GET", "/debug/pprof/", reply{404, "404 page not found\n"}},
		"case does not match": {good, "GET", "/Readyz", reply{404, "404 page not found\n"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			Handler(tt.status).ServeHTTP(w, httptest.NewRequest(tt.method, tt.path, nil))
			if diff := cmp.Diff(tt.want, reply{w.Code, w.Body.String()}); diff != "" {
				t.Errorf("%s %s (-want +got):\n%s", tt.method, tt.path, diff)
			}
			if got := w.Header().Get("Content-Type"); got != "text/plain; charset=utf-8" {
				t.Errorf("Content-Type %q", got)
			}
		})
	}
}

func TestHandlerStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(time.Minute)
		s.Beat()
		time.Sleep(2 * time.Minute)
		w := httptest.NewRecorder()
		Handler(s).ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
		const want = "flanneld is stuck\nmain loop stands still for 2m0s, expected a round every 1m0s"
		if w.Code != http.StatusServiceUnavailable || w.Body.String() != want {
			t.Errorf("got %d %q, want 503 %q", w.Code, w.Body, want)
		}
	})
}

// start serves h on loopback. stop ends the server and returns the result of Serve.
func start(t *testing.T, h http.Handler) (url string, stop func() error) {
	t.Helper()
	ln, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, ln, h) }()
	return "http://" + ln.Addr().String(), func() error {
		cancel()
		return <-done
	}
}

func TestServe(t *testing.T) {
	url, stop := start(t, Handler(New(0)))
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()

	resp, err := client.Get(url + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || resp.StatusCode != http.StatusOK || string(body) != "flanneld is ready" {
		t.Errorf("GET: %d %q %v", resp.StatusCode, body, err)
	}

	resp, err = client.Head(url + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.ContentLength != int64(len("flanneld is running")) {
		t.Errorf("HEAD: %d, length %d", resp.StatusCode, resp.ContentLength)
	}

	if err := stop(); err != nil {
		t.Errorf("Serve returned %v after its context ended", err)
	}
	if resp, err := client.Get(url + "/healthz"); err == nil {
		resp.Body.Close()
		t.Error("the port still answers after Serve returned")
	}
}

func TestServeFinishesOpenRequests(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	url, stop := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(begun)
		<-release
		io.WriteString(w, "done")
	}))
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	got := make(chan string, 1)
	go func() {
		resp, err := client.Get(url)
		if err != nil {
			got <- err.Error()
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		got <- string(body)
	}()
	<-begun
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	close(release)
	if text := <-got; text != "done" {
		t.Errorf("the open request got %q", text)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

func TestShutdownIsBounded(t *testing.T) {
	begun := make(chan struct{})
	url, stop := start(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(begun)
		<-r.Context().Done() // ends only when the connection is closed
	}))
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	failed := make(chan error, 1)
	go func() {
		resp, err := client.Get(url)
		if err == nil {
			resp.Body.Close()
		}
		failed <- err
	}()
	<-begun
	began := time.Now()
	if err := stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 3*shutdownTimeout {
		t.Errorf("Serve took %s to return", took)
	}
	if err := <-failed; err == nil {
		t.Error("the hanging request got an answer")
	}
}

func TestListenNamesTheAddress(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	addr := ln.Addr().String()
	_, err = Listen(t.Context(), addr)
	if err == nil || !strings.Contains(err.Error(), "open health port: listen tcp "+addr) {
		t.Errorf("Listen on a port in use: %v, want an error that names %s", err, addr)
	}
}

// TestListenOnAPortThatIsFreedLater stands for the start after a crash, when a child of the former process
// still has its port.
func TestListenOnAPortThatIsFreedLater(t *testing.T) {
	former, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(100*time.Millisecond, func() { former.Close() })

	ln, err := Listen(t.Context(), former.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
}

func TestServeReturnsAFailure(t *testing.T) {
	ln, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if err := Serve(t.Context(), ln, Handler(New(0))); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve on a closed listener: %v", err)
	}
}
