// SPDX-License-Identifier: Apache-2.0

// Package awsvpc lets the routers of an Amazon VPC carry the packets of pods. Each host has a
// route to its subnet in the route tables of the VPC. These packets need no tunnel.
//
//   - awsvpc.go creates the cloudnet.Backend. config.go is the Backend object of the
//     configuration.
//   - ec2.go implements cloud.Cloud with the calls of EC2, which query.go makes.
//   - connect.go finds the region, the instance and the credentials.
package awsvpc

import (
	"context"
	"encoding/json"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/cloud"
)

// Type is the backend's name in the configuration.
const Type = "aws-vpc"

// New is the backend's factory.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	c, warnings, err := parseConfig(raw)
	if err != nil {
		return nil, nil, err
	}
	calls := &cloud.Calls{}
	v := &vpc{
		config: c, networks: env.Config.Prefixes(), addresses: env.Locals(),
		connect: func(ctx context.Context) (*client, error) { return connect(ctx, env.Locals(), calls) },
	}
	return &cloudnet.Backend{Type: Type, Env: env, Cloud: v, Calls: calls, Overflow: c.Overflow}, warnings, nil
}
