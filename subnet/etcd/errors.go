// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/net/http/httpproxy"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// storeError is a failure of the store, or of the connection to it. It can pass.
type storeError struct {
	kind string // the kind of failure: the log has a line for each new kind in an outage; empty: the next try shows whether the store answers
	text string
	err  error
}

func (e *storeError) Error() string { return e.text }
func (e *storeError) Unwrap() error { return e.err }

// Kind implements loglimit.Failure.
func (e *storeError) Kind() string { return e.kind }

// RetryAfter implements loglimit.Failure.
func (*storeError) RetryAfter() time.Duration { return 0 }

var (
	errStalled = errors.New("the watch is silent")
	errBehind  = errors.New("the watch is behind the store")
	errClosed  = fmt.Errorf("manager is closed: %w", context.Canceled)

	errConflict error = loglimit.Again{Text: "another node was faster", Answered: true}
	errRenewed  error = loglimit.Again{Text: "the connection was given up for a new one"}
	// errRelist means that all leases have to be listed, because a watch cannot continue from its
	// revision: the revision was compacted, the store is another one, or the events since then are
	// too many or do not come.
	errRelist error = loglimit.Again{Text: "watch cannot be resumed"}
)

// explain converts an error of the client library to a storeError, whose text is one line with the
// endpoints and the cause, and which wraps err. waited is the deadline of the request. explain
// returns nil, errConflict and context.Canceled as they are, and errRenewed if this
// client has closed the connection.
func explain(endpoints []string, waited time.Duration, err error) error {
	if err == nil || errors.Is(err, errConflict) || errors.Is(err, context.Canceled) {
		return err
	}
	code := codeOf(err)
	cause := dialCause(status.Convert(err).Message())
	switch {
	case code == codes.Canceled: // the connection was closed: the caller's context is not the cause
		return errRenewed
	case errors.Is(err, errLoggingIn):
		cause = err.Error()
	case code == codes.DeadlineExceeded:
		cause = fmt.Sprintf("no answer within %s", waited)
	case errors.Is(err, io.EOF):
		cause = "connection closed"
	}

	kind := "unreachable"
	switch {
	case strings.Contains(cause, "tls: "), strings.Contains(cause, "x509: "):
		kind = "TLS"
	case code == codes.PermissionDenied, code == codes.Unauthenticated, code == codes.InvalidArgument:
		kind = code.String()
	}
	if code == codes.Unavailable || code == codes.DeadlineExceeded {
		cause += viaProxy(endpoints)
	}
	return &storeError{kind, fmt.Sprintf("etcd %s: %s", strings.Join(endpoints, ","), oneline.Collapse(cause)), err}
}

// viaProxy returns an addition to the cause of a failed connection if gRPC makes it through a proxy, or "".
// gRPC uses HTTPS_PROXY for all endpoints, even for those without TLS.
func viaProxy(endpoints []string) string {
	for _, endpoint := range endpoints {
		_, host, isURL := strings.Cut(endpoint, "://")
		if !isURL {
			host = endpoint
		}
		proxy, err := httpproxy.FromEnvironment().ProxyFunc()(&url.URL{Scheme: "https", Host: host})
		if err == nil && proxy != nil {
			return fmt.Sprintf(" (through the proxy %s of HTTPS_PROXY; is %s missing in NO_PROXY?)", proxy.Redacted(), host)
		}
	}
	return ""
}

// codeOf returns the gRPC code of an error of the client library. The code is OK for nil, and also
// for an error that does not come from that library, because such an error is about the content of
// an answer.
func codeOf(err error) codes.Code {
	var e rpctypes.EtcdError
	switch {
	case errors.As(rpctypes.Error(err), &e):
		return e.Code()
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case errors.Is(err, io.EOF):
		return codes.Unavailable
	}
	if s, ok := status.FromError(err); ok {
		return s.Code()
	}
	return codes.OK
}

// dialCause returns the cause of a failed connection without gRPC's prefixes. It adds a hint if the
// server may expect TLS.
func dialCause(msg string) string {
	if i := strings.LastIndex(msg, "desc = "); i >= 0 {
		msg = msg[i+len("desc = "):]
		if unquoted, err := strconv.Unquote(msg); err == nil {
			msg = unquoted
		}
	}

	for _, wrapping := range []string{"transport: ", "Error while dialing: ", "authentication handshake failed: "} {
		msg = strings.TrimPrefix(msg, wrapping)
	}
	if strings.HasPrefix(msg, "keepalive ping failed") {
		return "the connection does not answer any more"
	}
	const noPreface = "error reading server preface: "
	if strings.HasPrefix(msg, noPreface) && strings.HasSuffix(msg, net.ErrClosed.Error()) { // the client has closed it
		return "the server accepts the connection and says nothing"
	}
	if strings.HasPrefix(msg, noPreface) {
		msg += " (does the server expect TLS, or a client certificate?)"
	}
	return msg
}
