// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/network"
	"github.com/flanneld/flanneld/subnet"
)

// ValidateConfig reports whether a daemon would accept the network configuration. It
// returns the parsed configuration, warnings of one line each, even with an error, and the error that the
// daemon would log. The result may be different on a host whose interface has an unusual MTU. pools is set if flanneld
// assigns subnets from the networks, as with etcd; with Kubernetes the API assigns
// them. backends are those that the daemon may use.
func ValidateConfig(text []byte, pools bool, backends backend.Registry) (cfg subnet.Config, warnings []string, err error) {
	cfg, _, warnings, err = network.Validate("", text, pools, backends)
	return cfg, warnings, err
}
