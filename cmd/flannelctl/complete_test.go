// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/report/status"
)

// TestCompletesFromTheDaemon checks that the shell completes networks and peers of the daemon, and nothing without one, and
// contexts of the kubeconfig.
func TestCompletesFromTheDaemon(t *testing.T) {
	h := host{socket: filepath.Join(t.TempDir(), "s")}
	complete := func(args, want string) {
		t.Helper()
		out, err := h.run(t, append([]string{"__complete"}, append(strings.Fields(args), "")...)...)
		if got := strings.Join(strings.Fields(out), " "); err != nil || got != strings.TrimSpace(want+" :4") {
			t.Errorf("%s: %v, %q, want %q", args, err, got, want)
		}
	}
	complete("check --peer", "")
	complete("revoke --etcd-endpoints=http://127.0.0.1:1", "")

	contexts := filepath.Join(t.TempDir(), "config")
	t.Setenv("KUBECONFIG", contexts)
	complete("leases --context", "")
	const context = "\n- {name: %s, context: {cluster: c, user: u}}"
	write(t, contexts, "apiVersion: v1\nkind: Config\ncontexts:"+fmt.Sprintf(context+context, "test", "production"))
	complete("leases --context", "production test")
	complete("mesh --kubeconfig-file="+os.DevNull+" --context", "")

	ln, err := net.Listen("unix", h.socket)
	if err != nil {
		t.Fatal(err)
	}
	lease := status.Lease{Subnets: []netip.Prefix{netip.MustParsePrefix("10.5.1.0/24")}, PublicIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	r := status.Report{Peers: []status.Peer{{Lease: lease}}, Networks: []status.NetworkSummary{{Name: "red"}, {Name: "blue"}}}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(r) })}
	t.Cleanup(func() { _ = server.Close() })
	go func() { _ = server.Serve(ln) }()
	complete("check --peer", "10.5.1.0/24 192.0.2.1")
	for _, command := range []string{"status", "check", "doctor", "leases", "config get"} {
		complete(command+" --network", "red blue")
	}
}
