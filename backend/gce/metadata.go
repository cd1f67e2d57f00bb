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
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/transport"
)

const tokenReserve = time.Minute

// identity asks the metadata service about this host, and keeps the token that it gets there. Only one
// goroutine at a time may use it.
type identity struct {
	*access.Metadata
	token string
	until time.Time // when bearer reads a new token
}

// account is the path of the service account of the instance.
const account = "instance/service-accounts/default/"

// bearer returns a token of the service account of the instance. It is an access.Provider.
func (i *identity) bearer(ctx context.Context) (access.Keys, error) {
	if i.token != "" && time.Now().Before(i.until) {
		return access.Keys{Token: i.token}, nil
	}

	text, err := i.Read(ctx, account+"token")
	if err != nil {
		return access.Keys{}, withoutAccount(err)
	}
	var answer struct {
		Token   string `json:"access_token"`
		Seconds int    `json:"expires_in"`
	}
	if json.Unmarshal([]byte(text), &answer) != nil || answer.Token == "" {
		return access.Keys{}, fmt.Errorf("%w: the metadata service has sent no token", cloud.ErrUnavailable)
	}

	// The metadata service has a new token some minutes before the old one expires.
	i.token = answer.Token
	i.until = time.Now().Add(time.Duration(answer.Seconds)*time.Second - tokenReserve)
	return access.Keys{Token: i.token}, nil
}

// forget makes bearer ask for a new token.
func (i *identity) forget() { i.token = "" }

// withoutAccount says what to do if err means that the instance has no service account.
func withoutAccount(err error) error {
	if errors.Is(err, access.ErrUndefined) {
		return errors.New("the instance has no service account: attach one, and give it the permissions of " + page)
	}
	return err
}

func (i *identity) checkScopes(ctx context.Context) error {
	text, err := i.Read(ctx, account+"scopes")
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
	return slices.Contains(transport.Addresses(texts...), a)
}

func (i *identity) interfaces(ctx context.Context) (all []networkInterface, err error) {
	text, err := i.Read(ctx, "instance/network-interfaces/?recursive=true")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("decode the network interfaces of the metadata service: %w", err)
	}
	return all, nil
}
