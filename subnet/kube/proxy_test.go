// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
)

// proxy is a proxy before an API server. It records requests, and answers some of them itself.
type proxy struct {
	*httptest.Server
	pass      func(http.ResponseWriter, *http.Request) // forwards a request to the API server
	mu        sync.Mutex
	intercept func(http.ResponseWriter, *http.Request) bool
	seen      []string     // requests, as method and path with query
	sent      atomic.Int64 // bytes in the bodies of the API server's answers
}

// counter counts the bytes of an answer.
type counter struct {
	http.ResponseWriter
	sent *atomic.Int64
}

// Write implements io.Writer.
func (c counter) Write(b []byte) (int, error) {
	c.sent.Add(int64(len(b)))
	return c.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (c counter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func newProxy(t *testing.T, s *server) *proxy {
	t.Helper()
	to, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}
	rp := httputil.NewSingleHostReverseProxy(to)
	rp.Transport = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true} // a self-signed certificate on loopback
	rp.FlushInterval = -1
	rp.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }
	p := &proxy{pass: rp.ServeHTTP}
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		p.seen = append(p.seen, r.Method+" "+r.URL.String())
		intercept := p.intercept
		p.mu.Unlock()
		if intercept == nil || !intercept(w, r) {
			p.pass(counter{w, &p.sent}, r)
		}
	}))
	p.EnableHTTP2 = true
	p.Config.ErrorLog = nil
	p.StartTLS()
	t.Cleanup(func() {
		p.CloseClientConnections()
		rp.Transport.(*http.Transport).CloseIdleConnections()
		p.Close()
	})
	return p
}

// answer makes f answer requests. If f returns false or is nil, the API server answers. answer also
// clears the record of requests that the methods requests and lists return.
func (p *proxy) answer(f func(http.ResponseWriter, *http.Request) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.intercept = f
	p.seen = nil
}

// requests returns the requests since the last call of answer.
func (p *proxy) requests() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.seen...)
}

// status returns a function for answer that answers every request with that HTTP status.
func status(code int) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		return true
	}
}
