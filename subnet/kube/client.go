// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/util/connrotation"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// The forms in which objects are requested. Metadata does not contain spec and status, which are most
// of a Node and change all the time.
const (
	acceptJSON     = "application/json"
	acceptFull     = "application/vnd.kubernetes.protobuf, application/json;q=0.1"
	acceptMetadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	// A list of metadata is a type of its own.
	acceptMetadataList = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

// The types of the bodies of requests.
const (
	sendPatch = "application/strategic-merge-patch+json"
	sendJSON  = "application/json"
)

// client sends requests to the API server.
type client struct {
	host     string // for errors
	base     *url.URL
	http     *http.Client
	dialer   *connrotation.Dialer
	patience wait.Patience                     // with small requests
	random   func(time.Duration) time.Duration // see randomTime
	slow     atomic.Int64                      // when a small request was last slow or refused, in ns since 1970; 0: never
}

// errEnded means that a watch which the server had accepted has ended early or has lost its
// connection, or that renew has closed the connection of a request.
var errEnded error = loglimit.Again{Text: "watch has ended"}

// randomTime returns a random time from 0 to most, so that hosts do not act at the same moment. Scripts
// of tests have another function in its place.
func randomTime(most time.Duration) time.Duration { return rand.N(most + 1) }

// restConfig returns how to reach the API server, from flags or from the pod's service account. For a program of an
// operator, with neither a URL nor a kubeconfig, it looks like kubectl: in KUBECONFIG, in ~/.kube/config, and then for
// a service account.
func restConfig(cfg Config) (*rest.Config, error) {
	switch {
	case cfg.ServiceAccount != "":
		return &rest.Config{
			Host: cfg.APIURL, BearerTokenFile: filepath.Join(cfg.ServiceAccount, "token"),
			TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(cfg.ServiceAccount, "ca.crt")},
		}, nil
	case !cfg.operator && cfg.APIURL == "" && cfg.Kubeconfig == "":
		rc, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("use the pod's service account (without --kubeconfig-file and --kube-api-url): %w", err)
		}
		return rc, nil
	}

	rules := operatorRules(cfg)
	overrides := &clientcmd.ConfigOverrides{CurrentContext: cfg.Context}
	overrides.ClusterInfo.Server = cfg.APIURL
	rc, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides).ClientConfig()
	switch {
	case err == nil:
		return rc, nil
	case cfg.Kubeconfig != "":
		return nil, fmt.Errorf("use kubeconfig %q: %w", cfg.Kubeconfig, err)
	case clientcmd.IsEmptyConfig(err):
		return nil, fmt.Errorf("no API server is known: there is no kubeconfig in %s, and this is no pod with a service account: name one with --kubeconfig-file",
			strings.Join(rules.GetLoadingPrecedence(), " and "))
	default:
		return nil, fmt.Errorf("use the kubeconfig in %s: %w", strings.Join(rules.GetLoadingPrecedence(), " and "), err)
	}
}

// operatorRules says which kubeconfig restConfig reads.
func operatorRules(cfg Config) *clientcmd.ClientConfigLoadingRules {
	if cfg.APIURL != "" || cfg.Kubeconfig != "" {
		return &clientcmd.ClientConfigLoadingRules{ExplicitPath: cfg.Kubeconfig}
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.WarnIfAllMissing = false // the error of restConfig says it
	if os.Getenv(clientcmd.RecommendedConfigPathEnvVar) == "" {
		rules.Precedence = []string{homeConfig()}
	}
	return rules
}

func newClient(cfg *rest.Config, agent string) (*client, error) {
	cfg.UserAgent = agent
	cfg.DisableCompression = true // only lists ask for it, see request.compressed
	dialer := connrotation.NewDialer(newDialer().DialContext)
	cfg.Dial = dialer.DialContext
	if cfg.BearerTokenFile != "" {
		// With this source the token is also read again when the server refuses it, and not only
		// every minute.
		source := transport.NewCachedFileTokenSource(cfg.BearerTokenFile)
		cfg.Wrap(transport.ResettableTokenSourceWrapTransport(source))
		cfg.BearerToken = ""
		cfg.BearerTokenFile = ""
	}

	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	h, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("API server %s: %w", base.Host, err)
	}
	return &client{host: base.Host, base: base, http: h, dialer: dialer, random: randomTime}, nil
}

