package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// kubeToken is the administrator's.
const kubeToken = "bench-token"

// kubeServer is a real API server on the lab's router, with the lab's etcd
// behind it.
type kubeServer struct {
	dir, addr string
	proc      *exec.Cmd
	exited    chan struct{}
	client    *http.Client
}

// startKube starts the API server and waits until it serves.
func (b *bed) startKube(ctx context.Context, binary string) (s *kubeServer, err error) {
	binary, err = filepath.Abs(binary)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(b.lab.Host(1).EtcdEndpoint())
	if err != nil {
		return nil, err
	}
	s = &kubeServer{addr: net.JoinHostPort(u.Hostname(), "6443"), exited: make(chan struct{})}
	if s.dir, err = os.MkdirTemp("", "bench-kube-"); err != nil {
		return nil, err
	}
	key := filepath.Join(s.dir, "sa.key")
	if out, err := exec.CommandContext(ctx, "openssl", "genrsa", "-out", key, "2048").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("make key: %w: %s", err, out)
	}
	tokens := filepath.Join(s.dir, "tokens.csv")
	if err := os.WriteFile(tokens, []byte(kubeToken+",admin,admin,system:masters\n"), 0o600); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(s.dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	s.proc = exec.Command(binary,
		"--etcd-servers="+b.lab.Etcd().Endpoints()[0], "--bind-address=0.0.0.0", "--advertise-address="+u.Hostname(), "--secure-port=6443",
		"--cert-dir="+filepath.Join(s.dir, "certs"), "--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+key,
		"--service-account-signing-key-file="+key, "--authorization-mode=RBAC", "--token-auth-file="+tokens,
		"--endpoint-reconciler-type=none", "--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000",
	)
	s.proc.Stdout, s.proc.Stderr = log, log
	if err := b.lab.Underlay().Start(s.proc); err != nil {
		return nil, fmt.Errorf("start API server: %w", err)
	}
	go func() {
		_ = s.proc.Wait()
		close(s.exited)
	}()
	s.client = &http.Client{Transport: s.transport(b)}
	for {
		if _, err := s.do(ctx, http.MethodGet, "/readyz", "", nil); err == nil {
			return s, nil
		}
		select {
		case <-s.exited:
			text, _ := os.ReadFile(log.Name())
			return nil, fmt.Errorf("API server ended: %s", text[max(0, len(text)-500):])
		default:
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			s.close()
			return nil, err
		}
	}
}

// transport reaches the server from the network of host 2, uncompressed.
func (s *kubeServer) transport(b *bed) *http.Transport {
	return &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // a self-signed certificate in the lab
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return b.lab.Host(2).Dial(ctx, network, s.addr)
		},
		ForceAttemptHTTP2: true, DisableCompression: true, MaxIdleConnsPerHost: 100,
	}
}

func (s *kubeServer) close() {
	_ = s.proc.Process.Kill()
	<-s.exited
	_ = os.RemoveAll(s.dir)
}

// request sends a request; the caller closes the answer's body.
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

// kubeNode is a Node as a busy cluster has them, of about 19 kB: images, labels,
// conditions, what cloud and kubelet add.
func kubeNode(p peer) ([]byte, error) {
	var images []any
	for i := range 50 {
		repository := fmt.Sprintf("registry.example.com/team-%d/some-service-with-a-name-%d", i%7, i)
		images = append(images, map[string]any{
			"names":     []string{fmt.Sprintf("%s@sha256:%064x", repository, p.i*100+i), fmt.Sprintf("%s:v1.%d.%d", repository, i, p.i%10)},
			"sizeBytes": 100_000_000 + i,
		})
	}
	var conditions []any
	for _, kind := range []string{"MemoryPressure", "DiskPressure", "PIDPressure", "Ready"} {
		conditions = append(conditions, kubeCondition(kind, time.Now()))
	}
	labels, annotations := map[string]string{}, map[string]string{
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
			"images": images, "conditions": conditions, "capacity": quantities, "allocatable": quantities, "volumesInUse": volumes,
			"addresses": []any{map[string]any{"type": "InternalIP", "address": p.ip}, map[string]any{"type": "Hostname", "address": kubeName(p.i)}},
			"nodeInfo": map[string]any{
				"machineID": fmt.Sprintf("%032x", p.i), "systemUUID": fmt.Sprintf("%032x", p.i), "bootID": fmt.Sprintf("%032x", p.i),
				"kernelVersion": "6.1.0-56-cloud-amd64", "osImage": "Debian GNU/Linux 12 (bookworm)", "containerRuntimeVersion": "containerd://2.1.4",
				"kubeletVersion": "v1.36.3", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64",
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

// fill makes the Nodes of the peers, and one for host 1.
func (s *kubeServer) fill(ctx context.Context, peers []peer, own []byte) error {
	if _, err := s.do(ctx, http.MethodPost, nodesPath, "application/json", own); err != nil {
		return err
	}
	return each(peers, func(p peer) error { return s.addNode(ctx, p) })
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

// each calls f for all peers, some at a time.
func each(peers []peer, f func(peer) error) error {
	const workers = 16
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		wg.Go(func() {
			for i := w; i < len(peers) && errs[w] == nil; i += workers {
				errs[w] = f(peers[i])
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// heartbeat is what a kubelet does to its Node every few minutes at least.
func (s *kubeServer) heartbeat(ctx context.Context, p peer) error {
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{kubeCondition("Ready", time.Now())}}})
	if err == nil {
		_, err = s.do(ctx, http.MethodPatch, nodesPath+"/"+kubeName(p.i)+"/status", "application/strategic-merge-patch+json", body)
	}
	return err
}

// heartbeats makes them at that rate a second, and returns how many there were.
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

// kubeconfig writes a file by which a daemon reaches the server.
func (s *kubeServer) kubeconfig() (string, error) {
	path := filepath.Join(s.dir, "kubeconfig")
	text := strings.NewReplacer("SERVER", s.addr, "TOKEN", kubeToken).Replace(`{"apiVersion":"v1","kind":"Config","current-context":"c",
"clusters":[{"name":"c","cluster":{"server":"https://SERVER","insecure-skip-tls-verify":true}}],
"users":[{"name":"u","user":{"token":"TOKEN"}}],"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}]}`)
	return path, os.WriteFile(path, []byte(text), 0o600)
}
