// SPDX-License-Identifier: Apache-2.0

package alivpc

import (
	"encoding/json"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/subnet"
)

// config is the Backend object of the network configuration.
type config struct {
	Cluster         string           // name of the cluster, such as "blue", in the descriptions of its routes; hosts of other clusters do not replace or remove these
	AccessKeyID     string           // id of an access key. Every program that can read the store can read the key: if possible, give the instance a role instead
	AccessKeySecret string           // secret of the access key
	Overflow        backend.Overflow // tunnel to hosts that the routes of the cloud do not reach
}

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return config{} }

func (c config) keys() access.Keys { return access.Keys{ID: c.AccessKeyID, Secret: c.AccessKeySecret} }

func parseConfig(raw json.RawMessage) (config, []string, error) {
	c := config{}
	warnings, err := subnet.DecodeBackend(raw, &c)
	if err != nil {
		return c, nil, err
	}
	if err := backend.CheckCluster(c.Cluster); err != nil {
		return c, nil, err
	}
	more, err := access.Warnings(raw, c.keys())
	return c, append(warnings, more...), err
}
