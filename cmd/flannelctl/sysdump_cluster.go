// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube"
)

// maxFiles limits the size in bytes of all files of one host's archive: a host must not fill the disk of an operator.
const maxFiles = 16 * maxPart

// dumpFlags are the flags of sysdump cluster.
type dumpFlags struct {
	clusterFlags
	store storeFlags
	file  string
}

func newClusterDumpCommand(h host) *cobra.Command {
	f := dumpFlags{store: storeFlags{host: h}}
	cmd := &cobra.Command{
		Use: "cluster", Short: "Write one archive for a cluster of Kubernetes, with that of each host", Args: cobra.NoArgs,
		Long: `Writes a tar.gz with what only the API server knows: flannel's DaemonSet, ConfigMap, Events
and pods with their logs, also those before a restart, and the Nodes. It runs flannelctl
sysdump in the pod of every Node, in 8 at a time, and adds the files of each. A part that cannot be
collected is named with the reason, and the rest is collected all the same. You need the rights to list
nodes; events in the namespace default; in that of flanneld's pods to list pods, daemonsets, configmaps and
events, to get pods/log, and to get and create pods/exec. Secrets are taken out as in the archive of a host.`,
		Example: "  flannelctl sysdump cluster\n  flannelctl sysdump cluster --context=production --file=/tmp/production.tar.gz",
		RunE:    func(cmd *cobra.Command, _ []string) error { return f.dump(cmd) },
	}

	f.store.addKubeTo(cmd)
	cmd.Flags().StringVar(&f.file, "file", "", "path of the archive, - for standard output (default flannel-sysdump-cluster-TIME.tar.gz)")
	f.addTo(cmd, 2*time.Minute, "time that a pod may take")
	return cmd
}

func (f *dumpFlags) dump(cmd *cobra.Command) error {
	o, err := f.store.options()
	if err != nil {
		return err
	}
	if !o.KubeSubnetMgr {
		return errors.New("this command is for Kubernetes: name the cluster with --kubeconfig-file or --context")
	}
	d, err := kube.FindDaemons(cmd.Context(), o.kubeConfig(), f.namespace, f.selector)
	if err != nil {
		return err
	}
	defer d.Close()
	if len(d.Pods()) == 0 {
		return fmt.Errorf("there is no pod with the label %s in namespace %s", f.selector, f.namespace)
	}

	incomplete, report, err := writeDump(cmd, f.file, "cluster", func(ctx context.Context, a *archive) ([]missing, error) {
		a.secrets = &scrubber{known: map[string]bool{}}
		specs, rest := f.objects(d)
		for i, p := range specs {
			text, err := p.collect(ctx)
			a.secrets.learn(string(text))
			specs[i].collect = func(context.Context) ([]byte, error) { return text, err }
		}
		return a.collect(ctx, f.timeout, slices.Concat(specs, rest, f.hosts(d, a)))
	})
	for _, line := range summary(incomplete) {
		fmt.Fprintln(report, "incomplete: "+line)
	}
	return err
}

// objects returns the parts of the API server. Those of specs can have secrets, which may also be in all others.
func (f *dumpFlags) objects(d *kube.Daemons) (specs, rest []part) {
	list := func(name, group, namespace, resource string, selection url.Values) part {
		return part{"cluster/" + name + ".json", func(ctx context.Context) ([]byte, error) {
			return d.List(ctx, group, namespace, resource, selection, maxPart)
		}}
	}

	labels := url.Values{"labelSelector": {f.selector}}
	specs = []part{
		list("daemonsets", "apps", f.namespace, "daemonsets", labels),
		list("configmaps", "", f.namespace, "configmaps", labels),
		list("pods", "", f.namespace, "pods", labels),
	}
	rest = []part{
		list("nodes", "", "", "nodes", nil),
		list("events", "", f.namespace, "events", nil),
		list("events-of-nodes", "", "default", "events", url.Values{"fieldSelector": {"involvedObject.kind=Node"}}), // also flanneld's
	}
	return specs, rest
}

// hosts returns the parts that come from the pods: of each, its archive and its logs.
func (f *dumpFlags) hosts(d *kube.Daemons, a *archive) (parts []part) {
	pods := d.Pods()
	runs := map[string]bool{} // by Node
	for _, p := range pods {
		runs[p.Node] = runs[p.Node] || p.Runs
	}

	for _, p := range pods {
		folder := "hosts/" + p.Node + "/"
		if p.Runs || !runs[p.Node] {
			parts = append(parts, part{folder + p.Name + "/sysdump.txt", func(ctx context.Context) ([]byte, error) {
				if !p.Runs {
					return nil, fmt.Errorf("the pod %s does not run: it is %s", p.Name, p.Phase)
				}
				packed, err := d.Exec(ctx, p.Name, "kube-flannel", maxPart, "flannelctl", "sysdump", "--file=-")
				n, failed := a.addFiles(folder, packed)
				if err == nil {
					err = failed
				} else {
					err = reasonOfPod(err, p.Name)
				}
				return fmt.Appendf(nil, "%d files\n", n), err
			}})
		}
		log := func(container string, previous bool, suffix string) {
			parts = append(parts, part{folder + p.Name + "/" + container + suffix, func(ctx context.Context) ([]byte, error) {
				return d.Log(ctx, p.Name, container, previous, maxPart)
			}})
		}
		for _, c := range p.Containers {
			log(c, false, ".log")
		}
		for _, c := range p.Restarted {
			log(c, true, "-previous.log")
		}
	}
	return parts
}

// reasonOfPod returns why a pod has sent no archive. It is the same for all pods with the same reason, so that this counts once.
func reasonOfPod(err error, pod string) error {
	text := err.Error()
	// The runtime's message about a missing program has the id of a container.
	if strings.Contains(text, `unknown command "sysdump"`) || strings.Contains(text, "not found in $PATH") {
		return errors.New("the image of the pod has no flannelctl, or an older one without sysdump: only the logs of the pod are here")
	}
	return errors.New(strings.ReplaceAll(text, pod, "POD"))
}

// addFiles adds the files of a host's archive to a folder, and returns their number.
func (a *archive) addFiles(folder string, packed []byte) (n int, err error) {
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return 0, fmt.Errorf("unpack its archive: %w", err)
	}
	for files := tar.NewReader(io.LimitReader(z, maxFiles)); ; n++ {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, fmt.Errorf("unpack its archive: %w", err)
		}
		_, name, _ := strings.Cut(h.Name, "/")
		if !fs.ValidPath(name) || h.Typeflag != tar.TypeReg {
			return n, fmt.Errorf("its archive has the file %q", subnet.Shorten(h.Name))
		}
		text, failed := io.ReadAll(io.LimitReader(files, maxPart))
		if err := errors.Join(a.add(folder+name, text, failed), failed); err != nil {
			return n, err
		}
	}
}

// summary returns a line for each reason, with the files, or the hosts, that are not complete. Of a host only the first
// reason counts: most often it is the reason of all.
func summary(incomplete []missing) (lines []string) {
	var reasons []string
	names := map[string][]string{}
	seen := map[string]bool{}
	for _, m := range incomplete {
		name := m.name
		if host, ok := strings.CutPrefix(name, "hosts/"); ok {
			name, _, _ = strings.Cut(host, "/")
		}
		if seen[name] {
			continue
		}
		seen[name] = true
		reason := oneline.Text(m.err)
		if names[reason] == nil {
			reasons = append(reasons, reason)
		}
		names[reason] = append(names[reason], name)
	}
	for _, reason := range reasons {
		lines = append(lines, oneline.List(names[reason], ", ")+": "+reason)
	}
	return lines
}
