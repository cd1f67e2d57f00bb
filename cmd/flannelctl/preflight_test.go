// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
)

// TestPreflight checks what is said of a host that has no store, and whose health port is taken.
func TestPreflight(t *testing.T) {
	h, dir := emptyHost(t)
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	out, err := h.run(t, "doctor", "--socket="+h.socket, "--preflight", "--", "--healthz-ip=127.0.0.1", "--healthz-port="+port,
		"--subnet-file="+filepath.Join(dir, "subnet.env"), "--state-dir="+dir, "--iface=nonesuch")
	if err == nil || err.Error() != "there are problems" {
		t.Errorf("%v, want that there are problems", err)
	}
	for _, want := range []string{
		"the store cannot be used: no store was found: no flanneld answers on " + dir + "/sock",
		"--healthz-port cannot be used: listen tcp 127.0.0.1:" + port + ": bind: address already in use",
		"there is no external interface: no external interface: --iface nonesuch",
	} {
		if !strings.Contains(out, "PROBLEM   "+want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}

	// The network configuration of Kubernetes exists only in pods.
	if _, err := h.run(t, "interface", "--no-daemon", "--", "--kube-subnet-mgr", "--iface=nonesuch"); err == nil || !strings.Contains(err.Error(), "no interface has this name") {
		t.Errorf("interface for Kubernetes: %v", err)
	}
	if _, err := h.run(t, "doctor", "--socket="+h.socket, "--", "--iface=eth0"); err == nil || !strings.Contains(err.Error(), "need --preflight") {
		t.Errorf("flags of flanneld without --preflight: %v", err)
	}
}
