// SPDX-License-Identifier: Apache-2.0

package tencentvpc

import (
	"bytes"
	"context"
	"encoding/json"
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

const (
	name = "Tencent Cloud" // in errors
	page = "Documentation/backends/tencent-vpc.md"
)

// service is one of the services of Tencent Cloud.
type service struct{ name, version, endpoint string }

// client makes calls of the API 3.0: JSON in both directions.
type client struct {
	access.Client
	region   string
	vpc, cvm service
}

// object is an object of JSON.
type object = map[string]any

// call repeats a throttled call a few times. answer may be nil.
func (c *client) call(ctx context.Context, s service, action string, params object, answer any) error {
	return c.Make(ctx, action, action, func(k access.Keys) error { return c.once(ctx, k, s, action, params, answer) })
}

// try checks a right by a call of the VPC service, which has no dry runs: params are invalid, so the
// call changes nothing, and the error is about the right or about params.
func (c *client) try(ctx context.Context, action string, params object) error {
	return c.Make(ctx, action+" (check)", action, func(k access.Keys) error { return c.once(ctx, k, c.vpc, action, params, nil) })
}

func (c *client) once(ctx context.Context, keys access.Keys, s service, action string, params object, answer any) error {
	body, err := json.Marshal(params)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(s.endpoint, "/")+"/", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("the address of the service %s is invalid", s.name)
	}

	for header, value := range map[string]string{
		"Content-Type": "application/json; charset=utf-8", "X-TC-Action": action, "X-TC-Version": s.version, "X-TC-Region": c.region,
	} {
		req.Header.Set(header, value)
	}

	tc3.Sign(req, keys, tc3.Call{Service: s.name, Time: time.Now(), Body: body})
	status, text, err := access.Send(c.HTTP, req)
	if err != nil {
		return err
	}
	table, _ := params["RouteTableId"].(string)
	return decode(status, text, s.name+":"+action, table, answer)
}

func decode(status int, text []byte, permission, table string, answer any) error {
	// Answers with an error have the status 200 as well.
	var outer struct{ Response json.RawMessage }
	var failed struct {
		Error *struct{ Code, Message string }
	}
	if status != http.StatusOK || json.Unmarshal(text, &outer) != nil || json.Unmarshal(outer.Response, &failed) != nil {
		return classify(permission, table, access.NewError(status, fmt.Sprint(status), "the answer is not one of the API"))
	}
	if failed.Error != nil {
		return classify(permission, table, access.NewError(status, failed.Error.Code, failed.Error.Message))
	}
	return access.Decode(outer.Response, answer)
}

// isCode also accepts codes that begin with one of these and a dot, which are more precise.
func isCode(err error, codes ...string) bool {
	have := access.Code(err)
	return slices.ContainsFunc(codes, func(code string) bool { return have == code || strings.HasPrefix(have, code+".") })
}

// classify returns the error of package cloud for an error of a call, if it has one.
func classify(permission, table string, e *access.Error) error {
	is := func(codes ...string) bool { return isCode(e, codes...) }
	switch {
	case is("UnauthorizedOperation.NoRealNameAuthentication"): // no permission helps
		return fmt.Errorf("the owner of the account must verify the account with Tencent Cloud: %w", e)
	case is("UnauthorizedOperation", "AuthFailure.UnauthorizedOperation"):
		return &cloud.MissingError{Permissions: []string{named(permission, e.Message)}, Page: page}
	case is("AuthFailure"):
		return access.Refused(name, e.Code)
	case is("LimitExceeded", "QuotaExceeded"):
		return &cloud.QuotaError{Table: table}

	// The codes after the first one say that another change has not ended.
	case is("RequestLimitExceeded", "MutexOperation", "UnsupportedOperation.MutexOperationTaskRunning", "OperationDenied.MutexTaskRunning") || e.Status == http.StatusTooManyRequests:
		return fmt.Errorf("%w (%s)", cloud.ErrThrottled, e.Code)
	case is("InternalError", "InternalServerError", "ServiceUnavailable", "FailedOperation.InternalOperationFailure") || e.Status >= http.StatusInternalServerError:
		return fmt.Errorf("%w: %w", cloud.ErrUnavailable, e)
	}
	return e
}

// named returns the permission that the message of an error names, or else permission.
func named(permission, message string) string {
	if found := regexp.MustCompile(`\(((?:vpc|cvm):[A-Za-z]+)\)`).FindStringSubmatch(message); found != nil {
		return found[1]
	}
	return permission
}
