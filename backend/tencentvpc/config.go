// SPDX-License-Identifier: Apache-2.0

package tencentvpc

import (
	"encoding/json"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/subnet"
)

// config is the Backend object of the network configuration.
type config struct {
	AccessKeyID     string // SecretId of a key, which everything that reads the store can see; better give the instance a role
	AccessKeySecret string // SecretKey of that key
}

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return config{} }

func parseConfig(raw json.RawMessage) (config, []string, error) {
	var c config
	warnings, err := subnet.DecodeBackend(raw, &c)
	if err != nil {
		return c, nil, err
	}
	if (c.AccessKeyID == "") != (c.AccessKeySecret == "") {
		warnings = append(warnings, "AccessKeyID and AccessKeySecret need each other: the one that is set is ignored")
	}
	secrets, err := cloud.SecretKeys(raw)
	return c, append(warnings, secrets...), err
}
