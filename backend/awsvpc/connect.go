// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/credentials/ec2rolecreds"
	"github.com/aws/aws-sdk-go-v2/credentials/endpointcreds"
	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/transport"
)

func connect(ctx context.Context, addresses []netip.Addr, calls *cloud.Calls) (*client, string, error) {
	ctx, cancel := context.WithTimeout(ctx, transport.Timeout)
	defer cancel()

	only6 := len(addresses) > 0 && !slices.ContainsFunc(addresses, netip.Addr.Is4)
	options := imds.Options{HTTPClient: transport.NewDirect(), EnableFallback: aws.FalseTernary} // IMDSv2 only
	if only6 {
		options.EndpointMode = imds.EndpointModeStateIPv6 // AWS_EC2_METADATA_SERVICE_ENDPOINT overrides it
	}

	metadata := imds.New(options)
	values := map[string]string{"placement/region": "", "instance-id": "", "services/domain": ""}
	for path := range values {
		var err error
		if values[path], err = read(ctx, metadata, path); err != nil {
			return nil, "", fmt.Errorf("%w: read %s from the metadata service of EC2: %s", cloud.ErrUnavailable, path, transport.Reason(err))
		}
	}

	provider, err := credentialsProvider(metadata)
	if err != nil {
		return nil, "", err
	}
	region := values["placement/region"]
	domain := values["services/domain"]
	if dual := dualStack()[domain]; only6 && dual != "" {
		domain = dual
	}
	return &client{
		http: transport.NewClient(), signer: v4.NewSigner(), credentials: aws.NewCredentialsCache(provider), calls: calls, region: region,
		// All programs that use the SDK of AWS read these environment variables.
		endpoint: cmp.Or(os.Getenv("AWS_ENDPOINT_URL_EC2"), os.Getenv("AWS_ENDPOINT_URL"), "https://ec2."+region+"."+domain),
	}, values["instance-id"], nil
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

func read(ctx context.Context, metadata *imds.Client, path string) (string, error) {
	answer, err := metadata.GetMetadata(ctx, &imds.GetMetadataInput{Path: path})
	if err != nil {
		return "", err
	}
	defer answer.Content.Close()
	text, err := io.ReadAll(answer.Content)
	if err == nil && len(text) == 0 {
		err = fmt.Errorf("%s is empty", path)
	}
	return strings.TrimSpace(string(text)), err
}

// credentialsProvider chooses the environment, the agent that gives a container its role, or the role
// of the instance, in this order.
func credentialsProvider(metadata *imds.Client) (aws.CredentialsProvider, error) {
	if id, secret := os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY"); id != "" && secret != "" {
		return credentials.NewStaticCredentialsProvider(id, secret, os.Getenv("AWS_SESSION_TOKEN")), nil
	}
	if agent := os.Getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI"); agent != "" {
		if !trusted(agent) {
			return nil, fmt.Errorf("AWS_CONTAINER_CREDENTIALS_FULL_URI is invalid: expected an https URL, or an http URL of this host or of the agents of ECS and EKS")
		}
		return endpointcreds.New(agent, func(o *endpointcreds.Options) {
			o.HTTPClient = transport.NewDirect()
			o.AuthorizationToken = os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN")
			if path := os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); path != "" {
				o.AuthorizationTokenProvider = tokenFile(path)
			}
		}), nil
	}
	return instanceRole{ec2rolecreds.New(func(o *ec2rolecreds.Options) { o.Client = metadata })}, nil
}

// errNoRole needs an operator.
var errNoRole = errors.New("the instance has no role: attach one with the policy in " + page)

// instanceRole gives the credentials of the role of the instance.
type instanceRole struct{ *ec2rolecreds.Provider }

// Retrieve implements aws.CredentialsProvider. The metadata service answers 404 if the instance has no role.
func (r instanceRole) Retrieve(ctx context.Context) (aws.Credentials, error) {
	credentials, err := r.Provider.Retrieve(ctx)
	var answer interface{ HTTPStatusCode() int }
	if errors.As(err, &answer) && answer.HTTPStatusCode() == http.StatusNotFound {
		return credentials, errNoRole
	}
	return credentials, err
}

// trusted reports whether the token of a container may be sent to that URL.
func trusted(agent string) bool {
	u, err := url.Parse(agent)
	if err != nil || u.Scheme == "https" {
		return err == nil && u.Hostname() != ""
	}
	agents := []string{"169.254.170.2", "169.254.170.23", "fd00:ec2::23"} // of ECS, and of EKS
	a, err := netip.ParseAddr(u.Hostname())
	return u.Scheme == "http" && (u.Hostname() == "localhost" || err == nil && (a.IsLoopback() || slices.Contains(agents, a.String())))
}

// tokenFile is the path of a file with a token that other programs renew.
type tokenFile string

// GetToken implements endpointcreds.AuthTokenProvider.
func (f tokenFile) GetToken() (string, error) {
	text, err := os.ReadFile(string(f))
	return strings.TrimSpace(string(text)), err
}
