// SPDX-License-Identifier: Apache-2.0

package alivpc

import (
	"cmp"
	"context"
	"net/netip"
	"os"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

// connect returns a client for the region of this host.
func connect(ctx context.Context, cfg config, calls *cloud.Calls) (*client, error) {
	c := &client{
		http: access.NewClient(), calls: calls, metadata: &access.Metadata{
			Cloud: "Alibaba Cloud", Page: page, URL: cmp.Or(os.Getenv("ALIBABA_CLOUD_METADATA_ENDPOINT"), "http://100.100.100.200"),
			Roles: "ram/security-credentials/", Session: "X-aliyun-ecs-metadata-token",
		},
	}
	for _, value := range []struct {
		path string
		to   *string
	}{{"region-id", &c.region}, {"instance-id", &c.instance}} {
		var err error
		if *value.to, err = c.metadata.Read(ctx, value.path); err != nil {
			return nil, err
		}
	}
	c.keys = provider(cfg, c.metadata)
	c.vpc = service{"vpc", "2016-04-28", cmp.Or(os.Getenv("ALIBABA_CLOUD_VPC_ENDPOINT"), "https://vpc."+c.region+".aliyuncs.com")}
	c.ecs = service{"ecs", "2014-05-26", cmp.Or(os.Getenv("ALIBABA_CLOUD_ECS_ENDPOINT"), "https://ecs."+c.region+".aliyuncs.com")}
	return c, nil
}

// provider returns the first source of keys that this host has: the configuration, the environment
// with the names of flannel or those of Alibaba Cloud, and the role of the instance.
func provider(cfg config, metadata *access.Metadata) access.Provider {
	return access.First(metadata.Keys,
		access.Keys{ID: cfg.AccessKeyID, Secret: cfg.AccessKeySecret},
		access.Keys{ID: os.Getenv("ACCESS_KEY_ID"), Secret: os.Getenv("ACCESS_KEY_SECRET")},
		access.Keys{ID: os.Getenv("ALIBABA_CLOUD_ACCESS_KEY_ID"), Secret: os.Getenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET"), Token: os.Getenv("ALIBABA_CLOUD_SECURITY_TOKEN")},
	)
}

// vSwitch returns the id of the vSwitch of the network interface that has one of the addresses.
func (c *client) vSwitch(ctx context.Context, addresses []netip.Addr) (id string, primary bool, err error) {
	found, err := c.metadata.Find(ctx, addresses, "private-ipv4s", "ipv6s")
	if err != nil {
		return "", false, err
	}
	id, err = c.metadata.Read(ctx, found.Path("vswitch-id"))
	return id, found.Primary, err
}
