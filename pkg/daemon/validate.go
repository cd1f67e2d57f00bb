// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// ValidateConfig reports whether a daemon would accept the network configuration. It returns the parsed
// configuration with its backend, warnings of one line each, even with an error, and the error that the
// daemon would log. The result may be different on a host whose interface has an unusual MTU. pools is set if flanneld
// assigns subnets from the networks, as with etcd; with Kubernetes the API assigns
// them. backends are those that the daemon may use.
func ValidateConfig(text []byte, pools bool, backends backend.Registry) (cfg subnet.Config, be backend.Backend, warnings []string, err error) {
	return network.Validate("", text, pools, backends)
}

// CheckRanges returns an error if a host could be given a subnet of cfg that contains an address of iface
// or of an etcd endpoint, because routes to that subnet would cut the host off.
func CheckRanges(ctx context.Context, cfg subnet.Config, iface underlay.Interface, etcdEndpoints []string) error {
	return network.CheckRanges(ctx, cfg, subnet.Config{}, iface, etcdEndpoints)
}
