// SPDX-License-Identifier: Apache-2.0

package alivpc

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
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

const page = "Documentation/backends/ali-vpc.md"

// service is one of the services of Alibaba Cloud.
type service struct{ name, version, endpoint string }

// client makes calls of the RPC style: parameters in the URL, and answers in JSON.
type client struct {
	http     *access.Client
	metadata *access.Metadata
	keys     access.Provider
	calls    *cloud.Calls
	region   string
	instance string // id
	vpc, ecs service
}

// call makes a call and decodes its answer. With a nil answer it decodes nothing. It repeats a call
// that was throttled, and one whose keys were refused, because the role may have new ones.
func (c *client) call(ctx context.Context, s service, action string, params url.Values, answer any) error {
	return c.counted(ctx, action, s, action, params, answer)
}

// counted is call with another name for the number of calls.
func (c *client) counted(ctx context.Context, name string, s service, action string, params url.Values, answer any) error {
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

// allowed returns nil if this host has the right to make a call of the VPC service, and changes
// nothing. Errors other than about that right are not errors: the call itself will return them.
func (c *client) allowed(ctx context.Context, action string, params url.Values) error {
	params.Set("DryRun", "true")
	err := c.counted(ctx, action+" (dry run)", c.vpc, action, params, nil)
	if missing, ok := errors.AsType[*cloud.MissingError](err); ok {
		return missing
	}
	if cloud.Transient(err) || errors.Is(err, errKeys) {
		return err
	}
	return nil
}

func (c *client) once(ctx context.Context, s service, action string, params url.Values, answer any) error {
	keys, err := c.keys(ctx)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(s.endpoint, "/")+"/", http.NoBody)
	if err != nil {
		return fmt.Errorf("the address of the service %s is invalid", s.name)
	}
	query := url.Values{"RegionId": {c.region}}
	maps.Copy(query, params)
	req.URL.RawQuery = query.Encode()
	req.Header.Set("Accept", "application/json") // else the answer may be XML
	acs3.Sign(req, keys, acs3.Call{Action: action, Version: s.version, Time: time.Now(), Nonce: rand.Text()})
	status, text, err := c.http.Send(req)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return classify(s.name+":"+action, params.Get("RouteTableId"), decodeError(status, text))
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("decode the answer: %w", err)
	}
	return nil
}

// errKeys means that the cloud refuses the keys for any call.
var errKeys = errors.New("Alibaba Cloud refuses the keys")

// apiError is an error of Alibaba Cloud.
type apiError struct {
	Status  int // of HTTP
	Code    string
	Message string
}

// Error implements error.
func (e *apiError) Error() string { return e.Code + ": " + e.Message }

// isCode reports whether err is an error of Alibaba Cloud with one of these codes.
func isCode(err error, codes ...string) bool {
	e, ok := errors.AsType[*apiError](err)
	return ok && slices.ContainsFunc(codes, func(code string) bool { return strings.EqualFold(code, e.Code) })
}

// decodeError returns the error in an answer with another status than 200.
func decodeError(status int, text []byte) *apiError {
	e := &apiError{}
	if json.Unmarshal(text, e) != nil || e.Code == "" {
		e.Code, e.Message = fmt.Sprint(status), http.StatusText(status)
	}
	return &apiError{status, oneLine(e.Code), oneLine(e.Message)}
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// classify returns the error that e means for the call with that permission and table. The message
// of an error about keys may contain what was signed, so it is left out.
func classify(permission, table string, e *apiError) error {
	is := func(codes ...string) bool { return isCode(e, codes...) }
	switch {
	case is("DryRunOperation"): // the call would have succeeded
		return nil
	// DeleteRouteEntry also has the code Forbbiden for routes that no call may delete.
	case is("Forbidden", "Forbidden.RAM", "NoPermission", "Forbidden.NoPermission") || is("Forbbiden") && strings.Contains(strings.ToLower(e.Message), "not authorized"):
		return &cloud.MissingError{Permissions: []string{permission}, Page: page}
	case is("QuotaExceeded", "QuotaExceeded.RouteEntry", "RouteEntryQuotaExceeded"):
		return &cloud.QuotaError{Table: table}
	// The codes after SystemBusy are about another change, of the table or the VPC, that has not ended.
	case strings.HasPrefix(e.Code, "Throttling") || e.Status == http.StatusTooManyRequests || strings.HasPrefix(e.Code, "IncorrectStatus") ||
		is("SystemBusy", "TaskConflict", "OperationConflict", "OperationFailed.DistibuteLock", "LastTokenProcessing",
			"IncorrectRouteEntryStatus", "IncorrcetRouteEntryStatus", "IncorrectVpcStatus", "IncorrectVSwitchStatus"):
		return fmt.Errorf("%w (%s)", cloud.ErrThrottled, e.Code)
	case strings.HasPrefix(e.Code, "InvalidAccessKeyId") || strings.HasPrefix(e.Code, "InvalidSecurityToken") || strings.HasPrefix(e.Code, "InvalidTimeStamp") ||
		is("SignatureDoesNotMatch", "IncompleteSignature", "SignatureNonceUsed", "MissingSecurityToken"):
		return fmt.Errorf("%w (%s): check the instance's role, and this host's clock", errKeys, e.Code)
	case e.Status >= http.StatusInternalServerError || is("UnknownError", "IncorrectInstanceStatus"):
		return fmt.Errorf("%w: %w", cloud.ErrUnavailable, e)
	}
	return e
}
