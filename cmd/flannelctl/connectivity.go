// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/mesh"
	"github.com/flanneld/flanneld/subnet/kube"
)

// connectivityFlags are the flags of connectivity test.
type connectivityFlags struct {
	clusterFlags
	store    storeFlags
	image    string
	progress io.Writer
}

// The roles of the pods.
const (
	targetRole = "target" // answers
	probeRole  = "probe"  // sends to all targets; created when their addresses are known
)

const (
	// servicePort is the TCP port of the Service and of its pods.
	servicePort = 8286
	// askPods is the time between two questions for the state of pods.
	askPods = 500 * time.Millisecond
	// probeTime limits the time that a probe takes for each checkAtOnce targets that do not answer.
	probeTime = 15 * time.Second
)

func newConnectivityCommand(h host) *cobra.Command {
	f := connectivityFlags{store: storeFlags{host: h}}
	var out output
	test := &cobra.Command{
		Use: "test", Short: "Let pods on all Nodes reach each other, and show who reaches whom", Args: cobra.NoArgs,
		Long: `Creates pods on every Node on which flanneld runs, beside flanneld's pods and from the same
image, in the network of pods. Each sends small and full-size packets to its gateway and to
all others, and connects to a Service. A row of the matrix is what one of them reaches.
At the end all is deleted; after a kill, kubectl delete pods,services -l
app=flannel-connectivity does that. You need the rights to list, create and deletecollection pods, to
get pods/log, and to create and delete services, in the namespace of flanneld's pods. The
exit code is 1 if a path is broken, and 2 if nothing can be tested.`,
		Example: "  flannelctl connectivity test\n  flannelctl connectivity test --context production -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.progress = cmd.ErrOrStderr()
			c, err := f.test(cmd.Context())
			if err != nil {
				return err
			}
			return c.print(cmd.OutOrStdout(), out)
		},
	}

	f.store.addKubeTo(test)
	out.addTo(test, "wide")
	f.addTo(test, time.Minute, "time that pods may take to start")
	test.Flags().StringVar(&f.image, "image", "", "image of the pods (default that of flanneld's pods)")

	cmd := &cobra.Command{Use: "connectivity", Short: "Test the network of pods in Kubernetes", Example: test.Example}
	cmd.AddCommand(test)
	return cmd
}

// connectivity is the result of a test.
type connectivity struct {
	matrix   *mesh.Matrix
	near     []nodeReach // from each pod to its gateway, and to the other pod on its Node
	services []nodeReach
}

// nodeReach is what the pod on a Node reaches.
type nodeReach struct {
	Node string `json:"node"`
	reach
}

// test creates the pods, waits for their results, and deletes them, even if ctx ends.
func (f *connectivityFlags) test(ctx context.Context) (c connectivity, err error) {
	o, err := f.store.options()
	if err != nil {
		return c, err
	}
	if !o.KubeSubnetMgr {
		return c, fmt.Errorf("%w: this command is for Kubernetes: name the cluster with --kubeconfig-file or --context", errCannotAsk)
	}
	t, err := kube.NewTestPods(ctx, o.kubeConfig(), f.namespace, f.selector, f.image)
	if err != nil {
		return c, interrupted(ctx, fmt.Errorf("%w: %w", errCannotAsk, err))
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), podTimeout)
		defer cancel()
		err = oneline.Join(interrupted(ctx, err), t.Close(closing))
	}()

	addrs, err := t.AddService(ctx, targetRole, servicePort)
	if err == nil {
		err = t.Add(ctx, targetRole, t.Nodes, "probe", fmt.Sprintf("--listen=%d", servicePort))
	}
	if err != nil {
		return c, fmt.Errorf("%w: %w", errCannotAsk, err)
	}
	targets, err := f.await(ctx, t, targetRole, t.Nodes, f.timeout, func(p kube.TestPod) bool { return p.Phase == "Running" && len(p.IPs) > 0 })
	if err != nil {
		return c, err
	}

	args := []string{"probe", "gateway"}
	for _, p := range targets {
		args = append(args, oneline.Strings(p.IPs)...)
	}
	var services []string
	for _, a := range addrs {
		services = append(services, netip.AddrPortFrom(a, servicePort).String())
	}
	nodes := slices.Collect(maps.Keys(targets))
	if err := t.Add(ctx, probeRole, nodes, append(args, services...)...); err != nil {
		return c, fmt.Errorf("%w: %w", errCannotAsk, err)
	}
	limit := f.timeout + probeTime*time.Duration(1+len(args)/checkAtOnce)
	probes, err := f.await(ctx, t, probeRole, nodes, limit, func(p kube.TestPod) bool { return p.Phase == "Succeeded" || p.Phase == "Failed" })
	if err != nil {
		return c, err
	}

	hosts := make([]mesh.Host, 0, len(t.Nodes))
	for _, node := range t.Nodes {
		hosts = append(hosts, mesh.Host{Key: node, Name: node, PublicIPs: targets[node].IPs})
	}
	c.matrix = mesh.New(hosts)
	for i, h := range c.matrix.Hosts {
		if results, err := resultsOf(ctx, t, probes, h.Key); err != nil {
			c.matrix.Fail(i, err)
		} else {
			c.add(i, results, services)
		}
	}
	return c, nil
}

