// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"encoding/json"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/subnet"
)

const page = "Documentation/backends/gce.md"

// config is the Backend object of the network configuration.
type config struct {
	Cluster  string        // name of the cluster, such as "blue", in the descriptions of its routes; hosts of other clusters do not replace or remove these
	Overflow backend.Inner // tunnel to hosts that the routes of the cloud do not reach
}

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return config{} }

func parseConfig(raw json.RawMessage) (config, []string, error) {
	c := config{}
	warnings, err := subnet.DecodeBackend(raw, &c)
	if err != nil {
		return c, nil, err
	}
	if err := cloudnet.CheckCluster(c.Cluster); err != nil {
		return c, nil, err
	}
	secrets, err := cloud.SecretKeys(raw)
	return c, append(warnings, secrets...), err
}
