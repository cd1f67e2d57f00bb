// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

const operationTimeout = 2 * time.Minute

// leastPoll and mostPoll limit the pause between two calls that ask for the status of an operation.
// Most operations of routes take some seconds, and all hosts of a project share its quota of these
// calls.
const (
	leastPoll = time.Second
	mostPoll  = 3 * time.Second
)

// endpoints are the URLs of the APIs.
type endpoints struct {
	compute string
	manager string // of the Resource Manager API
}

// client makes calls of the Compute API for the instance of this host.
type client struct {
	access.Client
	endpoints
	poll     wait.Backoff // the pauses between two calls that ask for the status of an operation
	project  string
	number   string // of the project
	zone     string
	instance string // name
}

// request is a call. Its name is that of the API, such as routes.insert.
type request struct {
	name, method, url string
	body              any // nil means none
}

func (c *client) at(name, method, path string, body any) request {
	return request{name, method, strings.TrimSuffix(c.compute, "/") + "/projects/" + c.project + "/" + path, body}
}

// call repeats a throttled call a few times.
func (c *client) call(ctx context.Context, r request, answer any) error {
	return c.Make(ctx, r.name, r.name, func(k access.Keys) error { return c.once(ctx, k, r, answer) })
}

func (c *client) once(ctx context.Context, k access.Keys, r request, answer any) error {
	var body io.Reader
	if r.body != nil {
		text, err := json.Marshal(r.body)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}

	req, err := http.NewRequestWithContext(ctx, r.method, r.url, body)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+k.Token)
	req.Header.Set("Content-Type", "application/json")

	status, text, err := access.Send(c.HTTP, req)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return classify(r.name, decodeError(status, text))
	}
	return access.Decode(text, answer)
}

// operation is a change in progress.
type operation struct {
	Name   string `json:"name"`
	Status string `json:"status"` // PENDING, RUNNING or DONE
	Code   int    `json:"httpErrorStatusCode"`
	Error  struct {
		Errors []struct {
			Code    string `json:"code"`
			Message string `json:"message"`
		} `json:"errors"`
	} `json:"error"`
}

// change makes a call that changes something, and waits until the operation has ended.
func (c *client) change(ctx context.Context, r request) error {
	ctx, cancel := context.WithTimeout(ctx, operationTimeout)
	defer cancel()
	var op operation
	if err := c.call(ctx, r, &op); err != nil {
		return err
	}

	pauses := c.poll
	for op.Status != "DONE" {
		err := pauses.Wait(ctx, 0)
		if err == nil {
			err = c.call(ctx, c.at("globalOperations.get", http.MethodGet, "global/operations/"+op.Name, nil), &op)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w: operation %s has not ended", r.name, cloud.ErrUnavailable, op.Name)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}

	if len(op.Error.Errors) == 0 {
		return nil
	}
	first := op.Error.Errors[0]
	return fmt.Errorf("%s: %w", r.name, classify(r.name, access.NewError(op.Code, first.Code, first.Message)))
}

func isStatus(err error, status int) bool {
	e, ok := errors.AsType[*access.Error](err)
	return ok && e.Status == status
}

// decodeError returns the error in an answer. Its code is the reason, such as quotaExceeded, or QUOTA_EXCEEDED of an
// operation.
func decodeError(status int, text []byte) *access.Error {
	var answer struct {
		Error struct {
			Message string `json:"message"`
			Status  string `json:"status"`
			Errors  []struct {
				Reason string `json:"reason"`
			} `json:"errors"`
			Details []struct {
				Reason string `json:"reason"`
			} `json:"details"`
		} `json:"error"`
	}
	if json.Unmarshal(text, &answer) != nil || answer.Error.Message == "" {
		return access.NewError(status, http.StatusText(status), "")
	}

	// The first detail is the most precise reason, if there is one.
	reason := cmp.Or(answer.Error.Status, http.StatusText(status))
	if len(answer.Error.Errors) > 0 {
		reason = answer.Error.Errors[0].Reason
	}
	for _, d := range slices.Backward(answer.Error.Details) {
		reason = cmp.Or(d.Reason, reason)
	}
	return access.NewError(status, reason, answer.Error.Message)
}

// classify returns the error of package cloud for an error of the call with that name, if it has one.
func classify(name string, e *access.Error) error {
	is := func(reasons ...string) bool { return slices.Contains(reasons, e.Code) }
	full := fmt.Errorf("%d %w", e.Status, e)
	switch {
	case e.Status == http.StatusUnauthorized:
		return fmt.Errorf("Google %w of the service account: %w", cloud.ErrKeys, full)
	case is("rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED") || e.Status == http.StatusTooManyRequests:
		return fmt.Errorf("%w (%s)", cloud.ErrThrottled, e.Code)
	case is("quotaExceeded", "limitExceeded", "QUOTA_EXCEEDED", "LIMIT_EXCEEDED"):
		return quotaError(e.Message)
	case is("resourceNotReady", "RESOURCE_NOT_READY") || e.Status >= http.StatusInternalServerError:
		return fmt.Errorf("%w: %w", cloud.ErrUnavailable, full)
	case is("insufficientPermissions", "ACCESS_TOKEN_SCOPE_INSUFFICIENT"):
		return &cloud.MissingError{Permissions: []string{scope(name)}, Page: page}
	case is("forbidden", "PERMISSION_DENIED", "IAM_PERMISSION_DENIED", "PERMISSIONS_ERROR"):
		return &cloud.MissingError{Permissions: []string{permission(name, e.Message)}, Page: page}
	}
	return full
}

// permission returns the one that the message of an error names, or else the one for the call.
func permission(name, message string) string {
	if found := regexp.MustCompile(`'(compute\.[a-zA-Z.]+)'`).FindStringSubmatch(message); found != nil {
		return found[1]
	}
	return "compute." + strings.Replace(name, ".insert", ".create", 1)
}

// quotaError decodes messages such as "Quota 'ROUTES' exceeded. Limit: 250.0 globally.".
func quotaError(message string) *cloud.QuotaError {
	quota := &cloud.QuotaError{}
	if found := regexp.MustCompile(`Quota '([^']*)'`).FindStringSubmatch(message); found != nil {
		quota.Quota = found[1]
	}
	if found := regexp.MustCompile(`Limit: ([0-9]+)`).FindStringSubmatch(message); found != nil {
		quota.Limit, _ = strconv.Atoi(found[1])
	}
	return quota
}

// lacks asks testIamPermissions which permissions the account of the instance does not have.
func (c *client) lacks(ctx context.Context, name, url string, permissions ...string) ([]string, error) {
	var answer struct {
		Permissions []string `json:"permissions"`
	}
	asked := map[string][]string{"permissions": permissions}
	if err := c.call(ctx, request{name, http.MethodPost, url, asked}, &answer); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(permissions), func(p string) bool { return slices.Contains(answer.Permissions, p) }), nil
}
