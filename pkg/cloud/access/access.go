// SPDX-License-Identifier: Apache-2.0

// Package access contains the common code for clouds whose calls are signed with a pair of keys: an id and
// a secret. An instance gets the keys of its role from the metadata service.
//
//   - access.go has the keys, and chooses the addresses of services.
//   - client.go makes calls, and has the errors of calls.
//   - metadata.go reads the metadata service.
package access

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"

	"github.com/flanneld/flanneld/pkg/cloud"
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

// Warnings returns a warning if only the id or only the secret of k is set, and one for each key of raw
// that may contain a secret. raw is the Backend object, and k has its AccessKeyID and AccessKeySecret. The
// error means that raw is not a JSON object.
func Warnings(raw json.RawMessage, k Keys) (warnings []string, err error) {
	if (k.ID == "") != (k.Secret == "") {
		warnings = append(warnings, "AccessKeyID and AccessKeySecret need each other: the one that is set is ignored")
	}
	secrets, err := cloud.SecretKeys(raw)
	return append(warnings, secrets...), err
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
