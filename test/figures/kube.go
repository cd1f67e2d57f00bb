// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"

	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// APIServerPath is the path of the Kubernetes API server.
const APIServerPath = "bin/tools/kube-apiserver"

// AdminToken is the bearer token of the administrator. His requests do not wait in the queues of API
// Priority and Fairness.
const AdminToken = "admin"

// NodesPath is the path of all Nodes.
const NodesPath = "/api/v1/nodes"

// Media types of requests.
const (
	JSON       = "application/json"
	MergePatch = "application/merge-patch+json"
)

// Kube is a client of a Kubernetes API server.
type Kube struct {
	Addr   string
	Client *http.Client
	API    *lab.APIServer // nil if another process has started the server
	dir    string
}

// StartKube starts the lab's API server and waits until it answers. The client connects from inside n.
// The files Kubeconfig and NetConfig let daemons use the given token and network configuration. The caller
// closes the Kube.
func StartKube(ctx context.Context, l *lab.Lab, n *lab.Namespace, token, network string, o lab.APIServerOptions) *Kube {
	o.Path = must.Get(filepath.Abs(o.Path))
	o.Tokens = append(o.Tokens, AdminToken+",admin,admin,system:masters")
	k := &Kube{API: must.Get(l.StartAPIServer(ctx, o)), dir: must.Get(os.MkdirTemp("", "kube-"))}
	k.Addr = k.API.Addr(nil).String()
	transport := k.API.Transport(n)
	transport.DisableCompression = true
	transport.MaxIdleConnsPerHost = 100
	k.Client = &http.Client{Transport: transport}
	must.Do(os.WriteFile(k.Kubeconfig(), must.Get(k.API.Kubeconfig(token)), 0o600))
	must.Do(os.WriteFile(k.NetConfig(), []byte(network), 0o600))
	return k
}

// Kubeconfig returns the path of the file with which a daemon connects to the API server.
func (k *Kube) Kubeconfig() string { return filepath.Join(k.dir, "kubeconfig") }

// NetConfig returns the path of the file with the network configuration.
func (k *Kube) NetConfig() string { return filepath.Join(k.dir, "net-conf.json") }

// Close ends the API server and removes the files.
func (k *Kube) Close() {
	k.API.Kill()
	_ = os.RemoveAll(k.dir)
}

// Request sends a request. kind is the media type that a GET accepts, or that of the body
// of another request. A status of 300 or more ends the measurement. The caller closes the body of
// the response.
func (k *Kube) Request(ctx context.Context, token, method, path, kind string, body []byte) *http.Response {
	req := must.Get(http.NewRequestWithContext(ctx, method, "https://"+k.Addr+path, bytes.NewReader(body)))
	req.Header.Set("Authorization", "Bearer "+token)
	if method == http.MethodGet {
		req.Header.Set("Accept", kind)
	} else {
		req.Header.Set("Content-Type", kind)
	}

	resp := must.Get(k.Client.Do(req))
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		must.Do(fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text))
	}
	return resp
}

// Do sends a request like Request, with body as JSON unless it is nil, and returns the body of the response.
func (k *Kube) Do(ctx context.Context, token, method, path, kind string, body any) []byte {
	var text []byte
	if body != nil {
		text = must.Get(json.Marshal(body))
	}
	resp := k.Request(ctx, token, method, path, kind, text)
	defer resp.Body.Close()
	return must.Get(io.ReadAll(resp.Body))
}
