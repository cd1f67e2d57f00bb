// SPDX-License-Identifier: Apache-2.0

// Package gce lets the routers of a VPC network of Google Cloud carry the packets of pods. Each
// host has a static route to its subnet. These packets need no tunnel.
//
//   - gce.go creates the cloudnet.Backend from the Backend object of the configuration.
//   - compute.go implements cloud.Cloud. routes.go decides to which program or cluster a route
//     belongs, and how it is named; it is pure.
//   - rest.go makes the calls of the Compute API, and sorts their errors.
//   - metadata.go asks the metadata service for the instance and for tokens.
//   - connect.go finds the URLs of the APIs, the project, the instance and the zone.
package gce

import (
	"context"
	"encoding/json"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/cloud"
)

// Type is the backend's name in the configuration.
const Type = "gce"

const page = "Documentation/backends/gce.md"

// config is the Backend object of the network configuration.
type config struct {
	Cluster  string        // name of the cluster, such as "blue", in the descriptions of its routes; hosts of other clusters do not replace or remove these
	Overflow backend.Inner // tunnel to hosts that the routes of the cloud do not reach
}

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return config{} }

// New is the backend's factory.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	c := config{}
	warnings, err := cloudnet.Decode(raw, &c, &c.Cluster)
	if err != nil {
		return nil, nil, err
	}
	at, err := findEndpoints()
	if err != nil {
		return nil, nil, err
	}
	calls := &cloud.Calls{}
	v := &vpc{
		cluster: c.Cluster, networks: env.Config.Prefixes(), addresses: env.Locals(),
		connect: func(ctx context.Context) (*client, error) { return connect(ctx, at, calls) },
	}
	return &cloudnet.Backend{Type: Type, Env: env, Cloud: v, Calls: calls, Overflow: c.Overflow}, warnings, nil
}
