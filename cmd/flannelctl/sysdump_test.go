// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/report/status"
)

// unpack returns the files of an archive by name, without the name of its folder.
func unpack(t *testing.T, packed string) map[string]string {
	t.Helper()
	z, err := gzip.NewReader(strings.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for archive := tar.NewReader(z); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		text, err2 := io.ReadAll(archive)
		if err = errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(h.Name, "/")
		files[name] = string(text)
	}
}

// TestSysdump checks that the archive has all parts although no daemon answers properly and no store is reachable, that
// each part says what is missing, and that no file has a secret of this host.
func TestSysdump(t *testing.T) {
	h, dir := emptyHost(t)
	key, account := filepath.Join(dir, "wgkey"), "bound-token-of-the-account"
	write(t, key, "cHJpdmF0ZSBrZXkgb2Ygd2lyZWd1YXJk\n")
	h.serviceAccount = dir
	write(t, filepath.Join(dir, "token"), account)
	write(t, h.settings, "FLANNELD_ETCD_USERNAME=u\nFLANNELD_ETCD_PASSWORD='of settings'\nWIREGUARD_KEY_FILE="+key+"\nHTTPS_PROXY=http://u:proxy-password@192.0.2.9:3128\n")
	other := h
	other.socket = filepath.Join(dir, "other") // the secrets of a daemon with --status-socket must be known, too
	fakeDaemon(t, other, 0, []string{"--etcd-endpoints=http://127.0.0.1:1", "--etcd-username", "u", "--etcd-password", "of-arguments", "--state-dir=" + dir},
		[]string{"ALIBABA_CLOUD_ACCESS_KEY_SECRET=of-environment", "ALIBABA_CLOUD_ACCESS_KEY_ID=id-of-key"})
	packed, err := h.run(t, "sysdump", "--file=-", "--socket="+other.socket)
	if err != nil {
		t.Fatal(err)
	}

	files := unpack(t, packed)
	for name, want := range map[string]string{
		"flannelctl/version.txt": "commit ", "flannelctl/doctor.txt": "PROBLEM", "flannelctl/leases.txt": "(exit code 1)", "flannelctl/status.txt": "(exit code 2)",
		"flannelctl/check.txt": "(exit code 2)", "flannelctl/config.txt": "(exit code 1)", "flannelctl/interface-without-daemon.txt": "INTERFACE",
		"daemon/goroutines.txt": "incomplete: ", "daemon/metrics.txt": "incomplete: ", "daemon/settings.txt": "etcd-password=[redacted]\netcd-username=u",
		"kernel/links.txt": "lo type", "kernel/addresses.txt": "127.0.0.1/8 dev lo", "kernel/routes.txt": "table 255 ", "kernel/rules.txt": "table 254", "kernel/neighbours.txt": "", "kernel/fdb.txt": "",
		"kernel/tc-queues.txt": "dev lo noqueue", "kernel/tc-filters.txt": "", "kernel/bpf.txt": "",
		"kernel/sysctl.txt": "net/ipv4/ip_forward = ", "firewall/nft.txt": "", "firewall/iptables.txt": "These variants of iptables", "logs/flanneld.txt": "",
		"files/proc/version": "Linux", "files" + h.settings: "HTTPS_PROXY=http://[redacted]@192.0.2.9:3128",
	} {
		if text, ok := files[name]; !ok || !strings.Contains(text, want) {
			t.Errorf("%s: %v, no %q in\n%.1000s", name, ok, want, text)
		}
	}
	for name, text := range files {
		for _, secret := range []string{"of settings", "of-arguments", "of-environment", "id-of-key", "cHJpdmF0ZSBrZXkgb2Y", "proxy-password", account} {
			if strings.Contains(text, secret) {
				t.Errorf("%s contains %q", name, secret)
			}
		}
	}
	if bytes.Contains([]byte(packed), []byte("of-arguments")) {
		t.Error("the archive is not packed")
	}
}

// TestSysdumpOfOlderDaemon checks the archive of a host whose daemon is older than flannelctl. The report is that of
// the commit that has introduced reports (4994fcbb), except that its peer is refused, so that check sends nothing.
func TestSysdumpOfOlderDaemon(t *testing.T) {
	report, err := os.ReadFile("testdata/statusz-older.json")
	if err != nil {
		t.Fatal(err)
	}
	report = bytes.Replace(report, []byte(`"in place"`), []byte(`"refused"`), 1)
	h, _ := emptyHost(t)
	ln, err := status.Listen(t.Context(), h.socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/statusz.json", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(report) })
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(ln) }()
	defer server.Close()

	packed, err := h.run(t, "sysdump", "--file=-")
	if err != nil {
		t.Fatal(err)
	}
	files := unpack(t, packed)
	for name, want := range map[string]string{
		"flannelctl/status.txt": "peers       1 refused\n", "flannelctl/check.txt": "refused ", "flannelctl/doctor.txt": "this host refuses the peer 10.5.197.0-24",
		"flannelctl/interface.txt": "flannelctl: this flanneld has chosen eth0 (default route) and is too old to list all: version dev ",
		"daemon/statusz.json":      `"key": "10.5.146.0-24"`, "daemon/goroutines.txt": "incomplete: this flanneld does not serve it",
	} {
		if text := files[name]; !strings.Contains(text, want) {
			t.Errorf("%s: no %q in\n%s", name, want, text)
		}
	}
}

