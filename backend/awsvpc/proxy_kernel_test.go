// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

// The addresses in the namespace of the test. Go sends no request to a loopback address through a proxy, so the
// services have the addresses that they have in EC2.
const (
	proxyAddress    = "127.0.0.1:3128"
	metadataService = "169.254.169.254:80"
	agentService    = "169.254.170.23:80"
	agentURL        = "http://169.254.170.23/v1/credentials"
	unreachableAPI  = "http://ec2.example"
)

// TestKernelNoSecretsThroughProxy has a proxy for HTTP in the environment. The proxy must get the calls of EC2, but
// neither a request to the metadata service nor one to the agent that gives a container its role: the answers contain
// keys, and the request to the agent contains the token of the pod.
func TestKernelNoSecretsThroughProxy(t *testing.T) {
	const inNamespace = "TEST_IN_NAMESPACE"
	if os.Getenv(inNamespace) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=1m")
		// net/http reads the variables of a proxy once in a process.
		cmd.Env = append(os.Environ(), inNamespace+"=1", "HTTP_PROXY=http://"+proxyAddress, "HTTPS_PROXY=http://"+proxyAddress)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v (this test needs root):\n%s", err, out)
		}
		return
	}
	if out, err := exec.Command("sh", "-ec", "ip link set lo up; ip addr add 169.254.169.254/32 dev lo; ip addr add 169.254.170.23/32 dev lo").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	s := ec2test.New()
	me := s.AddInstance(1, "subnet-1", own4)
	metadata := ec2test.Metadata(me)
	serveAt(t, metadataService, metadata)
	serveAt(t, agentService, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "token-of-the-pod" {
			http.Error(w, "no token", http.StatusUnauthorized)
			return
		}
		_, _ = w.Write(ec2test.Keys())
	}))
	var mu sync.Mutex
	var hosts []string
	serveAt(t, proxyAddress, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		hosts = append(hosts, r.Host)
		mu.Unlock()
		switch r.Host {
		case "169.254.169.254":
			metadata.ServeHTTP(w, r)
		case "169.254.170.23":
			_, _ = w.Write(ec2test.Keys())
		default:
			s.ServeHTTP(w, r)
		}
	}))

	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("token-of-the-pod"), 0o600); err != nil {
		t.Fatal(err)
	}
	become(t, metadata, unreachableAPI)
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")
	t.Setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token)
	for name, agent := range map[string]string{"the role of the instance": "", "the role of the pod": agentURL} {
		t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", agent)
		hosts = nil
		if _, err := bed().Backend(t, `{}`).Cloud.Join(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if slices.Sort(hosts); len(hosts) == 0 || slices.ContainsFunc(hosts, func(h string) bool { return h != "ec2.example" }) {
			t.Errorf("%s: the proxy got requests to %q, want only calls of EC2", name, hosts)
		}
	}
	if i := s.Instance(me.ID); i.Restricted {
		t.Errorf("the calls through the proxy have changed nothing, want the source/dest check of %s off; it has the calls %+v", vpctest.VPC, s.Calls())
	}
}

// serveAt answers HTTP requests to an address until the test ends.
func serveAt(t *testing.T, address string, h http.Handler) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: h} //nolint:gosec // of a test
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
}
