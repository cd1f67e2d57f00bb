// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/aws-sdk-go-v2/credentials/endpointcreds"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

func connect(ctx context.Context, addresses []netip.Addr, calls *cloud.Calls) (*client, error) {
	only6 := len(addresses) > 0 && !slices.ContainsFunc(addresses, netip.Addr.Is4)
	standard := "http://169.254.169.254"
	if only6 {
		standard = "http://[fd00:ec2::254]"
	}
	service, err := access.Endpoint("AWS_EC2_METADATA_SERVICE_ENDPOINT", standard)
	if err != nil {
		return nil, err
	}

	metadata := &access.Metadata{Cloud: "EC2", Page: page, URL: service, Roles: "iam/security-credentials/", Session: "X-aws-ec2-metadata-token"}
	c := &client{Client: access.NewClient(metadata, calls), signer: v4.NewSigner()}
	var domain string
	err = metadata.Fill(ctx, []string{"placement/region", "instance-id", "services/domain"}, &c.region, &c.instance, &domain)
	if errors.Is(err, access.ErrUndefined) { // a service that has no such value is not EC2's, or not ready
		err = fmt.Errorf("%w: %w", cloud.ErrUnavailable, err)
	}
	if err != nil {
		return nil, err
	}

	c.Keys = access.First(role(metadata), access.Keys{
		ID: os.Getenv("AWS_ACCESS_KEY_ID"), Secret: os.Getenv("AWS_SECRET_ACCESS_KEY"), Token: os.Getenv("AWS_SESSION_TOKEN"),
	})
	if dual := dualStack()[domain]; only6 && dual != "" {
		domain = dual
	}
	// All programs that use the SDK of AWS read these environment variables.
	c.endpoint = cmp.Or(os.Getenv("AWS_ENDPOINT_URL_EC2"), os.Getenv("AWS_ENDPOINT_URL"), "https://ec2."+c.region+"."+domain)
	return c, nil
}

func dualStack() map[string]string {
	// Names in the domains on the left, which are those of the metadata service, have only IPv4 addresses.
	// Source: dualStackDnsSuffix in partitions.json of botocore.
	return map[string]string{
		"amazonaws.com":    "api.aws",
		"amazonaws.com.cn": "api.amazonwebservices.com.cn",
		"amazonaws.eu":     "api.amazonwebservices.eu",
	}
}

// role returns the keys of a role: from the agent that gives a container its role, if there is one, and
// otherwise those of the instance.
func role(metadata *access.Metadata) access.Provider {
	agent := os.Getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
	if agent == "" {
		return metadata.Keys
	}
	if !trusted(agent) {
		return func(context.Context) (access.Keys, error) {
			return access.Keys{}, errors.New("AWS_CONTAINER_CREDENTIALS_FULL_URI is invalid: expected an https URL, or an http URL of this host or of the agents of ECS and EKS")
		}
	}

	cache := aws.NewCredentialsCache(endpointcreds.New(agent, func(o *endpointcreds.Options) {
		o.HTTPClient = access.NewDirect()
		o.AuthorizationToken = os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN")
		if path := os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); path != "" {
			o.AuthorizationTokenProvider = tokenFile(path)
		}
	}))
	return func(ctx context.Context) (access.Keys, error) {
		have, err := cache.Retrieve(ctx)
		if err != nil {
			return access.Keys{}, fmt.Errorf("%w: get credentials from the agent of the container: %s", cloud.ErrUnavailable, access.Reason(err))
		}
		return access.Keys{ID: have.AccessKeyID, Secret: have.SecretAccessKey, Token: have.SessionToken}, nil
	}
}

// trusted reports whether the token of a container may be sent to that URL.
func trusted(agent string) bool {
	return access.Confidential(agent, "169.254.170.2", "169.254.170.23", "fd00:ec2::23") // agents of ECS, and of EKS
}

// tokenFile is the path of a file with a token that other programs renew.
type tokenFile string

// GetToken implements endpointcreds.AuthTokenProvider.
func (f tokenFile) GetToken() (string, error) {
	text, err := os.ReadFile(string(f))
	return strings.TrimSpace(string(text)), err
}
