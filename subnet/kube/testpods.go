// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// TestPods are the pods and the Service of a test, beside flanneld's pods. An operator needs the rights to list, create
// and deletecollection pods, to get pods/log, and to create and delete services.
type TestPods struct {
	Nodes []string // those with a running pod of flanneld

	client    *client
	namespace string
	image     string
	secrets   any // imagePullSecrets of flanneld's pods
	name      string
}

// TestPod is a pod of a test.
type TestPod struct {
	Name  string
	Phase string
	IPs   []netip.Addr
	State string // why it does not run, or its phase
}

const (
	createAtOnce = 16
	// testLife is the time after which kubelet ends the pods of a test that could not delete them.
	testLife = 10 * time.Minute
)

// NewTestPods finds the Nodes on which flanneld runs, and its image unless the caller names one. It creates nothing. The
// caller must Close the result.
func NewTestPods(ctx context.Context, cfg Config, namespace, selector, image string) (*TestPods, error) {
	d, err := FindDaemons(ctx, cfg, namespace, selector)
	if err != nil {
		return nil, err
	}
	t := &TestPods{client: d.client, namespace: namespace, image: image}
	t.name = "flannel-connectivity-" + strings.ToLower(rand.Text()[:8])
	for _, p := range d.pods {
		if !p.runs() {
			continue
		}
		t.Nodes = append(t.Nodes, p.Spec.NodeName)
		t.secrets = p.Spec.ImagePullSecrets
		for _, container := range p.Spec.Containers {
			if image == "" && container.Name == "kube-flannel" {
				t.image = container.Image
			}
		}
	}

	slices.Sort(t.Nodes)
	t.Nodes = slices.Compact(t.Nodes)
	switch {
	case len(t.Nodes) == 0:
		err = fmt.Errorf("no pod with the label %s runs in namespace %s", selector, namespace)
	case t.image == "":
		err = errors.New("flanneld's pods have no container kube-flannel: name the image with --image")
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return t, nil
}

func (t *TestPods) labels(role string) map[string]string {
	labels := map[string]string{"app": "flannel-connectivity", "flannel-connectivity": t.name}
	if role != "" {
		labels["role"] = role
	}
	return labels
}

func (t *TestPods) selector(role string) string {
	s := "flannel-connectivity=" + t.name
	if role != "" {
		s += ",role=" + role
	}
	return s
}

// create creates an object and decodes the answer.
func (t *TestPods) create(ctx context.Context, kind string, metadata, spec, answer any) error {
	r := request{path: "namespaces/" + url.PathEscape(t.namespace) + "/" + strings.ToLower(kind) + "s"}
	err := t.client.create(ctx, podsTimeout, r, map[string]any{"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}, answer)
	if err != nil {
		return fmt.Errorf("create a %s: %w", kind, err)
	}
	return nil
}

// AddService creates a Service for a TCP port of the pods with a role, in all families of the cluster, and returns its
// addresses.
func (t *TestPods) AddService(ctx context.Context, role string, port int) ([]netip.Addr, error) {
	var service struct {
		Spec struct{ ClusterIPs []netip.Addr }
	}
	err := t.create(ctx, "Service", map[string]any{"name": t.name, "labels": t.labels("")}, map[string]any{
		"selector": t.labels(role), "ipFamilyPolicy": "PreferDualStack", "ports": []any{map[string]any{"port": port}},
	}, &service)
	return service.Spec.ClusterIPs, err
}

// Add creates a pod with a role on each of the Nodes, in the network of pods. It runs flannelctl with args.
func (t *TestPods) Add(ctx context.Context, role string, nodes []string, args ...string) error {
	var group errgroup.Group
	group.SetLimit(createAtOnce)
	for _, node := range nodes {
		group.Go(func() error {
			return t.create(ctx, "Pod", map[string]any{"generateName": t.name + "-", "labels": t.labels(role)}, map[string]any{
				"nodeName": node, "restartPolicy": "Never", "automountServiceAccountToken": false, "enableServiceLinks": false,
				"activeDeadlineSeconds": int(testLife.Seconds()), "terminationGracePeriodSeconds": 1,
				"tolerations": []any{map[string]any{"operator": "Exists"}}, "imagePullSecrets": t.secrets,
				"securityContext": map[string]any{"seccompProfile": map[string]any{"type": "RuntimeDefault"}},
				"containers": []any{map[string]any{
					"name": "flannelctl", "image": t.image, "command": append([]string{"/opt/bin/flannelctl"}, args...),
					"securityContext": map[string]any{
						"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
						"capabilities": map[string]any{"drop": []string{"ALL"}, "add": []string{"NET_RAW"}},
					},
				}},
			}, &struct{}{})
		})
	}
	return group.Wait()
}

// Pods returns the pods with a role, by Node.
func (t *TestPods) Pods(ctx context.Context, role string) (map[string]TestPod, error) {
	found, err := listPods(ctx, t.client, t.namespace, t.selector(role))
	if err != nil {
		return nil, err
	}
	pods := map[string]TestPod{}
	for _, p := range found {
		one := TestPod{Name: p.Metadata.Name, Phase: p.Status.Phase, State: p.Status.Phase}
		for _, ip := range p.Status.PodIPs {
			one.IPs = append(one.IPs, ip.IP)
		}
		for _, c := range p.Status.ContainerStatuses {
			if w := c.State.Waiting; w.Reason != "" {
				one.State = oneline.Collapse(w.Reason + " " + w.Message)
			}
		}
		pods[p.Spec.NodeName] = one
	}
	return pods, nil
}

// Log returns what a pod has printed.
func (t *TestPods) Log(ctx context.Context, pod string) ([]byte, error) {
	return t.client.call(ctx, podsTimeout, request{
		path: "namespaces/" + url.PathEscape(t.namespace) + "/pods/" + url.PathEscape(pod) + "/log", accept: "*/*",
	})
}

// Close deletes what the test has created.
func (t *TestPods) Close(ctx context.Context) error {
	defer t.client.renew()
	base := "namespaces/" + url.PathEscape(t.namespace)
	_, err := t.client.call(ctx, podsTimeout, request{
		method: http.MethodDelete, path: base + "/pods", query: url.Values{"labelSelector": {t.selector("")}},
	})
	_, failed := t.client.call(ctx, podsTimeout, request{method: http.MethodDelete, path: base + "/services/" + t.name})
	if hasCode(failed, http.StatusNotFound) {
		failed = nil
	}
	if err = oneline.Join(err, failed); err != nil {
		return fmt.Errorf("delete the pods and the Service with the label %s: %w", t.selector(""), err)
	}
	return nil
}
