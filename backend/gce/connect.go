// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

// findEndpoints returns the URLs of the APIs, which the environment variables of gcloud may replace.
func findEndpoints() (endpoints, error) {
	e := endpoints{"https://compute.googleapis.com/compute/v1/", "https://cloudresourcemanager.googleapis.com/"}
	for variable, to := range map[string]*string{
		"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": &e.compute, "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER": &e.manager,
	} {
		*to = cmp.Or(os.Getenv(variable), *to)
		if !access.Confidential(*to) {
			return endpoints{}, fmt.Errorf("%s is invalid: expected an https URL, or an http URL of this host, because the token of the service account is sent there", variable)
		}
	}
	return e, nil
}

func connect(ctx context.Context, at endpoints, calls *cloud.Calls) (*client, error) {
	host := cmp.Or(os.Getenv("GCE_METADATA_HOST"), "169.254.169.254") // as Google's own clients read it
	metadata := &access.Metadata{
		Cloud: "Google Cloud", Page: page, URL: "http://" + host, Root: "computeMetadata/v1/", Flavor: "Google", Token: account + "token",
	}
	c := &client{Client: access.NewClient(metadata, calls), endpoints: at, poll: wait.Backoff{Least: leastPoll, Most: mostPoll}}
	c.Keys = c.bearer
	if err := metadata.Fill(ctx, []string{"project/project-id", "instance/name", "instance/zone"}, &c.project, &c.instance, &c.zone); err != nil {
		return nil, err
	}

	c.number = strings.Split(c.zone+"//", "/")[1] // projects/NUMBER/zones/ZONE
	c.zone = path.Base(c.zone)
	return c, nil
}
