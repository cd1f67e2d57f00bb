// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/transport"
)

// Client makes calls with keys.
type Client struct {
	Metadata *Metadata
	Keys     Provider
	Calls    *cloud.Calls
	HTTP     *http.Client
}

// Make makes a call by once, which signs it with the keys. It repeats a call that was throttled, and one
// whose keys were refused, because the role may have new ones. It counts each try by name, and adds the
// action to the error.
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
			c.Metadata.renew()
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
	Status  int // of HTTP
	Code    string
	Message string
}

// NewError returns an Error with the words of the API in one line of limited length.
func NewError(status int, code, message string) *Error {
	return &Error{status, transport.Clean(code), transport.Clean(message)}
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

// Refused returns the error of a cloud with that name that refuses the keys. The message of the API may
// contain what was signed, so it is left out.
func Refused(name, code string) error {
	return fmt.Errorf("%s %w (%s): check the instance's role, and this host's clock", name, cloud.ErrKeys, code)
}
