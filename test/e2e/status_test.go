// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// socket is the default path of the daemon's status socket.
const socket = "/run/flannel/flanneld.sock"

// getStatus sends a GET request for path to the status socket of the daemon on h. accept
// is the header Accept. The test fails if there is no answer.
func getStatus(t *testing.T, h *lab.Host, path, accept string) (code int, body string) {
	t.Helper()
	code, body, err := askStatus(t, h, path, accept)
	if err != nil {
		t.Fatal(err)
	}
	return code, body
}

// askStatus is getStatus for tests that ask again: it returns an error if there is no
// answer.
func askStatus(t *testing.T, h *lab.Host, path, accept string) (code int, body string, err error) {
	t.Helper()
	r, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://flanneld"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept", accept)
	answer, err := status.Client(h.Path(socket)).Do(r)
	for emulated() && errors.Is(err, io.EOF) { // the daemon has closed the connection, because its answer took too long
		answer, err = status.Client(h.Path(socket)).Do(r)
	}
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text), err
}

func statusOf(t *testing.T, h *lab.Host) status.Report {
	t.Helper()
	r, err := askReport(t, h)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// askReport is statusOf for tests that ask again: it returns an error if there is no
// status.
func askReport(t *testing.T, h *lab.Host) (r status.Report, err error) {
	t.Helper()
	code, body, err := askStatus(t, h, "/statusz", "application/json")
	if err != nil {
		return r, err
	}
	if code != http.StatusOK {
		return r, fmt.Errorf("status: %d, want %d, in %s", code, http.StatusOK, body)
	}
	if err := json.Unmarshal([]byte(body), &r); err != nil {
		return r, fmt.Errorf("status: %w in %s", err, body)
	}
	return r, nil
}

// metric returns a value from the daemon's metrics. series is the name with all labels.
// The test fails if there is no such series.
func metric(t *testing.T, h *lab.Host, series string) float64 {
	t.Helper()
	_, body := getStatus(t, h, "/metrics", "")
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	t.Fatalf("no %s in\n%s", series, body)
	return 0
}

// TestStatus checks that the status, the metrics and the HTML page describe a daemon
// whose peers are all served, and that repairs are counted.
func TestStatus(t *testing.T) {
	t.Parallel()
	for _, families := range [][]string{{"IPv4"}, {"dual"}} {
		t.Run(families[0], func(t *testing.T) {
			cfg := lab.Config{Hosts: 3}
			objects := 3 // neighbour, FDB entry and route for each peer
			if families[0] == "dual" {
				cfg.Families, objects = dual, 6
			}
			l := newLab(t, cfg, `{"Type":"vxlan"}`)
			startAll(t, l, lab.FlanneldOptions{})
			expectConverged(t, l)
			h := l.Hosts()[0]

			eventually(t, "status", func() error {
				r := statusOf(t, h)
				if len(r.Peers) != 2 || !r.Ready || !r.Datastore.Connected || r.Network.BackendType != "vxlan" || r.Network.MTU == 0 ||
					r.Interface.Name != "eth0" || len(r.Lease.Subnets) != len(l.Families()) || r.Kernel.LastSync.IsZero() {
					return fmt.Errorf("%+v", r)
				}
				for _, p := range r.Peers {
					if p.State != status.InPlace || len(p.Objects) != objects || p.Changed.IsZero() {
						return fmt.Errorf("peer %+v, want it in place with %d objects", p, objects)
					}
				}
				return nil
			})
			if got := metric(t, h, `flannel_peers{state="served"}`); got != 2 {
				t.Errorf("%v peers served, want 2", got)
			}
			want := metric(t, h, `flannel_kernel_objects_wanted{kind="route"}`)
			if got := metric(t, h, `flannel_kernel_objects{kind="route"}`); got != want || got < 2 {
				t.Errorf("%v routes exist, want %v and at least 2", got, want)
			}
			before := metric(t, h, "flannel_drift_repaired_total")
			if out, err := h.Exec(testContext(t), "ip", "route", "flush", "dev", "flannel.1"); err != nil {
				t.Fatal(err, out)
			}
			eventually(t, "repairs are counted", func() error {
				if now := metric(t, h, "flannel_drift_repaired_total"); now < before+2 {
					return fmt.Errorf("%v repaired, want at least %v", now, before+2)
				}
				return nil
			})
			if _, page := getStatus(t, h, "/statusz", "text/html"); !strings.Contains(page, ": flanneld "+statusOf(t, h).Lease.Subnets[0].String()) {
				t.Errorf("the title of the page does not contain the host's subnet:\n%s", page)
			}
		})
	}
}

// TestStatusReportsErrors checks that the status reports a refused lease, a device that
// is in the way, and an outage of the store.
func TestStatusReportsErrors(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--readyz-datastore-grace=0s"}})
	h := l.Hosts()[0]
	putKey(t, etcdClient(t, l), subnets+"10.5.200.0-24", `{"PublicIP":"192.0.2.9","BackendType":"host-gw"}`)
	eventually(t, "the status reports the refused lease", func() error {
		for _, p := range statusOf(t, h).Peers {
			if p.Key == "10.5.200.0-24" && p.State == status.Refused && strings.Contains(p.Error, `"host-gw"`) {
				return nil
			}
		}
		return fmt.Errorf("the peer is not reported as refused")
	})
	// The daemon cannot create its device again while another device has its VNI.
	occupyVNI(t, h)
	eventually(t, "the status reports the device in the way", func() error {
		r, failures := statusOf(t, h), metric(t, h, "flannel_sync_failures_total")
		if r.Ready || !strings.Contains(strings.Join(r.Reasons, "\n"), "another vxlan device has VNI 1") || r.Kernel.Error == "" || failures == 0 {
			return fmt.Errorf("ready: %v, %q, %q, %v failures", r.Ready, r.Reasons, r.Kernel.Error, failures)
		}
		return nil
	})
	if out, err := h.Exec(testContext(t), "ip", "link", "del", "other"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	eventually(t, "the daemon is ready again", func() error {
		if r := statusOf(t, h); !r.Ready || r.Kernel.Error != "" {
			return fmt.Errorf("ready: %v, %q, %q", r.Ready, r.Reasons, r.Kernel.Error)
		}
		return nil
	})
	l.Etcd().Kill()
	eventually(t, "the status reports the outage", func() error {
		r := statusOf(t, h)
		if r.Datastore.Connected || r.Ready || r.Datastore.Error == "" || len(r.Peers) != 2 {
			return fmt.Errorf("%+v", r.Datastore)
		}
		return nil
	})
	if got := metric(t, h, "flannel_datastore_connected"); got != 0 {
		t.Errorf("flannel_datastore_connected is %v, want 0", got)
	}
	found := false
	for _, e := range statusOf(t, h).Events {
		found = found || e.Error && strings.Contains(e.Text, "lease refused")
	}
	if !found {
		t.Errorf("the events do not contain the refused lease: %+v", statusOf(t, h).Events)
	}
}

// TestStatusIsForThisHost checks that the status is available only on the host itself and
// at the address of --statusz-address, because it names all peers. Other hosts get
// metrics and health, but not the status.
func TestStatusIsForThisHost(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	a, b := l.Hosts()[0], l.Hosts()[1]
	startOne(t, a, lab.FlanneldOptions{Args: []string{"--healthz-ip=0.0.0.0", "--statusz-address=0.0.0.0:8099"}})
	from := func(h *lab.Host, port, path, host string) int {
		t.Helper()
		to := "127.0.0.1"
		if h != a {
			to = a.Addr(v4[0]).String()
		}
		r, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://"+net.JoinHostPort(to, port)+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if host != "" {
			r.Host = host
		}
		answer, err := (&http.Client{Transport: &http.Transport{DialContext: h.Dial, DisableKeepAlives: true}}).Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	for _, tc := range []struct {
		from       *lab.Host
		port, path string
		host       string
		want       int
	}{
		{a, "8081", "/statusz", "", http.StatusOK},
		{a, "8081", "/statusz", "evil.example:8081", http.StatusNotFound},
		{b, "8081", "/statusz", "", http.StatusNotFound},
		{b, "8081", "/metrics", "", http.StatusOK},
		{b, "8081", "/healthz", "", http.StatusOK},
		{b, "8099", "/statusz", "", http.StatusOK},
	} {
		if got := from(tc.from, tc.port, tc.path, tc.host); got != tc.want {
			t.Errorf("%s requests %s on port %s (Host %q): %d, want %d", tc.from.Name(), tc.path, tc.port, tc.host, got, tc.want)
		}
	}
}
