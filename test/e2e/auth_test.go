// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/test/lab"
)

// TestTLS checks that daemons connect to etcd with TLS, with and without client certificates.
// A daemon with a wrong CA file or without its certificate must log the reason and retry.
func TestTLS(t *testing.T) {
	t.Parallel()
	t.Run("without client certificates", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 3, Etcd: lab.EtcdOptions{TLS: true}}, `{"Type":"vxlan"}`)
		if l.Etcd().TLSFiles().ClientCert != "" {
			t.Fatal("etcd asks for client certificates, want none")
		}
		for _, h := range l.Hosts()[:2] {
			startOne(t, h, lab.FlanneldOptions{})
			if _, err := h.AddPod(testContext(t), ""); err != nil {
				t.Fatal(err)
			}
		}
		expectMatrix(t, l)
		expectRefused(t, l.Host(3), lab.FlanneldOptions{Args: []string{"--etcd-cafile=" + otherCA(t)}}, "signed by unknown authority")
		expectReconnects(t, l.Host(3))
	})
	t.Run("client certificate", func(t *testing.T) {
		t.Parallel()
		l := newLab(t, lab.Config{Hosts: 3, Etcd: lab.EtcdOptions{TLS: true, ClientCerts: true}}, `{"Type":"vxlan"}`)
		for _, h := range l.Hosts()[:2] {
			startOne(t, h, lab.FlanneldOptions{})
			if _, err := h.AddPod(testContext(t), ""); err != nil {
				t.Fatal(err)
			}
		}
		expectMatrix(t, l)
		expectRefused(t, l.Host(3), lab.FlanneldOptions{Args: []string{"--etcd-certfile=", "--etcd-keyfile="}}, "tls: certificate required")
		expectReconnects(t, l.Host(3))
	})
}

// expectRefused starts a daemon that etcd refuses, and returns the daemon. It waits until the
// log contains the reason, which is the parameter why, and then five seconds more. After that
// the daemon must still run and not be ready, and exactly one line of the log must contain the
// reason, as the error of "etcd is not usable". The log must have at most five lines. Two lines
// may say that etcd is not usable, because etcd may close a connection before the daemon has
// read the reason.
func expectRefused(t *testing.T, h *lab.Host, o lab.FlanneldOptions, why string) *lab.Daemon {
	t.Helper()
	d := start(t, h, o)
	expectLog(t, d, why)
	pause(t, 5*time.Second)
	lines := linesWith(d, "etcd is not usable, retrying")
	if len(lines) > 2 || !strings.Contains(strings.Join(lines, "\n"), why) {
		t.Errorf("%d lines say that etcd is not usable, want at most 2, one of them with %q: %q", len(lines), why, lines)
	}
	expectOnce(t, d, why)
	if status, body, err := d.Get(testContext(t), "/readyz"); status != http.StatusServiceUnavailable {
		t.Errorf("/readyz: %d %q, %v, want %d", status, body, err, http.StatusServiceUnavailable)
	}
	if n := strings.Count(d.Log(), "\n"); n > 5 {
		t.Errorf("the log has %d lines, want at most 5", n)
	}
	if err := d.Ended(); err != nil {
		t.Error(err)
	}
	return d
}

