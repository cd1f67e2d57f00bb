// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/flanneld/flanneld/pkg/cloud"
)

// Client makes calls that are signed with keys.
type Client struct {
	Metadata *Metadata
	Keys     Provider
	Calls    *cloud.Calls
	HTTP     *http.Client
}

// NewClient returns a Client with the keys of m. The caller may set others.
func NewClient(m *Metadata, calls *cloud.Calls) Client {
	return Client{Metadata: m, Keys: m.Keys, Calls: calls, HTTP: newHTTP()}
}

// Connect sets *to to the result of connect, unless it is set.
func Connect[T any](ctx context.Context, to **T, connect func(context.Context) (*T, error)) (err error) {
	if *to == nil {
		*to, err = connect(ctx)
	}
	return err
}

// Make makes a call with once, which signs the call with the keys that it gets. Make repeats a throttled
// call and counts calls as cloud.Calls.Make does, with the same name and action. If the cloud refuses the
// keys, Make asks Keys again and repeats the call at once, because the role may have new keys.
func (c *Client) Make(ctx context.Context, name, action string, once func(Keys) error) error {
	signed := func() error {
		keys, err := c.Keys(ctx)
		if err != nil {
			return err
		}
		return once(keys)
	}
	return c.Calls.Make(ctx, name, action, func() error {
		err := signed()
		if errors.Is(err, cloud.ErrKeys) {
			c.Metadata.Renew()
			err = signed()
		}
		return err
	})
}

// Decode decodes the answer to a call. With a nil answer it decodes nothing.
func Decode(text []byte, answer any) error {
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("decode the answer: %w", err)
	}
	return nil
}

// Error is an error of an API.
type Error struct {
	Status  int // HTTP status
	Code    string
	Message string
}

// NewError returns an Error with the code and the message of the API. It makes each of them one line of
// limited length.
func NewError(status int, code, message string) *Error {
	return &Error{status, Clean(code), Clean(message)}
}

// Error implements error.
func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Code returns the code of the Error in err, or an empty text if there is none.
func Code(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return ""
}

// Refused returns the error for a cloud that refuses the keys. name is the name of the cloud, and code the
// error code of its API. The error omits the API's message, because this may contain the signed text.
func Refused(name, code string) error {
	return fmt.Errorf("%s %w (%s): check the instance's role, and this host's clock", name, cloud.ErrKeys, code)
}
