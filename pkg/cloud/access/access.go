// SPDX-License-Identifier: Apache-2.0

// Package access is what the clouds share whose calls are signed with a pair of keys: the keys, the
// metadata service that gives an instance those of its role, and the way calls are sent.
//
//   - access.go has the keys, chooses the addresses of services, and sends calls.
//   - metadata.go reads the metadata service.
package access

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
)

const (
	callTimeout = 10 * time.Second
	maxAnswer   = 16 << 20 // bytes; a page of 500 routes takes 400 kB
)

// Keys sign calls.
type Keys struct {
	ID     string
	Secret string
	Token  string // of a role; empty for the keys of a user
}

// String implements fmt.Stringer. It shows nothing that is secret.
func (k Keys) String() string { return "keys with the id " + k.ID }

// GoString implements fmt.GoStringer.
func (k Keys) GoString() string { return k.String() }

// Provider returns the keys for the next call.
type Provider func(context.Context) (Keys, error)

// First returns a Provider of the first of these pairs of keys that has an id and a secret, or else
// role.
func First(role Provider, pairs ...Keys) Provider {
	for _, k := range pairs {
		if k.ID != "" && k.Secret != "" {
			return func(context.Context) (Keys, error) { return k, nil }
		}
	}
	return role
}

// Endpoint returns the URL in a variable of the environment, or standard if there is none. The error
// does not contain the value.
func Endpoint(variable, standard string) (string, error) {
	text := os.Getenv(variable)
	if text == "" {
		return standard, nil
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", fmt.Errorf("%s is invalid: expected an http or https URL, such as %s", variable, standard)
	}
	return text, nil
}

// Client sends calls. Proxies count, as the variables of the environment define them.
type Client struct{ http http.Client }

// NewClient returns a Client.
func NewClient() *Client {
	return &Client{http.Client{Timeout: callTimeout, CheckRedirect: noRedirect}}
}

// noRedirect makes a redirect an answer: clouds send none, and another server must not get calls.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Send sends a call and returns the answer. The error wraps cloud.ErrUnavailable, and does not
// contain the URL, in which there may be parameters.
func (c *Client) Send(req *http.Request) (status int, body []byte, err error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, nil, fmt.Errorf("%w: %s", cloud.ErrUnavailable, reason(err))
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return 0, nil, fmt.Errorf("%w: %s", cloud.ErrUnavailable, reason(err))
	}
	return resp.StatusCode, body, nil
}

// reason returns the text of the innermost error: that of package net/http begins with the URL.
func reason(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}