// await waits until all pods with a role are done, or until the limit is over. It returns the pods that exist then
// and are done, by Node. If there is none, it returns why.
func (f *connectivityFlags) await(ctx context.Context, t *kube.TestPods, role string, nodes []string, limit time.Duration, done func(kube.TestPod) bool) (map[string]kube.TestPod, error) {
	end := time.Now().Add(limit)
	for known := -1; ; {
		pods, err := t.Pods(ctx, role)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errCannotAsk, err)
		}
		state := pods[nodes[0]].State
		maps.DeleteFunc(pods, func(_ string, p kube.TestPod) bool { return !done(p) })
		if len(pods) != known {
			known = len(pods)
			fmt.Fprintf(f.progress, "%d of %d pods that are a %s are done\n", known, len(nodes), role)
		}
		switch {
		case len(pods) == len(nodes), time.Now().After(end) && len(pods) > 0:
			return pods, nil
		case time.Now().After(end):
			return nil, fmt.Errorf("%w: no pod is ready within %s; on %s: %s", errCannotAsk, limit, nodes[0], cmp.Or(state, "there is none"))
		}
		if err := wait.For(ctx, askPods); err != nil {
			return nil, err
		}
	}
}

// resultsOf returns what the probe on a Node has printed.
func resultsOf(ctx context.Context, t *kube.TestPods, probes map[string]kube.TestPod, node string) (results []reach, err error) {
	p, ok := probes[node]
	if !ok {
		return nil, errors.New("its pod did not start, or has no result in time: kubectl describe node, flannelctl doctor there")
	}
	text, err := t.Log(ctx, p.Name)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &results); err != nil {
		return nil, fmt.Errorf("its pod has printed %s", mesh.Printable(string(text)))
	}
	return results, nil
}

// add records the results of host i.
func (c *connectivity) add(i int, results []reach, services []string) {
	owners := map[string]string{}
	for _, h := range c.matrix.Hosts {
		for _, ip := range h.PublicIPs {
			owners[ip.String()] = h.Key
		}
	}

	node := c.matrix.Hosts[i].Key
	var list []paths.Result
	for _, r := range results {
		owner := owners[r.To]
		switch {
		case slices.Contains(services, r.To):
			c.services = append(c.services, nodeReach{node, r})
		case owner == "" || owner == node:
			c.near = append(c.near, nodeReach{node, r})
		default:
			list = append(list, paths.Result{Peer: owner, Verdict: r.Verdict})
		}
	}

	c.matrix.Set(i, list)
}

// print shows the result, and returns an error that names the half of the way that is broken, if one is.
func (c connectivity) print(w io.Writer, out output) error {
	var err error
	if wide := out.format == "wide"; wide || out.format == "table" {
		err = errors.Join(c.matrix.Text(w, wide), printReach(w, "same Node", c.near), printReach(w, "service", c.services))
	} else {
		err = out.print(w, struct {
			mesh.Data
			SameNode []nodeReach `json:"sameNode"`
			Services []nodeReach `json:"services"`
		}{c.matrix.Data(), c.near, c.services}, nil)
	}
	if err != nil {
		return err
	}

	s := c.matrix.Summary()
	near := failed(c.near)
	services := failed(c.services)
	switch {
	case len(s.Silent) == len(c.matrix.Hosts):
		return fmt.Errorf("%w: nothing is known from any Node: %s: %s", errCannotAsk, c.matrix.Hosts[0], c.matrix.Problem(0))
	case near > 0:
		return fmt.Errorf("%d of %d ways of pods within their Node are broken, and %d of %d paths between Nodes", near, len(c.near), s.Broken, s.OK+s.Broken)
	case s.Broken > 0:
		return fmt.Errorf("%d of %d paths between Nodes are broken; all gateways answer", s.Broken, s.OK+s.Broken)
	case services > 0:
		return fmt.Errorf("%d of %d connections to the Service failed; all pods answer", services, len(c.services))
	case len(s.Silent) > 0:
		return fmt.Errorf("nothing is known from %d of %d Nodes", len(s.Silent), len(c.matrix.Hosts))
	}
	return nil
}

// failed returns the number of results that are not in order.
func failed(all []nodeReach) (n int) {
	for _, r := range all {
		if !r.OK {
			n++
		}
	}
	return n
}

func printReach(w io.Writer, name string, all []nodeReach) error {
	_, err := fmt.Fprintf(w, "%s: %d of %d ok\n", name, len(all)-failed(all), len(all))
	for _, r := range all {
		if !r.OK {
			fmt.Fprintf(w, "%s -> %s: %s: %s\n", r.Node, r.To, r.Broken, r.Advice)
		}
	}
	return err
}
