// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/homedir"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/version"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// Entries lists the leases of all Nodes that flannel manages, sorted by the name of the Node. It
// also lists those of these Nodes that have no lease, with the reason: the Node has no podCIDRs
// yet, or its podCIDRs or annotations cannot be used. It uses only AnnotationPrefix of cfg
// and what locates the API server.
func Entries(ctx context.Context, cfg Config) ([]subnet.Entry, error) {
	k, err := cfg.keys()
	if err != nil {
		return nil, err
	}
	c, err := operatorClient(cfg)
	if err != nil {
		return nil, err
	}
	defer c.renew()
	cache := &nodeCache{keys: k, entries: map[string]*entry{}}
	_, err = c.list(ctx, wire.NewDecoder(k[:], ""), query{}, func(n *wire.Node) { cache.put(n, true, &nodeCache{}) })
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	var all []subnet.Entry
	for _, e := range cache.entries {
		switch {
		case e.lease != nil:
			all = append(all, subnet.Entry{Lease: *e.lease, Err: e.partialErr})
		case e.needsRequest():
			all = append(all, subnet.Entry{Lease: subnet.Lease{Key: e.name}, Err: errNoPodCIDR})
		case !errors.Is(e.err, annotation.ErrNotManaged):
			all = append(all, subnet.Entry{Lease: subnet.Lease{Key: e.name}, Err: e.err})
		}
	}
	slices.SortFunc(all, func(a, b subnet.Entry) int { return cmp.Compare(a.Lease.Key, b.Lease.Key) })
	return all, nil
}

func operatorClient(cfg Config) (*client, error) {
	cfg.operator = true
	rc, err := restConfig(cfg)
	if err != nil {
		return nil, err
	}
	return newClient(rc, "flannelctl/"+version.Version)
}

// Find returns the name of the place where the functions in this file find the API server if a Config names
// none. If there is none, missing says what each place lacks.
func Find() (name string, missing []string) {
	if os.Getenv(clientcmd.RecommendedConfigPathEnvVar) != "" {
		return clientcmd.RecommendedConfigPathEnvVar, nil
	}

	missing = append(missing, clientcmd.RecommendedConfigPathEnvVar+" is not set")
	_, err := os.Stat(homeConfig())
	if err == nil {
		return homeConfig(), nil
	}
	missing = append(missing, homeConfig()+" does not exist")
	if _, err = rest.InClusterConfig(); err == nil {
		return "the service account of this pod", nil
	}
	return "", append(missing, "this is no pod with a service account")
}

// Contexts returns the names of the contexts in a kubeconfig, sorted, and none if it cannot be read. If its
// path is empty, it is the one that Find finds.
func Contexts(path string) []string {
	config, err := operatorRules(Config{Kubeconfig: path}).Load()
	if err != nil {
		return nil
	}
	return slices.Sorted(maps.Keys(config.Contexts))
}

// homeConfig returns the path of the kubeconfig in the user's home.
func homeConfig() string {
	return filepath.Join(homedir.HomeDir(), clientcmd.RecommendedHomeDir, clientcmd.RecommendedFileName)
}

// rights are what a daemon does with Nodes.
var rights = [][2]string{{"list", "nodes"}, {"watch", "nodes"}, {"patch", "nodes/status"}}

// Missing returns the rights of a daemon that the API server does not grant to the user of cfg, such as "list
// nodes".
func Missing(ctx context.Context, cfg Config) (missing []string, err error) {
	c, err := operatorClient(cfg)
	if err != nil {
		return nil, err
	}
	defer c.renew()

	for _, r := range rights {
		resource, sub, _ := strings.Cut(r[1], "/")
		var review struct{ Status struct{ Allowed bool } }
		err := c.create(ctx, configMapTimeout, request{group: "authorization.k8s.io", path: "selfsubjectaccessreviews"}, map[string]any{
			"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
			"spec": map[string]any{"resourceAttributes": map[string]string{"verb": r[0], "resource": resource, "subresource": sub}},
		}, &review)
		if err != nil {
			return nil, fmt.Errorf("ask for the right to %s %s: %w", r[0], r[1], err)
		}
		if !review.Status.Allowed {
			missing = append(missing, r[0]+" "+r[1])
		}
	}
	return missing, nil
}

// WithoutPodCIDR returns the names of the Nodes to which the cluster has given no podCIDR.
func WithoutPodCIDR(ctx context.Context, cfg Config) (names []string, err error) {
	c, err := operatorClient(cfg)
	if err != nil {
		return nil, err
	}
	defer c.renew()
	_, err = c.list(ctx, wire.NewDecoder(nil, ""), query{}, func(n *wire.Node) {
		if len(n.PodCIDR) == 0 && len(n.PodCIDRs) == 0 {
			names = append(names, string(n.Name))
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return names, nil
}

// readerName stands for the name of this host's Node in a program that has none. No Node can have it.
const readerName = "-"

// Watch calls sink with the leases of all Nodes that flannel manages, and again
// after every change, until ctx ends. It waits for an API server that is unavailable. It uses the
// same fields of cfg as Entries.
func Watch(ctx context.Context, cfg Config, sink func(subnet.Update)) error {
	cfg.NodeName = readerName
	cfg.operator = true
	m, err := New(cfg)
	if err != nil {
		return err
	}
	return oneline.Join(m.Watch(ctx, sink), m.Close())
}

// netConf is the key of the network configuration in a ConfigMap, as in flannel's manifests.
const netConf = "net-conf.json"

// NetConfig returns the text of the network configuration in a ConfigMap. It returns
// subnet.ErrNoConfig, wrapped, if the ConfigMap exists and does not contain one.
func NetConfig(ctx context.Context, cfg Config, namespace, name string) ([]byte, error) {
	c, err := operatorClient(cfg)
	if err != nil {
		return nil, err
	}
	defer c.renew()
	var found struct{ Data map[string]string }
	r := request{path: "namespaces/" + url.PathEscape(namespace) + "/configmaps/" + url.PathEscape(name)}
	if err := c.callJSON(ctx, configMapTimeout, r, &found); err != nil {
		return nil, fmt.Errorf("read ConfigMap %s/%s: %w", namespace, name, err)
	}
	text, ok := found.Data[netConf]
	if !ok {
		return nil, fmt.Errorf("%w: ConfigMap %s/%s has no %s", subnet.ErrNoConfig, namespace, name, netConf)
	}
	return []byte(text), nil
}

const configMapTimeout = 10 * time.Second