// newDialer returns the dialer of connections to the server. If the server's host does not answer
// for 45 seconds, the kernel closes the connection, as HTTP/2 does by itself. HTTP/1.1, which an
// http:// URL or a proxy may need, depends on this keep-alive of the kernel. With a proxy, the
// keep-alive checks only the connection to the proxy.
func newDialer() *net.Dialer {
	return &net.Dialer{
		Timeout:         10 * time.Second,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3},
	}
}

// renew closes all connections. Requests in progress fail, mostly with errEnded. The next request
// makes a new connection.
func (c *client) renew() { c.dialer.CloseAll() }

// request is one request to the API.
type request struct {
	method  string // empty for GET
	group   string // API group, in its version v1; empty for the core group, to which Nodes belong
	path    string // below the group and version
	query   url.Values
	accept  string // empty for acceptJSON
	content string // type of body
	body    []byte
	// compressed lets the server compress the answer with gzip. It is for large answers only: a
	// watch would come in blocks.
	compressed bool
}

func (c *client) url(r request) *url.URL {
	u := c.base.JoinPath("api", "v1", r.path)
	if r.group != "" {
		u = c.base.JoinPath("apis", r.group, "v1", r.path)
	}
	u.RawQuery = r.query.Encode()
	return u
}

// do sends a request, and returns the response if its status is below 300. The caller must close
// its body. For another status or a failure, do returns an *apiError; see explain for the
// exceptions.
func (c *client) do(ctx context.Context, r request) (*http.Response, error) {
	if r.method == "" {
		r.method = http.MethodGet
	}

	req, err := http.NewRequestWithContext(ctx, r.method, c.url(r).String(), bytes.NewReader(r.body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", cmp.Or(r.accept, acceptJSON))
	if r.content != "" {
		req.Header.Set("Content-Type", r.content)
	}
	if r.compressed {
		req.Header.Set("Accept-Encoding", "gzip")
	}

	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(err)
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, c.refusal(resp)
}

// slowAfter is the time from which on a small request is slow: the server is busy then.
const slowAfter = 500 * time.Millisecond

// patiently calls f, which makes a request, with a deadline, and records in c.slow if the request
// was slow or refused. usual is the usual deadline: see wait.Patience.
func (c *client) patiently(ctx context.Context, usual time.Duration, f func(context.Context) error) error {
	var sent atomic.Pointer[time.Time] // when the request was sent: on a slow link, the connection that is made before takes long
	_, err := c.patience.Try(usual, func(deadline time.Duration) error {
		ctx, cancel := context.WithTimeout(ctx, deadline)
		defer cancel()
		return f(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) {
			now := time.Now()
			sent.Store(&now)
		}}))
	})
	if at := sent.Load(); at != nil && time.Since(*at) > slowAfter || overloaded(err) {
		c.slow.Store(time.Now().UnixNano())
	}
	return err
}

// call sends a request with timeout as the usual deadline, and returns the body of the answer. It
// returns the error of ctx if ctx has ended. It is for requests with a small answer, and reads at
// most wire.MaxObject bytes of it. See list and watch for requests with a larger answer.
func (c *client) call(ctx context.Context, timeout time.Duration, r request) (body []byte, err error) {
	err = c.patiently(ctx, timeout, func(ctx context.Context) error {
		resp, err := c.do(ctx, r)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if body, err = io.ReadAll(io.LimitReader(resp.Body, wire.MaxObject)); err != nil {
			return c.explain(err)
		}
		return nil
	})
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return body, err
}

// callJSON is like call, and decodes the answer into to.
func (c *client) callJSON(ctx context.Context, timeout time.Duration, r request, to any) error {
	body, err := c.call(ctx, timeout, r)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, to)
}

