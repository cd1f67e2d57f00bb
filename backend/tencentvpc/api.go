// SPDX-License-Identifier: Apache-2.0

package tencentvpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/access/tc3"
)

const page = "Documentation/backends/tencent-vpc.md"

// service is one of the services of Tencent Cloud.
type service struct{ name, version, endpoint string }

// client makes calls of the API 3.0: JSON in both directions.
type client struct {
	http     *access.Client
	metadata *access.Metadata
	keys     access.Provider
	calls    *cloud.Calls
	region   string
	vpc, cvm service
}

// object is an object of JSON.
type object = map[string]any

// call makes a call and decodes its answer. With a nil answer it decodes nothing. It repeats a call
// that was throttled, and one whose keys were refused, because the role may have new ones.
func (c *client) call(ctx context.Context, s service, action string, params object, answer any) error {
	return c.counted(ctx, action, s, action, params, answer)
}

// counted is call with another name for the number of calls.
func (c *client) counted(ctx context.Context, name string, s service, action string, params object, answer any) error {
	return cloud.Retry(ctx, func() error {
		err := c.once(ctx, s, action, params, answer)
		if errors.Is(err, errKeys) {
			c.metadata.Renew()
			err = c.once(ctx, s, action, params, answer)
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", action, err)
		}
		c.calls.Count(name, err)
		return err
	})
}

// allowed returns nil if this host has the right to make a call of the VPC service. Tencent Cloud has
// no dry runs of these calls, so params must be such that the call is refused for another reason.
func (c *client) allowed(ctx context.Context, action string, params object) error {
	err := c.counted(ctx, action+" (check)", c.vpc, action, params, nil)
	if missing, ok := errors.AsType[*cloud.MissingError](err); ok {
		return missing
	}
	if cloud.Transient(err) || errors.Is(err, errKeys) {
		return err
	}
	return nil
}

func (c *client) once(ctx context.Context, s service, action string, params object, answer any) error {
	keys, err := c.keys(ctx)
	if err != nil {
		return err
	}
	body, err := json.Marshal(params)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(s.endpoint, "/")+"/", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("the address of the service %s is invalid", s.name)
	}
	for name, value := range map[string]string{
		"Content-Type": "application/json; charset=utf-8", "X-TC-Action": action, "X-TC-Version": s.version, "X-TC-Region": c.region,
	} {
		req.Header.Set(name, value)
	}
	tc3.Sign(req, keys, tc3.Call{Service: s.name, Time: time.Now(), Body: body})
	status, text, err := c.http.Send(req)
	if err != nil {
		return err
	}
	table, _ := params["RouteTableId"].(string)
	return decode(status, text, s.name+":"+action, table, answer)
}

// decode decodes the answer to a call with that permission and table, or returns the error that it
// means. Errors have the status 200.
func decode(status int, text []byte, permission, table string, answer any) error {
	var outer struct{ Response json.RawMessage }
	var failed struct{ Error *apiError }
	if status != http.StatusOK || json.Unmarshal(text, &outer) != nil || json.Unmarshal(outer.Response, &failed) != nil {
		return classify(permission, table, status, &apiError{Code: fmt.Sprint(status), Message: "the answer is not one of the API"})
	}
	if failed.Error != nil {
		return classify(permission, table, status, &apiError{Code: oneLine(failed.Error.Code), Message: oneLine(failed.Error.Message)})
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(outer.Response, answer); err != nil {
		return fmt.Errorf("decode the answer: %w", err)
	}
	return nil
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// errKeys means that the cloud refuses the keys for any call.
var errKeys = errors.New("Tencent Cloud refuses the keys")

// apiError is an error of Tencent Cloud.
type apiError struct {
	Code    string
	Message string
}

// Error implements error.
func (e *apiError) Error() string { return e.Code + ": " + e.Message }

// isCode reports whether err is an error of Tencent Cloud with one of these codes, or a more precise
// one.
func isCode(err error, codes ...string) bool {
	e, ok := errors.AsType[*apiError](err)
	return ok && slices.ContainsFunc(codes, func(code string) bool { return e.Code == code || strings.HasPrefix(e.Code, code+".") })
}

// classify returns the error that e means for the call with that permission and table. The message
// of an error about keys may contain what was signed, so it is left out.
func classify(permission, table string, status int, e *apiError) error {
	is := func(codes ...string) bool { return isCode(e, codes...) }
	switch {
	case is("UnauthorizedOperation", "AuthFailure.UnauthorizedOperation"):
		return &cloud.MissingError{Permissions: []string{named(permission, e.Message)}, Page: page}
	case is("AuthFailure"):
		return fmt.Errorf("%w (%s): check the instance's role, and this host's clock", errKeys, e.Code)
	case is("LimitExceeded", "QuotaExceeded"):
		return &cloud.QuotaError{Table: table}
	// The codes after the first are about another change that has not ended.
	case is("RequestLimitExceeded", "MutexOperation", "UnsupportedOperation.MutexOperationTaskRunning") || status == http.StatusTooManyRequests:
		return fmt.Errorf("%w (%s)", cloud.ErrThrottled, e.Code)
	case is("InternalError", "InternalServerError", "ServiceUnavailable", "FailedOperation.InternalOperationFailure") || status >= http.StatusInternalServerError:
		return fmt.Errorf("%w: %w", cloud.ErrUnavailable, e)
	}
	return e
}

// named returns the permission that the message of an error names, or else that of the call.
func named(permission, message string) string {
	if found := regexp.MustCompile(`\(((?:vpc|cvm):[A-Za-z]+)\)`).FindStringSubmatch(message); found != nil {
		return found[1]
	}
	return permission
}
