// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// usualMTU is the MTU of most external interfaces in bytes.
const usualMTU = 1500

// ValidateConfig reports whether a daemon would accept the network configuration. It
// returns the error that the daemon would log, and warnings of one line each. The result
// may be different on a host whose interface has an unusual MTU. pools reports whether
// subnets are assigned from the networks, as with etcd; with Kubernetes the API assigns
// them. backends are those that the daemon may use.
func ValidateConfig(text []byte, pools bool, backends backend.Registry) (cfg subnet.Config, warnings []string, err error) {
	cfg, _, warnings, err = validate("", text, pools, backends)
	return cfg, warnings, err
}

// validate also returns the backend, for a host with any interface. network is the name of one of
// several networks.
func validate(network string, text []byte, pools bool, backends backend.Registry) (cfg subnet.Config, be backend.Backend, warnings []string, err error) {
	if cfg, warnings, err = subnet.ParseConfig(text); err != nil {
		return cfg, nil, nil, err
	}
	if _, err := cfg.Pools(); pools && err != nil {
		return cfg, nil, nil, err
	}
	be, more, err := backends.New(backend.Env{Network: network, Config: cfg, Underlay: underlay.Interface{Name: "any", MTU: usualMTU}})
	if err != nil {
		return cfg, nil, nil, err
	}
	return cfg, be, append(warnings, more...), nil
}