// expectReconnects waits until programs on h have opened another TCP connection. A daemon that etcd
// refuses by TLS opens one whenever it tries again.
func expectReconnects(t *testing.T, h *lab.Host) {
	t.Helper()
	opened := func() string {
		out, err := h.Exec(testContext(t), "nstat", "-asz", "TcpActiveOpens")
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	before := opened()
	eventually(t, h.Name()+" connects again", func() error {
		if opened() == before {
			return errors.New(before)
		}
		return nil
	})
}

// otherCA writes the certificate of an authority that has signed no certificate of the lab,
// and returns the path of the file.
func otherCA(t *testing.T) string {
	t.Helper()
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	path := filepath.Join(t.TempDir(), "other.crt")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// requireLogin switches etcd's authentication on and returns a client that is logged in as
// root. users maps user names to passwords. Each of these users may read and write all keys
// below the lab's prefix.
func requireLogin(t *testing.T, l *lab.Lab, users map[string]string) *clientv3.Client {
	t.Helper()
	const rootPassword, role = "toor", "flannel"
	c, ctx := etcdClient(t, l), testContext(t)
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.RoleAdd(ctx, role))
	dir := lab.Prefix + "/"
	must(c.RoleGrantPermission(ctx, role, dir, clientv3.GetPrefixRangeEnd(dir), clientv3.PermissionType(clientv3.PermReadWrite)))
	for name, password := range users {
		must(c.UserAdd(ctx, name, password))
		must(c.UserGrantRole(ctx, name, role))
	}
	must(c.RoleAdd(ctx, "root"))
	must(c.UserAdd(ctx, "root", rootPassword))
	must(c.UserGrantRole(ctx, "root", "root"))
	must(c.AuthEnable(ctx))
	root, err := l.Etcd().Client(ctx, func(cfg *clientv3.Config) { cfg.Username, cfg.Password = "root", rootPassword })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	return root
}

// TestUserAndPassword checks that daemons log in to etcd with a user and a password, that a
// daemon with a wrong password recovers when etcd gets this password for its user, and that
// all daemons log in again after a restart of etcd. No log may contain a password.
func TestUserAndPassword(t *testing.T) {
	t.Parallel()
	const password, wrong = "correct-horse", "battery-staple"
	l := newLab(t, lab.Config{}, `{"Type":"vxlan"}`)
	root := requireLogin(t, l, map[string]string{"flannel": password, "late": password})
	for h, o := range map[*lab.Host]lab.FlanneldOptions{
		l.Host(1): {Args: []string{"--etcd-username=flannel", "--etcd-password=" + password}},
		l.Host(2): {Env: []string{"FLANNELD_ETCD_USERNAME=flannel", "FLANNELD_ETCD_PASSWORD=" + password}},
	} {
		startOne(t, h, o)
		if _, err := h.AddPod(testContext(t), ""); err != nil {
			t.Fatal(err)
		}
	}
	expectMatrix(t, l)
	for _, h := range l.Hosts()[:2] { // flannelctl has the password from the daemon, which has it from its arguments or environment
		out, err := h.Exec(testContext(t), "env", "-i", built("flannelctl"), "leases")
		if lines := strings.Count(string(out), "\n"); err != nil || lines != 3 || strings.Contains(string(out), password) {
			t.Errorf("flannelctl leases on %s: %v: %s, want two leases", h.Name(), err, out)
		}
		expectSysdump(t, h, password)
	}

	late := expectRefused(t, l.Host(3), lab.FlanneldOptions{
		Args: []string{"--etcd-username=late"}, Env: []string{"FLANNELD_ETCD_PASSWORD=" + wrong},
	}, "invalid user ID or password")
	if _, err := root.UserChangePassword(testContext(t), "late", wrong); err != nil {
		t.Fatal(err)
	}
	expectReady(t, late)

	// etcd forgets its tokens when it restarts, so all daemons must log in again.
	if err := l.Etcd().Restart(testContext(t)); err != nil {
		t.Fatal(err)
	}
	const mac = "02:00:00:00:00:aa"
	putKey(t, root, subnets+"10.5.200.0-24", vxlanLease("192.168.77.200", mac))
	for _, h := range l.Hosts() {
		expectKernel(t, h, datapathLines("10.5.200.0/24", "192.168.77.200", mac), nil)
		for _, secret := range []string{password, wrong} {
			if lines := linesWith(h.Daemon(), secret); len(lines) > 0 {
				t.Errorf("%s logs a password: %q", h.Name(), lines)
			}
		}
		if n := strings.Count(h.Daemon().Log(), "\n"); n >= 20 {
			t.Errorf("%s logged %d lines, want fewer than 20", h.Name(), n)
		}
	}
}

// TestNoRights checks that a daemon logs the reason once if its user may log in, but has no
// right to read, and recovers when the user gets the rights.
func TestNoRights(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	root := requireLogin(t, l, nil)
	if _, err := root.UserAdd(testContext(t), "norights", "secret-without-rights"); err != nil {
		t.Fatal(err)
	}
	refused := expectRefused(t, l.Host(1), lab.FlanneldOptions{
		Args: []string{"--etcd-username=norights", "--etcd-password=secret-without-rights"},
	}, "permission denied")
	if _, err := root.UserGrantRole(testContext(t), "norights", "flannel"); err != nil {
		t.Fatal(err)
	}
	expectReady(t, refused)
}

// TestProxyOfTheEnvironment starts daemons with a proxy in their environment, which gRPC uses even for an
// address next door. The log must name the variables, and NO_PROXY must help.
func TestProxyOfTheEnvironment(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, backendConfig("vxlan"))
	h := l.Host(1)
	env := []string{"HTTPS_PROXY=http://user:secret@192.168.77.254:9"}
	d := start(t, h, lab.FlanneldOptions{Env: env})
	expectLog(t, d, "through the proxy http://user:xxxxx@192.168.77.254:9 of HTTPS_PROXY; is 192.168.77.254:2379 missing in NO_PROXY?")
	expectStop(t, d)
	startOne(t, h, lab.FlanneldOptions{Env: append(env, "NO_PROXY=192.168.77.0/24")})
}

// expectSysdump checks that the archive of a host has what its daemon and its kernel say, and no secret.
func expectSysdump(t *testing.T, h *lab.Host, secret string) {
	t.Helper()
	shell(t, h.Namespace, "tc qdisc add dev flannel.1 clsact && tc filter add dev flannel.1 egress bpf da bytecode '1,6 0 0 4294967295'")
	file := filepath.Join(t.TempDir(), "host.tar.gz")
	out, err := h.Exec(testContext(t), "sh", "-c", "env -i PATH="+os.Getenv("PATH")+" "+built("flannelctl")+" sysdump --file="+file+" >&2 && tar -xzO -f "+file)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{
		"ready, version", "main.main()", "flannel_ready 1", "etcd-password=[redacted]", "flannel.1 type vxlan", "SUBNET  ", `"Type":"vxlan"`, "mac ", " table 254 ", "net/ipv4/ip_forward = 1",
		"dev flannel.1 clsact handle ffff:0 ", "dev flannel.1 egress protocol 0x3 priority 49152 handle 0x1 bpf program ",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%s: no %q in the archive", h.Name(), want)
		}
	}
	if strings.Contains(string(out), secret) {
		t.Errorf("%s: a password is in the archive", h.Name())
	}
}
