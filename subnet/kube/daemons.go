// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"time"
)

const (
	podsPage    = "200" // a pod takes about 10 kB in JSON
	podsTimeout = 20 * time.Second
)

// Daemons knows the pods of flanneld in a cluster. An operator reaches them through the API server,
// and needs the right to list pods and, for Get, to get pods/proxy.
type Daemons struct {
	client    *client
	namespace string
	pods      []podObject
}

// FindDaemons lists the running pods with the labels of selector. It uses only what locates the API server in cfg. The
// caller must Close the result.
func FindDaemons(ctx context.Context, cfg Config, namespace, selector string) (*Daemons, error) {
	c, err := operatorClient(cfg)
	if err != nil {
		return nil, err
	}

	// A pod can answer with a redirect. The client would send the operator's token there.
	c.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	pods, err := listPods(ctx, c, namespace, selector)
	if err != nil {
		c.renew()
		return nil, err
	}
	return &Daemons{client: c, namespace: namespace, pods: pods}, nil
}

// podObject is the part of a pod that this package reads.
type podObject struct {
	Metadata struct{ Name, DeletionTimestamp string }
	Spec     struct {
		NodeName         string
		InitContainers   []container
		Containers       []container
		ImagePullSecrets []struct {
			Name string `json:"name"`
		}
	}
	Status struct {
		Phase                                    string
		PodIPs                                   []struct{ IP netip.Addr }
		InitContainerStatuses, ContainerStatuses []containerStatus
	}
}

type container struct{ Name, Image string }

type containerStatus struct {
	Name         string
	RestartCount int
	State        struct {
		Waiting struct{ Reason, Message string }
	}
}

// runs reports whether the pod runs. During an update a Node may have an old pod, which is being ended, and the new
// one. Evicted pods stay in the list for a long time.
func (p podObject) runs() bool {
	return p.Metadata.DeletionTimestamp == "" && p.Status.Phase == "Running"
}

// listPods lists the pods with the labels of selector, page by page.
func listPods(ctx context.Context, c *client, namespace, selector string) (pods []podObject, err error) {
	for page, more := "", true; more; more = page != "" {
		var found struct {
			Metadata struct{ Continue string }
			Items    []podObject
		}
		err := c.callJSON(ctx, podsTimeout, request{
			path:  "namespaces/" + url.PathEscape(namespace) + "/pods",
			query: url.Values{"labelSelector": {selector}, "limit": {podsPage}, "continue": {page}},
		}, &found)
		if err != nil {
			return nil, fmt.Errorf("list pods with the label %s in namespace %s: %w", selector, namespace, err)
		}
		pods = append(pods, found.Items...)
		page = found.Metadata.Continue
	}
	return pods, nil
}

// Get requests path from the HTTP server of the daemon on a Node, which listens on port. It returns
// an error if FindDaemons has found no running pod there. The caller must read the answer before
// ctx ends, and close it.
func (d *Daemons) Get(ctx context.Context, node string, port int, path string, query url.Values) (io.ReadCloser, error) {
	i := slices.IndexFunc(d.pods, func(p podObject) bool { return p.runs() && p.Spec.NodeName == node })
	if i < 0 {
		return nil, fmt.Errorf("there is no running pod of flanneld on it in namespace %s", d.namespace)
	}
	target := d.pods[i].Metadata.Name + ":" + strconv.Itoa(port)
	resp, err := d.client.do(ctx, request{
		path:  "namespaces/" + url.PathEscape(d.namespace) + "/pods/" + url.PathEscape(target) + "/proxy/" + path,
		query: query,
	})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Close closes the connections.
func (d *Daemons) Close() { d.client.renew() }
