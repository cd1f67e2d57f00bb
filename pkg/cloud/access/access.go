// SPDX-License-Identifier: Apache-2.0

// Package access contains the common code for clouds whose calls are signed with a pair of keys: an id and
// a secret. An instance gets the keys of its role from the metadata service.
//
//   - access.go has the keys, and chooses the addresses of services.
//   - client.go makes calls, and has the errors of calls.
//   - metadata.go reads the metadata service.
//   - http.go sends calls. It also has what several clouds need to read the answers: it cleans texts, turns pages and
//     parses addresses.
package access

import (
	"context"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"slices"
)

// Keys sign calls.
type Keys struct {
	ID     string
	Secret string
	Token  string // belongs to the keys of a role; empty for the keys of a user
}

// String implements fmt.Stringer. It names the id, and leaves out the secret and the token.
func (k Keys) String() string { return "keys with the id " + k.ID }

// GoString implements fmt.GoStringer.
func (k Keys) GoString() string { return k.String() }

// Provider returns the keys for the next call.
type Provider func(context.Context) (Keys, error)

// First returns a Provider that always returns the first of pairs with both an id and a secret. If
// there is none, First returns role.
func First(role Provider, pairs ...Keys) Provider {
	for _, k := range pairs {
		if k.ID != "" && k.Secret != "" {
			return func(context.Context) (Keys, error) { return k, nil }
		}
	}
	return role
}

// Endpoint returns the URL in an environment variable, or standard if the variable is empty. It returns an
// error if the value is not an http or https URL. The error does not contain the value, which may have a
// secret.
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

// Confidential reports whether no strange host can read what is sent to a URL: it is an https URL, or an http URL of
// this host or of one of the addresses in trusted.
func Confidential(text string, trusted ...string) bool {
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" {
		return false
	}
	a, err := netip.ParseAddr(u.Hostname())
	near := u.Hostname() == "localhost" || err == nil && (a.IsLoopback() || slices.Contains(trusted, a.String()))
	return u.Scheme == "https" || u.Scheme == "http" && near
}
