// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
)

// account is the path of the service account of the instance.
const account = "instance/service-accounts/default/"

// bearer returns a token of the service account of the instance. It is an access.Provider.
func (c *client) bearer(ctx context.Context) (access.Keys, error) {
	k, err := c.Metadata.Keys(ctx)
	return k, withoutAccount(err)
}

// withoutAccount says what to do if err means that the instance has no service account.
func withoutAccount(err error) error {
	if errors.Is(err, access.ErrUndefined) {
		return errors.New("the instance has no service account: attach one, and give it the permissions of " + page)
	}
	return err
}

func (c *client) checkScopes(ctx context.Context) error {
	text, err := c.Metadata.Read(ctx, account+"scopes")
	if err != nil {
		return withoutAccount(err)
	}
	for have := range strings.FieldsSeq(text) {
		if have == computeScope || have == platformScope {
			return nil
		}
	}
	return &cloud.MissingError{Permissions: []string{computeScope}, Page: page}
}

// The access scopes of the APIs. platformScope includes computeScope.
const (
	computeScope  = "https://www.googleapis.com/auth/compute"
	platformScope = "https://www.googleapis.com/auth/cloud-platform"
)

func scope(name string) string {
	if strings.HasPrefix(name, "projects.") {
		return platformScope
	}
	return computeScope
}

type networkInterface struct {
	Network string       `json:"network"` // projects/NUMBER/networks/NAME
	IP      string       `json:"ip"`
	IPv6    []string     `json:"ipv6s"`
	Access  []accessItem `json:"accessConfigs"`
}

type accessItem struct {
	IP string `json:"externalIp"`
}

func (n networkInterface) has(a netip.Addr) bool {
	texts := append([]string{n.IP}, n.IPv6...)
	for _, access := range n.Access {
		texts = append(texts, access.IP)
	}
	return slices.Contains(access.Addresses(texts...), a)
}

func (c *client) interfaces(ctx context.Context) (all []networkInterface, err error) {
	text, err := c.Metadata.Read(ctx, "instance/network-interfaces/?recursive=true")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("decode the network interfaces of the metadata service: %w", err)
	}
	return all, nil
}
