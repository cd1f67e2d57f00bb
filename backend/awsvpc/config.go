// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/subnet"
)

// config is the Backend object of the network configuration.
type config struct {
	// id of the route table, or a list of ids. Without it and RouteTableFilter: the table of the host's subnet, or
	// else the main table of the VPC
	RouteTableID tableIDs
	// filters of EC2 that choose the route tables, such as "tag:cluster=blue"; a table must match all names, and one
	// value of each
	RouteTableFilter []string
	Overflow         backend.Inner // tunnel to hosts that the routes of the cloud do not reach
}

// Defaults returns the keys of Backend with their defaults, as a struct. The reference in
// the documentation is generated from it and from the comments of its fields.
func Defaults() any { return config{} }

// tableIDs is a string or an array of strings.
type tableIDs []string

// errTableIDs does not contain the value, like all errors about a JSON type.
var errTableIDs = errors.New("RouteTableID: want a string or an array of strings")

// UnmarshalJSON implements json.Unmarshaler.
func (t *tableIDs) UnmarshalJSON(raw []byte) error {
	var one string
	if json.Unmarshal(raw, &one) == nil {
		*t = nil
		if one != "" {
			*t = tableIDs{one}
		}
		return nil
	}

	var many []string
	if json.Unmarshal(raw, &many) != nil {
		return errTableIDs
	}
	*t = many
	return nil
}

func parseConfig(raw json.RawMessage) (config, []string, error) {
	c := config{}
	warnings, err := cloudnet.Decode(raw, &c, nil)
	if err != nil {
		return c, nil, err
	}
	if len(c.RouteTableID) > 0 && len(c.RouteTableFilter) > 0 {
		return c, nil, errors.New("Backend.RouteTableID and Backend.RouteTableFilter exclude each other: remove one of them")
	}
	if slices.Contains(c.RouteTableID, "") {
		return c, nil, errors.New(`Backend.RouteTableID contains an empty string: want ids such as "rtb-0123456789abcdef0"`)
	}

	for _, f := range c.RouteTableFilter {
		if name, value, ok := strings.Cut(f, "="); !ok || name == "" || value == "" {
			return c, nil, fmt.Errorf(`Backend.RouteTableFilter contains %q: want name=value, such as "tag:cluster=blue"`, subnet.Shorten(f))
		}
	}
	return c, warnings, nil
}

// choosesTables reports false if the table is that of the host's subnet.
func (c config) choosesTables() bool { return len(c.RouteTableID)+len(c.RouteTableFilter) > 0 }

func (c config) filters() map[string][]string {
	filters := map[string][]string{}
	for _, f := range c.RouteTableFilter {
		name, value, _ := strings.Cut(f, "=")
		filters[name] = append(filters[name], value)
	}
	return filters
}
