// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
)

// DaemonPod is a pod of flanneld, also one that does not run.
type DaemonPod struct {
	Name, Node string
	Runs       bool
	Phase      string
	Containers []string // init containers first
	Restarted  []string // those that have run before
}

// Pods returns all pods that FindDaemons has found.
func (d *Daemons) Pods() []DaemonPod {
	pods := make([]DaemonPod, 0, len(d.pods))
	for _, p := range d.pods {
		one := DaemonPod{Name: p.Metadata.Name, Node: p.Spec.NodeName, Runs: p.runs(), Phase: p.Status.Phase}
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			one.Containers = append(one.Containers, c.Name)
		}
		for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
			if s.RestartCount > 0 {
				one.Restarted = append(one.Restarted, s.Name)
			}
		}
		pods = append(pods, one)
	}
	return pods
}

// Log returns at most limit bytes of the log of a container, or of the run before if previous is true.
func (d *Daemons) Log(ctx context.Context, pod, container string, previous bool, limit int) ([]byte, error) {
	q := url.Values{"container": {container}, "timestamps": {"true"}, "tailLines": {"20000"}}
	if previous {
		q.Set("previous", "true")
	}
	return d.read(ctx, request{path: "namespaces/" + url.PathEscape(d.namespace) + "/pods/" + url.PathEscape(pod) + "/log", query: q, accept: "*/*"}, "get pods/log", limit)
}

// List returns the objects of a resource, as JSON, one after the other. It leaves out what is long and says nothing
// about the network: managedFields, and the images of Nodes. With an error it returns the objects before. namespace is
// empty for a resource without one.
func (d *Daemons) List(ctx context.Context, group, namespace, resource string, selection url.Values, limit int) ([]byte, error) {
	path := resource
	if namespace != "" {
		path = "namespaces/" + url.PathEscape(namespace) + "/" + resource
	}

	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	for page, more := "", true; more; more = page != "" {
		q := url.Values{"limit": {podsPage}, "continue": {page}}
		maps.Copy(q, selection)
		text, err := d.read(ctx, request{group: group, path: path, query: q}, "list "+resource, limit)
		if err != nil {
			return out.Bytes(), err
		}
		var found struct {
			Metadata struct{ Continue string }
			Items    []map[string]any
		}
		if err := json.Unmarshal(text, &found); err != nil {
			return out.Bytes(), fmt.Errorf("list %s: %w", resource, err)
		}

		for _, object := range found.Items {
			metadata, _ := object["metadata"].(map[string]any)
			status, _ := object["status"].(map[string]any)
			delete(metadata, "managedFields")
			delete(status, "images")
			if err := encoder.Encode(object); err != nil {
				return out.Bytes(), err
			}
		}
		page = found.Metadata.Continue
	}
	return out.Bytes(), nil
}

// read returns at most limit bytes of an answer. right is the right that the operator needs.
func (d *Daemons) read(ctx context.Context, r request, right string, limit int) ([]byte, error) {
	resp, err := d.client.do(ctx, r)
	if hasCode(err, http.StatusForbidden) {
		return nil, fmt.Errorf("you need the right to %s: %w", right, err)
	}
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, int64(limit)))
	if err != nil {
		err = d.client.explain(err)
	}
	return text, err
}
