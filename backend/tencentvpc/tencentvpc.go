// SPDX-License-Identifier: Apache-2.0

// Package tencentvpc lets the routers of a VPC of Tencent Cloud carry the packets of pods. Each host
// has a route to its subnet in the route table of its own subnet of the VPC. These packets need no tunnel.
//
//   - tencentvpc.go creates the cloudnet.Backend from a cloudnet.Keyed.
//   - vpc.go implements cloud.Cloud. routes.go has the routes and the instances of the API; it is pure.
//   - api.go makes the calls of the API, and sorts their errors.
//   - connect.go finds the region, the instance and the keys.
package tencentvpc

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/cloud"
)

// Type is the backend's name in the configuration.
const Type = "tencent-vpc"

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return cloudnet.Keyed{} }

// New is the backend's factory.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	c, warnings, err := cloudnet.ParseKeyed(raw)
	if err != nil {
		return nil, nil, err
	}

	for _, n := range env.Config.Prefixes() {
		if n.Addr().Is6() {
			return nil, nil, fmt.Errorf("IPv6Network is %s: want none, because routes of Tencent Cloud lead only to IPv4 addresses of instances", n)
		}
	}

	calls := &cloud.Calls{}
	v := &vpc{
		cluster: c.Cluster, networks: env.Config.Prefixes(), addresses: env.Locals(),
		connect: func(ctx context.Context) (*client, error) { return connect(ctx, c, calls) },
	}
	return &cloudnet.Backend{Type: Type, Env: env, Cloud: v, Calls: calls, Overflow: c.Overflow}, warnings, nil
}
