// SPDX-License-Identifier: Apache-2.0

package tencentvpc

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

func connect(ctx context.Context, cfg cloudnet.Keyed, calls *cloud.Calls) (*client, error) {
	address, err := access.Endpoint("TENCENTCLOUD_METADATA_ENDPOINT", "http://metadata.tencentyun.com")
	if err != nil {
		return nil, err
	}
	metadata := &access.Metadata{Cloud: name, Page: page, URL: address, Roles: "cam/security-credentials/"}
	c := &client{
		Client: access.NewClient(metadata, calls),
		vpc:    service{name: "vpc", version: "2017-03-12"},
		cvm:    service{name: "cvm", version: "2017-03-12"},
	}
	if c.region, err = metadata.Read(ctx, "placement/region"); err != nil {
		return nil, err
	}

	domain := "tencentcloudapi.com"
	if strings.HasSuffix(c.region, "-fsi") { // finance regions are isolated from the others
		domain = c.region + "." + domain
	}
	if c.vpc.endpoint, err = access.Endpoint("TENCENTCLOUD_VPC_ENDPOINT", "https://vpc."+domain); err != nil {
		return nil, err
	}
	if c.cvm.endpoint, err = access.Endpoint("TENCENTCLOUD_CVM_ENDPOINT", "https://cvm."+domain); err != nil {
		return nil, err
	}

	// flannel reads the first two environment variables, and programs of Tencent Cloud the others.
	c.Keys = access.First(metadata.Keys,
		cfg.Keys(),
		access.Keys{ID: os.Getenv("ACCESS_KEY_ID"), Secret: os.Getenv("ACCESS_KEY_SECRET")},
		access.Keys{ID: os.Getenv("TENCENTCLOUD_SECRET_ID"), Secret: os.Getenv("TENCENTCLOUD_SECRET_KEY"), Token: os.Getenv("TENCENTCLOUD_TOKEN")},
	)
	return c, nil
}

// place is where this host is in the cloud.
type place struct {
	address     netip.Addr // the target of routes to this host
	vpc, subnet string     // ids
}

// find returns the place of the external interface, which must be the primary one of the instance.
func (c *client) find(ctx context.Context, addresses []netip.Addr) (p place, err error) {
	found, err := c.Metadata.Find(ctx, addresses, "primary-local-ipv4", "local-ipv4s/")
	if err != nil {
		return place{}, err
	}
	if !found.Primary {
		return place{}, fmt.Errorf("%s is not of the primary network interface of this instance, whose addresses Tencent Cloud shows: choose that one by --iface", found.Address)
	}

	p.address = found.Address
	err = c.Metadata.Fill(ctx, []string{found.Path("vpc-id"), found.Path("subnet-id")}, &p.vpc, &p.subnet)
	return p, err
}
