// SPDX-License-Identifier: Apache-2.0

package network

import (
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// usualMTU is the MTU of most external interfaces in bytes.
const usualMTU = 1500

// Validate parses a network configuration and returns it with its backend, for a host whose
// interface has the usual MTU. network is the name of the network if there are several, and otherwise
// empty. pools is set if flanneld assigns subnets from the networks, as with etcd. warnings contains
// one line for each warning, including those of cfg. It may be set together with an error.
func Validate(network string, text []byte, pools bool, backends backend.Registry) (cfg subnet.Config, be backend.Backend, warnings []string, err error) {
	if cfg, err = subnet.ParseConfig(text); err != nil {
		return cfg, nil, cfg.Warnings, err
	}
	if _, err := cfg.Pools(); pools && err != nil {
		return cfg, nil, cfg.Warnings, err
	}
	be, more, err := backends.New(backend.Env{Network: network, Config: cfg, Underlay: underlay.Interface{Name: "any", MTU: usualMTU}})
	return cfg, be, slices.Concat(cfg.Warnings, more), err
}
