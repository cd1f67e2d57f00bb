// SPDX-License-Identifier: Apache-2.0

package alivpc

import (
	"context"
	"net/netip"
	"os"

	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

func connect(ctx context.Context, cfg cloudnet.Keyed, calls *cloud.Calls) (*client, error) {
	address, err := access.Endpoint("ALIBABA_CLOUD_METADATA_ENDPOINT", "http://100.100.100.200")
	if err != nil {
		return nil, err
	}
	metadata := &access.Metadata{Cloud: name, Page: page, URL: address, Roles: "ram/security-credentials/", Session: "X-aliyun-ecs-metadata-token"}
	c := &client{
		Client: access.NewClient(metadata, calls),
		vpc:    service{name: "vpc", version: "2016-04-28"},
		ecs:    service{name: "ecs", version: "2014-05-26"},
	}

	if err := metadata.Fill(ctx, []string{"region-id", "instance-id"}, &c.region, &c.instance); err != nil {
		return nil, err
	}

	// flannel reads the first two environment variables, and programs of Alibaba Cloud the others.
	c.Keys = access.First(metadata.Keys,
		cfg.Keys(),
		access.Keys{ID: os.Getenv("ACCESS_KEY_ID"), Secret: os.Getenv("ACCESS_KEY_SECRET")},
		access.Keys{ID: os.Getenv("ALIBABA_CLOUD_ACCESS_KEY_ID"), Secret: os.Getenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET"), Token: os.Getenv("ALIBABA_CLOUD_SECURITY_TOKEN")},
	)
	if c.vpc.endpoint, err = access.Endpoint("ALIBABA_CLOUD_VPC_ENDPOINT", "https://vpc."+c.region+".aliyuncs.com"); err != nil {
		return nil, err
	}
	if c.ecs.endpoint, err = access.Endpoint("ALIBABA_CLOUD_ECS_ENDPOINT", "https://"+ecsHost(c.region)); err != nil {
		return nil, err
	}
	return c, nil
}

func ecsHost(region string) string {
	// One region has no name of its own, according to services/ecs of alibaba-cloud-sdk-go.
	if region == "cn-hangzhou-finance" {
		return "ecs.aliyuncs.com"
	}
	return "ecs." + region + ".aliyuncs.com"
}

func (c *client) ownVSwitch(ctx context.Context, addresses []netip.Addr) (id string, primary bool, err error) {
	found, err := c.Metadata.Find(ctx, addresses, "private-ipv4s", "ipv6s")
	if err != nil {
		return "", false, err
	}
	id, err = c.Metadata.Read(ctx, found.Path("vswitch-id"))
	return id, found.Primary, err
}
