// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

// kubeToken is the bearer token of the administrator.
const kubeToken = "bench-token"

// kubeServer is a client of the lab's API server.
type kubeServer struct {
	dir, addr string
	api       *lab.APIServer // nil in the process of a bare watch
	client    *http.Client
}

// startKube starts the lab's API server and waits until it answers. The returned client
// connects from inside host 2 and disables compression. The caller closes it.
func (b *bed) startKube(ctx context.Context, binary string) (s *kubeServer, err error) {
	if binary, err = filepath.Abs(binary); err != nil {
		return nil, err
	}
	s = &kubeServer{}
	if s.dir, err = os.MkdirTemp("", "bench-kube-"); err != nil {
		return nil, err
	}
	s.api, err = b.lab.StartAPIServer(ctx, lab.APIServerOptions{
		Path: binary, Tokens: []string{kubeToken + ",admin,admin,system:masters"},
		Args: []string{"--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000"},
	})
	if err != nil {
		_ = os.RemoveAll(s.dir)
		return nil, err
	}
	s.addr = s.api.Addr(nil).String()
	transport := s.api.Transport(b.lab.Host(2).Namespace)
	transport.DisableCompression = true
	transport.MaxIdleConnsPerHost = 100
	s.client = &http.Client{Transport: transport}
	return s, nil
}

func (s *kubeServer) close() {
	s.api.Kill()
	_ = os.RemoveAll(s.dir)
}

// request sends a request. kind is the media type that a GET accepts, or that of the body
// of another request. A status of 300 or more is an error. The caller closes the body of
// the response.
func (s *kubeServer) request(ctx context.Context, method, path, kind string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "https://"+s.addr+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+kubeToken)
	if method == http.MethodGet && kind != "" {
		req.Header.Set("Accept", kind)
	} else if kind != "" {
		req.Header.Set("Content-Type", kind)
	}

	resp, err := s.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return nil, fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text)
	}
	return resp, nil
}

func (s *kubeServer) do(ctx context.Context, method, path, kind string, body []byte) ([]byte, error) {
	resp, err := s.request(ctx, method, path, kind, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

func kubeName(i int) string { return fmt.Sprintf("ip-10-128-%05d.eu-central-1.compute.internal", i) }

// kubeNode returns a Node as in a busy cluster, with about 19 kB of images, labels,
// conditions, and the fields that the cloud and the kubelet add.
func kubeNode(p peer) ([]byte, error) {
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
	return json.Marshal(map[string]any{
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
	})
}

func kubeCondition(kind string, at time.Time) map[string]any {
	return map[string]any{
		"type": kind, "status": "False", "reason": "KubeletHasSufficient" + kind, "message": "kubelet has sufficient of what " + kind + " is about",
		"lastHeartbeatTime": at.UTC().Format(time.RFC3339), "lastTransitionTime": "2026-01-01T00:00:00Z",
	}
}

const nodesPath = "/api/v1/nodes"

// fill creates the Nodes of the peers, and the Node own of host 1.
func (s *kubeServer) fill(ctx context.Context, peers []peer, own []byte) error {
	if _, err := s.do(ctx, http.MethodPost, nodesPath, "application/json", own); err != nil {
		return err
	}
	return figures.Each(0, len(peers), func(i int) error { return s.addNode(ctx, peers[i]) })
}

func (s *kubeServer) addNode(ctx context.Context, p peer) error {
	body, err := kubeNode(p)
	if err == nil {
		_, err = s.do(ctx, http.MethodPost, nodesPath, "application/json", body)
	}
	return err
}

func (s *kubeServer) removeNode(ctx context.Context, p peer) error {
	_, err := s.do(ctx, http.MethodDelete, nodesPath+"/"+kubeName(p.i), "", nil)
	return err
}

// heartbeat updates the status of a Node as a kubelet does at least every few minutes.
func (s *kubeServer) heartbeat(ctx context.Context, p peer) error {
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{kubeCondition("Ready", time.Now())}}})
	if err == nil {
		_, err = s.do(ctx, http.MethodPatch, nodesPath+"/"+kubeName(p.i)+"/status", "application/strategic-merge-patch+json", body)
	}
	return err
}

// heartbeats updates the status of Nodes in turn, as their kubelets do, at the given rate
// per second, until the time lasting is over. It returns the number of updates, or an
// error if one of them fails.
func (s *kubeServer) heartbeats(ctx context.Context, peers []peer, rate int, lasting time.Duration) (n int, err error) {
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	end := time.Now().Add(lasting)
	slots := make(chan error, 32)
	for range cap(slots) {
		slots <- nil
	}

	for time.Now().Before(end) {
		select {
		case <-ctx.Done():
			return n, context.Cause(ctx)
		case <-tick.C:
		}
		if err := <-slots; err != nil {
			return n, err
		}
		p := peers[(n*37)%len(peers)]
		n++
		go func() { slots <- s.heartbeat(ctx, p) }()
	}

	for range cap(slots) {
		err = errors.Join(err, <-slots)
	}
	return n, err
}

// kubeconfig writes the file with which a daemon connects to the API server, and returns
// its path.
func (s *kubeServer) kubeconfig() (string, error) {
	text, err := s.api.Kubeconfig(kubeToken)
	if err != nil {
		return "", err
	}
	path := filepath.Join(s.dir, "kubeconfig")
	return path, os.WriteFile(path, text, 0o600)
}
