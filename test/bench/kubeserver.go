// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/must"
)

// kubeServer is a client of the lab's API server that can write Nodes like those of the benchmark.
type kubeServer struct{ *figures.Kube }

func kubeName(i int) string { return fmt.Sprintf("ip-10-128-%05d.eu-central-1.compute.internal", i) }

// kubeNode returns a Node as in a busy cluster, with about 19 kB of images, labels,
// conditions, and the fields that the cloud and the kubelet add.
func kubeNode(p peer) map[string]any {
	var conditions []any
	for _, kind := range []string{"MemoryPressure", "DiskPressure", "PIDPressure", "Ready"} {
		conditions = append(conditions, kubeCondition(kind, time.Now()))
	}

	labels := map[string]string{}
	annotations := map[string]string{
		"flannel.alpha.coreos.com/kube-subnet-manager": "true", "flannel.alpha.coreos.com/backend-type": "vxlan",
		"flannel.alpha.coreos.com/public-ip":    p.ip.String(),
		"flannel.alpha.coreos.com/backend-data": fmt.Sprintf(`{"VNI":1,"VtepMAC":%q}`, net.HardwareAddr(p.mac[:]).String()),
		"node.alpha.kubernetes.io/ttl":          "300", "volumes.kubernetes.io/controller-managed-attach-detach": "true",
		"csi.volume.kubernetes.io/nodeid": fmt.Sprintf(`{"ebs.csi.aws.com":"i-%017x","efs.csi.aws.com":"i-%017x"}`, p.i, p.i),
	}

	for i := range 24 {
		labels[fmt.Sprintf("topology.example.com/some-label-%d", i)] = fmt.Sprintf("value-%d-%d", i, p.i%50)
	}
	quantities := map[string]string{"cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "200Gi", "hugepages-1Gi": "0", "hugepages-2Mi": "0"}
	var volumes []string
	for i := range 20 {
		volumes = append(volumes, fmt.Sprintf("kubernetes.io/csi/ebs.csi.aws.com^vol-%017x", p.i*100+i))
	}
	return map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": kubeName(p.i), "labels": labels, "annotations": annotations},
		"spec": map[string]any{
			"podCIDR": p.subnet, "podCIDRs": []any{p.subnet}, "providerID": fmt.Sprintf("aws:///eu-central-1a/i-%017x", p.i),
		},
		"status": map[string]any{
			"images": figures.NodeImages(p.i), "conditions": conditions, "capacity": quantities, "allocatable": quantities, "volumesInUse": volumes,
			"addresses": []any{map[string]any{"type": "InternalIP", "address": p.ip}, map[string]any{"type": "Hostname", "address": kubeName(p.i)}},
			"nodeInfo": map[string]any{
				"machineID": fmt.Sprintf("%032x", p.i), "systemUUID": fmt.Sprintf("%032x", p.i), "bootID": fmt.Sprintf("%032x", p.i),
				"kernelVersion": "6.1.0-56-cloud-amd64", "osImage": "Debian GNU/Linux 12 (bookworm)", "containerRuntimeVersion": "containerd://2.1.4",
				"kubeletVersion": "v1.37.2", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64",
			},
		},
	}
}

func kubeCondition(kind string, at time.Time) map[string]any {
	return map[string]any{
		"type": kind, "status": "False", "reason": "KubeletHasSufficient" + kind, "message": "kubelet has sufficient of what " + kind + " is about",
		"lastHeartbeatTime": at.UTC().Format(time.RFC3339), "lastTransitionTime": "2026-01-01T00:00:00Z",
	}
}

func (s *kubeServer) addNode(ctx context.Context, p peer) {
	s.Do(ctx, figures.AdminToken, http.MethodPost, figures.NodesPath, figures.JSON, kubeNode(p))
}

func (s *kubeServer) removeNode(ctx context.Context, p peer) {
	s.Do(ctx, figures.AdminToken, http.MethodDelete, figures.NodesPath+"/"+kubeName(p.i), figures.JSON, map[string]any{})
}

func (s *kubeServer) heartbeat(ctx context.Context, p peer) {
	s.Do(ctx, figures.AdminToken, http.MethodPatch, figures.NodesPath+"/"+kubeName(p.i)+"/status", "application/strategic-merge-patch+json",
		map[string]any{"status": map[string]any{"conditions": []any{kubeCondition("Ready", time.Now())}}})
}

// heartbeats updates the status of Nodes in turn, as their kubelets do, kubeRate times a second until the time lasting
// is over, and waits for a second until all have seen that. It returns the number of updates.
func (s *kubeServer) heartbeats(ctx context.Context, peers []peer, lasting time.Duration) (n float64) {
	tick := time.NewTicker(time.Second / kubeRate)
	defer tick.Stop()
	group, running := errgroup.WithContext(ctx)
	group.SetLimit(32)
	for end := time.Now().Add(lasting); time.Now().Before(end) && running.Err() == nil; n++ {
		<-tick.C
		p := peers[(int(n)*37)%len(peers)]
		group.Go(func() error { return must.Catch(func() { s.heartbeat(ctx, p) }) })
	}
	must.Do(group.Wait())
	pause(ctx, time.Second)
	return n
}
