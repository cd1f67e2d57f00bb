// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"cloud.google.com/go/compute/metadata"

	"github.com/flanneld/flanneld/pkg/cloud"
)

// connect returns a client for the instance of this host.
func connect(ctx context.Context, calls *cloud.Calls) (*client, error) {
	c := &client{
		http: &http.Client{Timeout: callTimeout, CheckRedirect: noRedirect}, calls: calls,
		// The variables are those of gcloud.
		compute: cmp.Or(os.Getenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"), "https://compute.googleapis.com/compute/v1/"),
		manager: cmp.Or(os.Getenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER"), "https://cloudresourcemanager.googleapis.com/"),
	}
	for _, value := range []struct {
		path string
		to   *string
	}{{"project/project-id", &c.project}, {"instance/name", &c.instance}, {"instance/zone", &c.zone}} {
		var err error
		if *value.to, err = c.identity.read(ctx, value.path); err != nil {
			return nil, err
		}
	}
	c.number = strings.Split(c.zone+"//", "/")[1] // projects/NUMBER/zones/ZONE
	c.zone = path.Base(c.zone)
	return c, nil
}

// noRedirect makes a redirect an answer: Google sends none, and another server must not get tokens.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// identity is what the metadata service knows about this host. The zero identity is usable.
type identity struct {
	service *metadata.Client
	token   string
	until   time.Time // of token
}

// read returns a value of the metadata service.
func (i *identity) read(ctx context.Context, name string) (string, error) {
	if i.service == nil {
		i.service = metadata.NewClient(&http.Client{Timeout: metadataTimeout, Transport: &http.Transport{}}) // without a proxy
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	text, err := i.service.GetWithContext(ctx, name)
	if _, undefined := errors.AsType[metadata.NotDefinedError](err); undefined {
		return "", err
	}
	if err == nil && strings.TrimSpace(text) == "" {
		err = errors.New("the answer is empty")
	}
	if err != nil {
		return "", fmt.Errorf("%w: read %s from the metadata service of Google Cloud: %s", cloud.ErrUnavailable, name, reason(err))
	}
	return strings.TrimSpace(text), nil
}

// account is the service account of the instance.
const account = "instance/service-accounts/default/"

// bearer returns a token of the service account of the instance.
func (i *identity) bearer(ctx context.Context) (string, error) {
	if i.token != "" && time.Now().Before(i.until) {
		return i.token, nil
	}
	text, err := i.read(ctx, account+"token")
	if err != nil {
		return "", withoutAccount(err)
	}
	var answer struct {
		Token   string `json:"access_token"`
		Seconds int    `json:"expires_in"`
	}
	if json.Unmarshal([]byte(text), &answer) != nil || answer.Token == "" {
		return "", fmt.Errorf("%w: the metadata service has sent no token", cloud.ErrUnavailable)
	}
	// The metadata service replaces a token some minutes before it expires.
	i.token, i.until = answer.Token, time.Now().Add(time.Duration(answer.Seconds)*time.Second-tokenReserve)
	return i.token, nil
}

// withoutAccount explains the error about metadata of the service account that do not exist.
func withoutAccount(err error) error {
	if _, undefined := errors.AsType[metadata.NotDefinedError](err); undefined {
		return errors.New("the instance has no service account: attach one, and give it the permissions of " + page)
	}
	return err
}

// checkScopes returns an error if the instance has no access scope for the Compute API.
func (i *identity) checkScopes(ctx context.Context) error {
	text, err := i.read(ctx, account+"scopes")
	if err != nil {
		return withoutAccount(err)
	}
	for scope := range strings.FieldsSeq(text) {
		if slices.Contains(scopes(), scope) {
			return nil
		}
	}
	return &cloud.MissingError{Permissions: scopes()[:1], Page: page}
}

// scopes returns the access scopes of which the instance needs one.
func scopes() []string {
	return []string{"https://www.googleapis.com/auth/compute", "https://www.googleapis.com/auth/cloud-platform"}
}

// networkInterface is a network interface of the instance.
type networkInterface struct {
	Network string       `json:"network"` // projects/NUMBER/networks/NAME
	IP      string       `json:"ip"`
	IPv6    []string     `json:"ipv6s"`
	Access  []accessItem `json:"accessConfigs"`
}

type accessItem struct {
	IP string `json:"externalIp"`
}

// has reports whether a is an address of the interface.
func (n networkInterface) has(a netip.Addr) bool {
	texts := append([]string{n.IP}, n.IPv6...)
	for _, access := range n.Access {
		texts = append(texts, access.IP)
	}
	return slices.ContainsFunc(texts, func(text string) bool {
		own, err := netip.ParseAddr(text)
		return err == nil && own == a
	})
}

// interfaces returns the network interfaces of the instance.
func (i *identity) interfaces(ctx context.Context) (all []networkInterface, err error) {
	text, err := i.read(ctx, "instance/network-interfaces/?recursive=true")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("decode the network interfaces of the metadata service: %w", err)
	}
	return all, nil
}

// reason returns the text of the innermost error: that of package net/http begins with the URL.
func reason(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}