// create posts an object, and decodes the answer into to.
func (c *client) create(ctx context.Context, timeout time.Duration, r request, object, to any) (err error) {
	if r.body, err = json.Marshal(object); err != nil {
		return err
	}
	r.method = http.MethodPost
	r.content = sendJSON
	return c.callJSON(ctx, timeout, r, to)
}

// apiError is a failure of the API server, or of the connection to it. It can pass.
type apiError struct {
	host       string
	kind       string
	code       int           // the HTTP status; 0 without an answer
	message    string        // the server's message with the status, or the cause of the failure
	retryAfter time.Duration // the time, at most a minute, that the server asked to wait before the next request
	tooLarge   bool          // the server has not reached the requested resource version
	cause      error
}

// Error implements error: one line.
func (e *apiError) Error() string {
	return "API server " + e.host + ": " + oneline.Collapse(e.message)
}

// Unwrap implements error.
func (e *apiError) Unwrap() error { return e.cause }

// Kind implements loglimit.Failure.
func (e *apiError) Kind() string { return e.kind }

// RetryAfter implements loglimit.Failure.
func (e *apiError) RetryAfter() time.Duration { return e.retryAfter }

// hasCode reports whether err is an answer with one of these HTTP statuses.
func hasCode(err error, codes ...int) bool { return slices.Contains(codes, apiErrorOf(err).code) }

// apiErrorOf returns the apiError that err wraps, or the zero one, which has no kind.
func apiErrorOf(err error) apiError {
	if e, ok := errors.AsType[*apiError](err); ok {
		return *e
	}
	return apiError{}
}

// overloaded reports whether err comes from a server that cannot keep up: a refusal with 429, 503
// or 504, or no answer before the deadline.
func overloaded(err error) bool {
	return hasCode(err, http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusGatewayTimeout) ||
		errors.Is(err, context.DeadlineExceeded)
}

// explain converts an error of the connection to the server to an apiError, whose text is one line
// and which wraps err. It returns context.Canceled as it is, and errEnded if renew has closed the
// connection.
func (c *client) explain(err error) error {
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, net.ErrClosed): // renew has closed the connection
		return errEnded
	}

	e := &apiError{host: c.host, kind: "unreachable", message: err.Error(), cause: err}
	if u, ok := errors.AsType[*url.Error](err); ok {
		e.message = u.Err.Error() // without the URL, which is always the same
	}

	switch {
	case errors.Is(err, context.DeadlineExceeded):
		e.message = "no answer in time"
	case errors.Is(err, wire.ErrMalformed):
		e.kind = "malformed answer"
	case strings.Contains(e.message, "tls: "), strings.Contains(e.message, "x509: "):
		e.kind = "TLS"
	}
	return e
}

// refusal returns the error that an answer with a status of 300 or more means.
func (c *client) refusal(resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20)) // a part of the body is better than nothing
	status, err := wire.DecodeStatus(body)
	if err != nil {
		status = &wire.StatusError{}
		status.Message = subnet.Shorten(string(body))
	}
	status.Code = int32(resp.StatusCode)
	return c.refused(status, resp.Header.Get("Retry-After"))
}

// tooLargeMessage is part of the message if the server has not reached the requested resource
// version. API servers before 1.18.6 name no cause.
const tooLargeMessage = "Too large resource version"

// refused returns the error that a Status describes. retryAfter is the value of the header.
func (c *client) refused(s *wire.StatusError, retryAfter string) error {
	code := int(s.Code)
	message := cmp.Or(s.Message, http.StatusText(code))
	e := &apiError{
		host: c.host, kind: "HTTP " + strconv.Itoa(code), code: code, message: fmt.Sprintf("%d %s", code, message),
		tooLarge: s.Has("ResourceVersionTooLarge") || strings.Contains(message, tooLargeMessage),
	}
	if seconds, err := strconv.Atoi(retryAfter); err == nil && seconds > 0 {
		e.retryAfter = min(time.Duration(seconds)*time.Second, time.Minute)
	}
	return e
}
