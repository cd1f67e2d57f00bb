// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

const (
	apiVersion = "2016-11-15"
	page       = "Documentation/backends/aws-vpc.md"
)

// client makes calls of EC2's Query API. A call is a signed form, and its answer is XML.
type client struct {
	access.Client
	signer   *v4.Signer
	region   string
	instance string // id
	endpoint string // URL
}

// call repeats a throttled call a few times. answer may be nil.
func (c *client) call(ctx context.Context, action string, params url.Values, answer any) error {
	return c.Make(ctx, action, action, func(k access.Keys) error { return c.once(ctx, k, action, params, answer) })
}

// try makes a dry run of a call. It adds a parameter to params.
func (c *client) try(ctx context.Context, action string, params url.Values) error {
	params.Set("DryRun", "true")
	return c.Make(ctx, action+" (dry run)", action, func(k access.Keys) error { return c.once(ctx, k, action, params, nil) })
}

func (c *client) once(ctx context.Context, k access.Keys, action string, params url.Values, answer any) error {
	form := url.Values{"Action": {action}, "Version": {apiVersion}}
	maps.Copy(form, params)
	body := form.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.endpoint, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded; charset=utf-8")
	sum := sha256.Sum256([]byte(body))
	credentials := aws.Credentials{AccessKeyID: k.ID, SecretAccessKey: k.Secret, SessionToken: k.Token}
	if err := c.signer.SignHTTP(ctx, credentials, req, hex.EncodeToString(sum[:]), "ec2", c.region, time.Now()); err != nil {
		return fmt.Errorf("sign the call: %w", err)
	}

	status, text, err := access.Send(c.HTTP, req)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return classify(action, params, status, text)
	}
	if answer == nil {
		return nil
	}
	if err := xml.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("decode the answer: %w", err)
	}
	return nil
}

func isCode(err error, codes ...string) bool { return slices.Contains(codes, access.Code(err)) }

// classify returns the error of package cloud for an answer, or that of EC2. It returns nil if a dry
// run would have succeeded.
func classify(action string, params url.Values, status int, text []byte) error {
	var answer struct {
		Errors []struct{ Code, Message string } `xml:"Errors>Error"`
	}

	e := access.NewError(status, fmt.Sprint(status), http.StatusText(status))
	if xml.Unmarshal(text, &answer) == nil && len(answer.Errors) > 0 {
		e = access.NewError(status, answer.Errors[0].Code, answer.Errors[0].Message)
	}

	switch e.Code {
	case "DryRunOperation": // the call would have succeeded
		return nil
	case "UnauthorizedOperation": // its message contains pages of encoded text
		return &cloud.MissingError{Permissions: []string{"ec2:" + action}, Page: page}
	case "RouteLimitExceeded":
		return &cloud.QuotaError{Table: params.Get("RouteTableId")}
	case "RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled", "RequestThrottledException", "EC2ThrottledException", "SlowDown":
		return fmt.Errorf("%w (%s)", cloud.ErrThrottled, e.Code)
	// These errors do not wrap cloud.ErrKeys, because AuthFailure may also be about one interface or table,
	// and not about the keys.
	case "AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "ExpiredToken", "RequestExpired", "IncompleteSignature", "MissingAuthenticationToken":
		return fmt.Errorf("EC2 refuses the credentials (%s): check the instance's role, and this host's clock", e.Code)
	}

	if status == http.StatusTooManyRequests {
		return fmt.Errorf("%w (%s)", cloud.ErrThrottled, e.Code)
	}
	if status >= http.StatusInternalServerError {
		return fmt.Errorf("%w: %w", cloud.ErrUnavailable, e)
	}
	return e
}