// TestScrub checks each form in which a secret may stand.
func TestScrub(t *testing.T) {
	s := &scrubber{known: map[string]bool{}}
	s.learn(`{"Backend":{"Type":"wireguard","PSK":"cHJlc2hhcmVk+a/w="},"AccessKeySecret": "x-y-z-1"}`)
	s.add("  line of a key file\n")
	for text, want := range map[string]string{
		`"PSK": "cHJlc2hhcmVk+a/w=",`:                                        `"PSK": "[redacted]",`,
		`err="parse {\"PSK\":\"short\",\"VNI\":1}"`:                          `err="parse {\"PSK\":[redacted],\"VNI\":1}"`,
		`a cHJlc2hhcmVk+a/w= and x-y-z-1 line of a key file`:                 `a [redacted] and [redacted] [redacted]`,
		`FLANNELD_ETCD_PASSWORD='with space' X=1`:                            `FLANNELD_ETCD_PASSWORD=[redacted] X=1`,
		`--etcd-password=p --iface=eth0`:                                     `--etcd-password=[redacted] --iface=eth0`,
		`AccessKeyID: LTAI`:                                                  `AccessKeyID: [redacted]`,
		`net/ipv6/conf/all/stable_secret = fd00::1`:                          `net/ipv6/conf/all/stable_secret = [redacted]`,
		`net/ipv4/tcp_fastopen_key = 1-2-3-4`:                                `net/ipv4/tcp_fastopen_key = [redacted]`,
		`get https://u:p%40@w/x@192.0.2.1/ failed`:                           `get https://[redacted]@w/x@192.0.2.1/ failed`,
		`Authorization: Bearer abc.def-1=`:                                   `Authorization: Bearer [redacted]`,
		`it has eyJhbGciOi.eyJzdWIi.c2lnbmF0-dXJl as token`:                  `it has [redacted] as token`,
		"-----BEGIN EC PRIVATE KEY-----\nMHcC\n-----END EC PRIVATE KEY-----": `[redacted]`,
		`{"name":"ETCD_PASSWORD","value":"a \"b\""},{"name":"X"}`:            `{"name":"ETCD_PASSWORD","value":"[redacted]"},{"name":"X"}`,
		`"env":"[{\"name\":\"TOKEN\",\"value\":\"a\"},{}]"`:                  `"env":"[{\"name\":\"TOKEN\",\"value\":[redacted]},{}]"`,
		`["--etcd-password", "p", "--iface"]`:                                `["--etcd-password", "[redacted]", "--iface"]`,
		`"password": "a\"b c", "x": 1`:                                       `"password": "[redacted]", "x": 1`,
		`"serviceAccountToken": {"path": "token"}`:                           `"serviceAccountToken": {"path": "token"}`,
		`"automountServiceAccountToken": true`:                               `"automountServiceAccountToken": true`,
		`{"secretName":"x-y-z-1-certs"}`:                                     `{"secretName":"[redacted]"}`,
		"/src/oauth2/token.go:123 +0x1":                                      "/src/oauth2/token.go:123 +0x1",
		"10.5.7.0/24 via 10.5.7.0 dev flannel.1":                             "10.5.7.0/24 via 10.5.7.0 dev flannel.1",
	} {
		if got := s.scrub(text); got != want {
			t.Errorf("%s\nbecomes %s\nwant    %s", text, got, want)
		}
	}
}

// TestCollectAtOnce checks that 8 parts are collected at the same time, and no more, and that the time of each is limited.
func TestCollectAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var running atomic.Int64
		hanging := part{"hanging", func(ctx context.Context) ([]byte, error) {
			running.Add(1)
			<-ctx.Done()
			running.Add(-1)
			return []byte("a half"), nil
		}}
		var out bytes.Buffer
		a := archive{secrets: &scrubber{}, tar: tar.NewWriter(&out)}
		begin := time.Now()
		var group errgroup.Group
		var incomplete []missing
		group.Go(func() (err error) {
			incomplete, err = a.collect(t.Context(), time.Minute, slices.Repeat([]part{hanging}, 20))
			return err
		})
		synctest.Wait()
		if n := running.Load(); n != 8 {
			t.Errorf("%d parts are collected at the same time, want 8", n)
		}
		err := group.Wait()
		if took := time.Since(begin); err != nil || took != 3*time.Minute {
			t.Errorf("it took %s, %v, want 3m", took, err)
		}
		if len(incomplete) != 20 || incomplete[19].err.Error() != "no answer within 1m0s" || !strings.Contains(out.String(), "a half\nincomplete: no answer") {
			t.Errorf("%v is incomplete, in\n%s", incomplete, out.String())
		}
	})
}
