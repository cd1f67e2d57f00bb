// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

const (
	podsPage    = "200" // a pod takes about 10 kB in JSON
	podsTimeout = 20 * time.Second
)

// Daemons knows the pods of flanneld in a cluster. An operator reaches them through the API server,
// and needs the right to list pods and to get pods/proxy.
type Daemons struct {
	client    *client
	namespace string
	pods      map[string]string // names of the pods, by name of the Node
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
	d := &Daemons{client: c, namespace: namespace, pods: map[string]string{}}
	for page, more := "", true; more; more = page != "" {
		if page, err = d.list(ctx, selector, page); err != nil {
			d.Close()
			return nil, fmt.Errorf("list pods with the label %s in namespace %s: %w", selector, namespace, err)
		}
	}
	return d, nil
}

// list reads one page of pods, and adds those that run to d.pods. page is the token of that page,
// and empty for the first one. next is the token of the next page, and empty if there is none.
func (d *Daemons) list(ctx context.Context, selector, page string) (next string, err error) {
	var found struct {
		Metadata struct{ Continue string }
		Items    []struct {
			Metadata struct{ Name, DeletionTimestamp string }
			Spec     struct{ NodeName string }
			Status   struct{ Phase string }
		}
	}
	err = d.client.callJSON(ctx, podsTimeout, request{
		path:  "namespaces/" + url.PathEscape(d.namespace) + "/pods",
		query: url.Values{"labelSelector": {selector}, "limit": {podsPage}, "continue": {page}},
	}, &found)
	if err != nil {
		return "", err
	}

	for _, pod := range found.Items {
		// During an update a Node may have an old pod, which is being ended, and the new one.
		// Evicted pods stay in the list for a long time.
		if pod.Metadata.DeletionTimestamp == "" && pod.Status.Phase == "Running" {
			d.pods[pod.Spec.NodeName] = pod.Metadata.Name
		}
	}
	return found.Metadata.Continue, nil
}

// Get requests path from the HTTP server of the daemon on a Node, which listens on port. It returns
// an error if FindDaemons has found no running pod there. The caller must read the answer before
// ctx ends, and close it.
func (d *Daemons) Get(ctx context.Context, node string, port int, path string, query url.Values) (io.ReadCloser, error) {
	pod, ok := d.pods[node]
	if !ok {
		return nil, fmt.Errorf("there is no running pod of flanneld on it in namespace %s", d.namespace)
	}
	resp, err := d.client.do(ctx, request{
		path:  "namespaces/" + url.PathEscape(d.namespace) + "/pods/" + url.PathEscape(pod+":"+strconv.Itoa(port)) + "/proxy/" + path,
		query: query, accept: acceptJSON,
	})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Close closes the connections.
func (d *Daemons) Close() { d.client.renew() }
