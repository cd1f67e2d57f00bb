// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"path"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/transport"
)

// findEndpoints returns the URLs of the APIs, which the environment variables of gcloud may replace.
func findEndpoints() (endpoints, error) {
	e := endpoints{"https://compute.googleapis.com/compute/v1/", "https://cloudresourcemanager.googleapis.com/"}
	for _, variable := range []struct {
		name string
		to   *string
	}{{"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", &e.compute}, {"CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER", &e.manager}} {
		other := os.Getenv(variable.name)
		if other == "" {
			continue
		}
		if !confidential(other) {
			return endpoints{}, fmt.Errorf("%s is invalid: expected an https URL, or an http URL of this host, because the token of the service account is sent there", variable.name)
		}
		*variable.to = other
	}
	return e, nil
}

// confidential reports whether no other host can read what is sent to that URL.
func confidential(text string) bool {
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" {
		return false
	}
	a, err := netip.ParseAddr(u.Hostname())
	return u.Scheme == "https" || u.Scheme == "http" && (u.Hostname() == "localhost" || err == nil && a.IsLoopback())
}

func connect(ctx context.Context, at endpoints, calls *cloud.Calls) (*client, error) {
	host := cmp.Or(os.Getenv("GCE_METADATA_HOST"), "169.254.169.254") // as Google's own clients read it
	me := &identity{Metadata: &access.Metadata{
		Cloud: "Google Cloud", Page: page, URL: "http://" + host, Root: "computeMetadata/v1/", Flavor: "Google",
	}}
	c := &client{
		Client:   access.Client{Keys: me.bearer, Renew: me.forget, HTTP: transport.NewClient(), Calls: calls},
		identity: me, endpoints: at, poll: wait.Backoff{Least: leastPoll, Most: mostPoll},
	}

	for _, value := range []struct {
		path string
		to   *string
	}{{"project/project-id", &c.project}, {"instance/name", &c.instance}, {"instance/zone", &c.zone}} {
		var err error
		if *value.to, err = c.Read(ctx, value.path); err != nil {
			return nil, err
		}
	}

	c.number = strings.Split(c.zone+"//", "/")[1] // projects/NUMBER/zones/ZONE
	c.zone = path.Base(c.zone)
	return c, nil
}
