// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Limits on the resources that a client can use. shutdownTimeout is short so that a stop does not wait
// for a client that has connected and sends no request.
const (
	requestTimeout  = 5 * time.Second
	idleTimeout     = 10 * time.Second
	maxHeader       = 8 << 10 // bytes
	shutdownTimeout = time.Second
)

// Source is the health that probes and systemd ask for. Status implements it.
type Source interface {
	// Alive returns an error if the main loop is stuck.
	Alive() error
	// Ready reports whether the daemon is ready, and returns the reasons if it is not.
	Ready() (ready bool, reasons []string)
}

// Handler answers /healthz and /readyz from s, with any method. Every other path is 404.
func Handler(s Source) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/healthz":
			if err := s.Alive(); err != nil {
				respond(w, http.StatusServiceUnavailable, "flanneld is stuck", err.Error())
				return
			}
			respond(w, http.StatusOK, "flanneld is running")

		case "/readyz":
			if ready, reasons := s.Ready(); !ready {
				respond(w, http.StatusServiceUnavailable, "flanneld is not ready yet", reasons...)
				return
			}
			respond(w, http.StatusOK, "flanneld is ready")
		default:
			http.NotFound(w, r)
		}
	})
}

// respond writes the state on the first line, which probes compare, and the reasons below
// it.
func respond(w http.ResponseWriter, code int, state string, reasons ...string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	// A failed write means that the client has gone.
	_, _ = io.WriteString(w, strings.Join(append([]string{state}, reasons...), "\n"))
}

// Listen opens the health port at addr, "address:port". If the port is in use, Listen tries again for a
// moment: see wait.WhileInUse.
func Listen(ctx context.Context, addr string) (ln net.Listener, err error) {
	wait.WhileInUse(ctx, func() bool {
		ln, err = (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		return errors.Is(err, syscall.EADDRINUSE)
	})
	if err != nil {
		return nil, fmt.Errorf("open health port: %w", err)
	}
	return ln, nil
}

// Serve answers requests on ln with h until ctx ends. It then gives open requests a
// limited time to finish and returns nil. If ln fails before, Serve returns that error.
// It closes ln. It closes connections beyond the limits of limited at once.
func Serve(ctx context.Context, ln net.Listener, h http.Handler) error {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: requestTimeout,
		ReadTimeout:       requestTimeout,
		WriteTimeout:      requestTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		// Errors that clients cause do not belong in the daemon's log.
		ErrorLog: log.New(io.Discard, "", 0),
	}

	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if srv.Shutdown(bounded) != nil {
			srv.Close()
		}
	})

	err := srv.Serve(limit(ln))
	if !stop() {
		<-stopped
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve health on %s: %w", ln.Addr(), err)
}
