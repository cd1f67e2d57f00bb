// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/flanneld/flanneld/pkg/report/status"
)

// listenAt is the variable that makes this program a daemon that answers nothing on its socket.
const listenAt = "FLANNELCTL_TEST_LISTEN"

func TestMain(m *testing.M) {
	if path := os.Getenv(listenAt); path != "" {
		ln, err := status.Listen(context.Background(), path)
		if err != nil {
			fmt.Fprintln(os.Stdout, err)
			os.Exit(1)
		}
		go func() {
			for conn, err := ln.Accept(); err == nil; conn, err = ln.Accept() {
				_ = conn.Close()
			}
		}()
		fmt.Fprintln(os.Stdout, "listening")
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// fakeDaemon starts a process that listens on the socket of h, with the flags and variables of a daemon.
func fakeDaemon(t *testing.T, h host, unshare uintptr, args, env []string) *os.Process {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append([]string{listenAt + "=" + h.socket}, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unshare}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "listening\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd.Process
}

// emptyHost returns a host whose places, all in dir, are empty.
func emptyHost(t *testing.T) (h host, dir string) {
	t.Helper()
	dir = t.TempDir()
	h = host{socket: filepath.Join(dir, "sock"), settings: filepath.Join(dir, "env"), serviceAccount: filepath.Join(dir, "account")}
	t.Setenv("HOME", dir)
	if err := os.Mkdir(filepath.Join(dir, ".kube"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, e := range os.Environ() {
		if name, _, _ := strings.Cut(e, "="); strings.HasPrefix(name, "FLANNELD_") || strings.HasPrefix(name, "KUBE") {
			t.Setenv(name, "")
		}
	}
	return h, dir
}

func leasesOptions(t *testing.T, h host, args ...string) (storeOptions, error) {
	t.Helper()
	s := storeFlags{host: h}
	cmd := newVersionCommand()
	s.addConfigTo(cmd)
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	return s.options()
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestFindStore checks where flannelctl finds the store. Each place is found although those after it exist.
func TestFindStore(t *testing.T) {
	h, dir := emptyHost(t)
	home := filepath.Join(dir, ".kube/config")
	expect := func(name, endpoint, password string, kubernetes bool, args ...string) {
		t.Helper()
		o, err := leasesOptions(t, h, args...)
		if err != nil || o.name != name || o.EtcdEndpoints[0] != endpoint || o.EtcdPassword.Reveal() != password || o.KubeSubnetMgr != kubernetes {
			t.Errorf("%q: %q, %s, password %q, Kubernetes %v: %v", args, o.name, o.EtcdEndpoints, o.EtcdPassword.Reveal(), o.KubeSubnetMgr, err)
		}
	}
	const usual = "http://127.0.0.1:4001"
	expect("", usual, "", false)
	write(t, home, "")
	expect(home, usual, "", true)
	t.Setenv("KUBECONFIG", "/nowhere")
	expect("KUBECONFIG", usual, "", true)
	write(t, h.settings, "# comment\nFLANNELD_ETCD_ENDPOINTS=http://192.0.2.1:2379\nFLANNELD_ETCD_USERNAME=u\nFLANNELD_ETCD_PASSWORD=\"of settings\"\nFLANNELD_IFACE=eth7\n")
	expect(h.settings, "http://192.0.2.1:2379", "of settings", false)
	p := fakeDaemon(t, h, 0, []string{"--etcd-endpoints=http://192.0.2.2:2379", "-etcd-username", "u", "--iface=eth7"},
		[]string{"FLANNELD_ETCD_PASSWORD=of daemon", "FLANNELD_ETCD_ENDPOINTS=http://192.0.2.3:2379"})
	daemon := fmt.Sprintf("the flanneld of this host (process %d)", p.Pid)
	expect(daemon, "http://192.0.2.2:2379", "of daemon", false)

	// Nothing that was found reaches a store that a flag or variable names.
	expect("", "http://192.0.2.4:2379", "", false, "--etcd-endpoints=http://192.0.2.4:2379")
	expect("", usual, "", true, "--context=c")
	t.Setenv("FLANNELD_ETCD_ENDPOINTS", "http://192.0.2.5:2379")
	expect("", "http://192.0.2.5:2379", "", false)
	t.Setenv("FLANNELD_ETCD_ENDPOINTS", "")

	// Other flags only change what was found.
	o, err := leasesOptions(t, h, "--etcd-prefix=/other")
	if err != nil || o.name != daemon || o.EtcdPrefix != "/other" {
		t.Errorf("%q, %q, %v", o.name, o.EtcdPrefix, err)
	}
	if text := fmt.Sprintf("%+v", o.Options); strings.Contains(text, "of daemon") {
		t.Errorf("the password is in %s", text)
	}
}

// TestNoStoreFound checks that the error names all places.
func TestNoStoreFound(t *testing.T) {
	h, dir := emptyHost(t)
	t.Setenv("FLANNELD_ETCD_PREFIX", "/p") // locates nothing
	expect := func(args []string, want ...string) {
		t.Helper()
		_, err := h.run(t, args...)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v, want one line with %q", args, err, w)
			}
		}
	}
	defaults := "nothing listens on http://127.0.0.1:4001, http://127.0.0.1:2379: name the store with --etcd-endpoints"
	expect([]string{"leases"}, "no flanneld answers on "+dir+"/sock: no such file or directory; "+dir+"/env: no such file or directory; "+
		"KUBECONFIG is not set; "+dir+"/.kube/config does not exist; this is no pod with a service account; "+defaults+", --kubeconfig-file or --context")
	expect([]string{"reservations"}, dir+"/env: no such file or directory; "+defaults)

	// The password has no flag, so an error names its variable.
	expect([]string{"leases", "--etcd-username=u", "--etcd-endpoints=http://192.0.2.2:2379"}, "--etcd-username needs the password in FLANNELD_ETCD_PASSWORD")

	// A process with other flags may have secrets in them.
	fakeDaemon(t, h, 0, []string{"--password=hunter2"}, nil)
	write(t, h.settings, "FLANNELD_IFACE=eth7\n")
	expect([]string{"leases"}, "which listens on "+dir+"/sock, has other flags than flanneld; "+dir+"/env names no store")

	// A place that cannot be read may name another store than the places after it.
	if err := (place{looked: []string{"x: gone"}, denied: fs.ErrPermission}).check(nil, true); !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "x: gone; permission denied: run flannelctl as root") {
		t.Error(err)
	}

	// Commands that are for etcd only do not look for a kubeconfig, and say where the daemon's is from.
	write(t, h.settings, "FLANNELD_KUBE_SUBNET_MGR=true\n")
	expect([]string{"reservations"}, "the store is the Kubernetes API, according to "+h.settings+": this command works on etcd")
}

// TestKernelFindStoreOfPod checks that files of a daemon in a container are found in its file system, and the
// service account of its pod.
func TestKernelFindStoreOfPod(t *testing.T) {
	h, _ := emptyHost(t)
	netConf := filepath.Join(t.TempDir(), "net-conf.json")
	write(t, netConf, "{}")
	p := fakeDaemon(t, h, syscall.CLONE_NEWNS, []string{"--kube-subnet-mgr", "--net-config-path=" + netConf},
		[]string{"KUBERNETES_SERVICE_HOST=fd00::1", "KUBERNETES_SERVICE_PORT=443"})
	o, err := leasesOptions(t, h)
	if err != nil {
		t.Fatal(err)
	}
	root := fmt.Sprintf("/proc/%d/root", p.Pid)
	if c := o.kubeConfig(); c.APIURL != "https://[fd00::1]:443" || c.ServiceAccount != root+h.serviceAccount || o.NetConfigPath != root+netConf {
		t.Errorf("%+v, %s", c, o.NetConfigPath)
	}
}
