// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/cloud"
)

// timeout limits the time of one call.
const timeout = 10 * time.Second

// maxAnswer limits an answer, in bytes. A page of 500 routes takes 400 kB.
const maxAnswer = 16 << 20

// maxText limits a text that comes from a cloud and is shown to an operator, in bytes.
const maxText = 300

// newHTTP returns a client for calls. It uses the proxies that environment variables define.
func newHTTP() *http.Client {
	return &http.Client{Timeout: timeout, CheckRedirect: noRedirect}
}

// directTimeout limits the time of one request of a client of NewDirect, whose servers are on this host or its link.
const directTimeout = 5 * time.Second

// NewDirect returns a client for services that give secrets to this host, such as the metadata service. It uses no
// proxy, because a proxy would learn the keys and tokens in the answers. It keeps no connections, because a kept
// connection would be used only once in a resync period, and would outlive the client.
func NewDirect() *http.Client {
	return &http.Client{Timeout: directTimeout, CheckRedirect: noRedirect, Transport: &http.Transport{DisableKeepAlives: true}}
}

// noRedirect makes a redirect the answer: clouds send none, and another server must not get calls.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Send sends a request and returns the answer with any status. The error wraps cloud.ErrUnavailable. It
// does not contain the URL, which may have secret parameters.
func Send(client *http.Client, req *http.Request) (status int, body []byte, err error) {
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, fmt.Errorf("%w: %s", cloud.ErrUnavailable, Reason(err))
	}
	defer resp.Body.Close()

	body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return 0, nil, fmt.Errorf("%w: %s", cloud.ErrUnavailable, Reason(err))
	}
	if len(body) > maxAnswer {
		return 0, nil, fmt.Errorf("%w: the answer has more than %d bytes", cloud.ErrUnavailable, maxAnswer)
	}
	return resp.StatusCode, body, nil
}

// Reason returns the text of the innermost error in err. Outer errors of package net/http contain the
// URL, and SDKs repeat the same text at each level.
func Reason(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}

// Clean returns a text of a cloud as one line of limited length.
func Clean(text string) string { return oneline.Collapse(oneline.Shorten(text, maxText)) }

// Pages calls one for each page of a list. one makes a call with params, and returns the token of the next page, which
// is empty after the last one. The parameter key of params is the token of the present page.
func Pages(params url.Values, key string, one func() (next string, err error)) error {
	for {
		next, err := one()
		if err != nil || next == "" {
			return err
		}
		if next == params.Get(key) { // the calls would never end
			return errors.New("the answer refers to itself as its next page")
		}
		params.Set(key, next)
	}
}

// Addresses returns the addresses in texts. Other texts are left out.
func Addresses(texts ...string) (all []netip.Addr) {
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil {
			all = append(all, a)
		}
	}
	return all
}
