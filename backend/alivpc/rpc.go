// SPDX-License-Identifier: Apache-2.0

package alivpc

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/access/acs3"
)

const (
	name = "Alibaba Cloud" // in errors
	page = "Documentation/backends/ali-vpc.md"
)

// service is one of the services of Alibaba Cloud.
type service struct{ name, version, endpoint string }

// client makes calls of the RPC style: parameters in the URL, and answers in JSON.
type client struct {
	access.Client
	region   string
	instance string // id
	vpc, ecs service
}

// call repeats a throttled call a few times. answer may be nil.
func (c *client) call(ctx context.Context, s service, action string, params url.Values, answer any) error {
	return c.Make(ctx, action, action, func(k access.Keys) error { return c.once(ctx, k, s, action, params, answer) })
}

// try makes a dry run of a call of the VPC service. It adds a parameter to params.
func (c *client) try(ctx context.Context, action string, params url.Values) error {
	params.Set("DryRun", "true")
	return c.Make(ctx, action+" (dry run)", action, func(k access.Keys) error { return c.once(ctx, k, c.vpc, action, params, nil) })
}

func (c *client) once(ctx context.Context, keys access.Keys, s service, action string, params url.Values, answer any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(s.endpoint, "/")+"/", http.NoBody)
	if err != nil {
		return fmt.Errorf("the address of the service %s is invalid", s.name)
	}

	query := url.Values{"RegionId": {c.region}}
	maps.Copy(query, params)
	req.URL.RawQuery = query.Encode()
	req.Header.Set("Accept", "application/json") // else the answer may be XML
	acs3.Sign(req, keys, acs3.Call{Action: action, Version: s.version, Time: time.Now(), Nonce: rand.Text()})

	status, text, err := access.Send(c.HTTP, req)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return classify(s.name+":"+action, params.Get("RouteTableId"), decodeError(status, text))
	}
	return access.Decode(text, answer)
}

// isCode ignores the case of the codes.
func isCode(err error, codes ...string) bool {
	have := access.Code(err)
	return slices.ContainsFunc(codes, func(code string) bool { return strings.EqualFold(code, have) })
}

func decodeError(status int, text []byte) *access.Error {
	var e struct{ Code, Message string }
	if json.Unmarshal(text, &e) != nil || e.Code == "" {
		e.Code = fmt.Sprint(status)
		e.Message = http.StatusText(status)
	}
	return access.NewError(status, e.Code, e.Message)
}

// classify returns the error of package cloud for an error of a call, if it has one. It returns nil if
// a dry run would have succeeded.
func classify(permission, table string, e *access.Error) error {
	is := func(codes ...string) bool { return isCode(e, codes...) }
	switch {
	case is("DryRunOperation"): // the call would have succeeded
		return nil
	// DeleteRouteEntry also returns the code Forbbiden, as the API spells it, for routes that no call may delete.
	case is("Forbidden", "Forbidden.RAM", "NoPermission", "Forbidden.NoPermission") || is("Forbbiden") && strings.Contains(strings.ToLower(e.Message), "not authorized"):
		return &cloud.MissingError{Permissions: []string{permission}, Page: page}
	case is("QuotaExceeded", "QuotaExceeded.RouteEntry", "RouteEntryQuotaExceeded"):
		return &cloud.QuotaError{Table: table}

	// The codes after SystemBusy mean that another change, of the table or the VPC, has not ended.
	case strings.HasPrefix(e.Code, "Throttling") || e.Status == http.StatusTooManyRequests || strings.HasPrefix(e.Code, "IncorrectStatus") ||
		is("SystemBusy", "TaskConflict", "OperationConflict", "OperationFailed.DistibuteLock", "LastTokenProcessing",
			"IncorrectRouteEntryStatus", "IncorrcetRouteEntryStatus", "IncorrectVpcStatus", "IncorrectVSwitchStatus"):
		return fmt.Errorf("%w (%s)", cloud.ErrThrottled, e.Code)

	case strings.HasPrefix(e.Code, "InvalidAccessKeyId") || strings.HasPrefix(e.Code, "InvalidSecurityToken") || strings.HasPrefix(e.Code, "InvalidTimeStamp") ||
		is("SignatureDoesNotMatch", "IncompleteSignature", "SignatureNonceUsed", "MissingSecurityToken"):
		return access.Refused(name, e.Code)
	case e.Status >= http.StatusInternalServerError || is("UnknownError", "IncorrectInstanceStatus"):
		return fmt.Errorf("%w: %w", cloud.ErrUnavailable, e)
	}
	return e
}
