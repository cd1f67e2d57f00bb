// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net/http"
	"net/netip"
	"runtime/pprof"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loop"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/health"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// journalSize is the number of log lines on the status page.
const journalSize = 200

// listen opens the local socket, the health port and the address of --statusz-address, as far as they are
// configured. group serves them until members, its context, ends, even if listen returns an error.
func listen(ctx, members context.Context, group *errgroup.Group, o options.Options, s served) error {
	mux := http.NewServeMux()
	mux.Handle("/metrics", throttled(metrics.Handler(s.Metrics)))
	mux.Handle("/", health.Handler(s))
	page := status.Handler(s.Report)
	with := func(page http.Handler) http.Handler {
		local := http.NewServeMux()
		local.Handle("/statusz", page)
		local.Handle("/statusz.json", page)
		local.Handle("/", mux)
		return local
	}

	if path := o.SocketPath(); path != "" {
		ln, err := status.Listen(ctx, path)
		if err != nil { // it is only for inspection
			klog.FromContext(ctx).Error(err, "continuing without the status socket: flannelctl status will not work")
		} else {
			local := http.NewServeMux()
			local.HandleFunc("/debug/goroutines", goroutines)
			local.Handle("/", with(page))
			group.Go(func() error {
				return loop.New(time.Minute, func(ctx context.Context) error {
					if ln == nil {
						if ln, err = status.Listen(ctx, path); err != nil {
							return err
						}
					}
					_ = health.Serve(ctx, ln, local) // it fails when the file of the socket is gone
					ln = nil
					return loop.After(time.Second)
				}).Run(members)
			})
		}
	}

	serve := func(addr string, h http.Handler) error {
		if addr == "" {
			return nil
		}
		ln, err := health.Listen(ctx, addr)
		if err == nil {
			group.Go(func() error { return health.Serve(members, ln, h) })
		}
		return err
	}
	if err := serve(o.HealthzAddr(), onLoopback(with(throttled(page)), mux)); err != nil {
		return err
	}
	return serve(o.StatuszAddress, with(throttled(page)))
}

// goroutines writes the stacks of all goroutines. They show what the daemon does, so only the local socket
// serves them.
func goroutines(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_ = pprof.Lookup("goroutine").WriteTo(w, 2) // a failed write means that the client has gone
}

// Limits of throttled. With thousands of peers a report, which a scrape also reads, takes milliseconds of CPU time.
const (
	pagesPerSecond = 20
	pagesAtOnce    = 20
)

// throttled lets requests wait if there are too many. The local socket needs no such limit, because only
// root can use it.
func throttled(h http.Handler) http.Handler {
	limit := rate.NewLimiter(pagesPerSecond, pagesAtOnce)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if limit.Wait(r.Context()) == nil {
			h.ServeHTTP(w, r)
		}
	})
}

// onLoopback passes a request to local if it comes from a loopback address, and otherwise to others.
func onLoopback(local, others http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// If the Host header could be any name, a web page could read the status through a browser on this
		// host: its site gives its own name a loopback address.
		from, err := netip.ParseAddrPort(r.RemoteAddr)
		to, err2 := netip.ParseAddrPort(r.Host)
		if err == nil && err2 == nil && from.Addr().Unmap().IsLoopback() && to.Addr().Unmap().IsLoopback() {
			local.ServeHTTP(w, r)
			return
		}
		others.ServeHTTP(w, r)
	})
}
