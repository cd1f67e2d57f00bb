// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/version"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/wire"
)

// Entry is one Node as an operator looks at it.
type Entry struct {
	Lease subnet.Lease
	Err   error // why it is no lease (which then has a Key alone), or why it lacks a family
}

// Entries lists the leases of all Nodes that flannel manages, by name of the Node.
// Of cfg it needs what says how to reach the API server, and the annotation prefix.
func Entries(ctx context.Context, cfg Config) ([]Entry, error) {
	p, err := AnnotationPrefix(cmp.Or(cfg.AnnotationPrefix, DefaultAnnotationPrefix))
	if err != nil {
		return nil, fmt.Errorf("annotation prefix %q: %w", cfg.AnnotationPrefix, err)
	}
	c, err := operatorClient(cfg)
	if err != nil {
		return nil, err
	}
	defer c.renew()
	k := newKeys(p)
	v := &view{keys: k, entries: map[string]*entry{}}
	_, err = c.list(ctx, k.newDecoder(), query{}, func(n *wire.Node) { v.take(n, true, &view{}) })
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	var all []Entry
	for _, e := range v.entries {
		switch {
		case e.lease != nil:
			all = append(all, Entry{*e.lease, e.partly})
		case e.notes[managed].text == "true" && e.cidrs == nil:
			all = append(all, Entry{subnet.Lease{Key: e.name}, errNoPodCIDR})
		case !errors.Is(e.err, errNotManaged):
			all = append(all, Entry{subnet.Lease{Key: e.name}, e.err})
		}
	}
	slices.SortFunc(all, func(a, b Entry) int { return cmp.Compare(a.Lease.Key, b.Lease.Key) })
	return all, nil
}

func operatorClient(cfg Config) (*client, error) {
	rc, err := restConfig(cfg.APIURL, cfg.Kubeconfig)
	if err != nil {
		return nil, err
	}
	return newClient(rc, "flannelctl/"+version.Version)
}

// onlooker is the own Node of a program that only reads. No Node can have this name.
const onlooker = "-"

// Watch calls sink with the leases of all Nodes that flannel manages, and again
// after every change, until ctx ends. It waits for an API server that is away.
// Of cfg it needs what Entries does.
func Watch(ctx context.Context, cfg Config, sink func(subnet.Update)) error {
	cfg.NodeName = onlooker
	m, err := New(cfg)
	if err != nil {
		return err
	}
	return oneline.Join(m.Watch(ctx, sink), m.Close())
}

// netConf is the key of a ConfigMap under which the network configuration is, as
// the known flannel's manifests have it.
const netConf = "net-conf.json"

// NetConfig returns the network configuration in a ConfigMap as it stands there.
// Without one it returns subnet.ErrNoConfig, wrapped.
func NetConfig(ctx context.Context, cfg Config, namespace, name string) ([]byte, error) {
	c, err := operatorClient(cfg)
	if err != nil {
		return nil, err
	}
	defer c.renew()
	body, err := c.call(ctx, configMapTimeout, request{
		path: "namespaces/" + url.PathEscape(namespace) + "/configmaps/" + url.PathEscape(name), accept: acceptJSON,
	})
	var found struct{ Data map[string]string }
	if err == nil {
		err = json.Unmarshal(body, &found)
	}
	if err != nil {
		return nil, fmt.Errorf("read ConfigMap %s/%s: %w", namespace, name, err)
	}
	text, ok := found.Data[netConf]
	if !ok {
		return nil, fmt.Errorf("%w: ConfigMap %s/%s has no %s", subnet.ErrNoConfig, namespace, name, netConf)
	}
	return []byte(text), nil
}

const configMapTimeout = 10 * time.Second
