// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
)

func scrape(t *testing.T, all ...*metrics.Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	metrics.Handler(func() []*metrics.Metrics { return all }).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("scrape: %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func full(context.Context) metrics.Values {
	peers := []status.Peer{
		{State: status.InPlace, Backend: "vxlan"}, {State: status.InPlace, Backend: "vxlan"}, {State: status.InPlace, Backend: "vxlan"}, {State: status.Held, Backend: "vxlan"},
		{State: status.Missing, Backend: "udp", Waiting: "no route", PathMTU: map[netip.Prefix]int{netip.MustParsePrefix("10.5.1.0/24"): 1400}},
		{State: status.Refused}, {State: status.Reserved},
	}
	return metrics.Values{
		Report: status.Report{
			Ready: true, RestartNeeded: "VNI", ConfigRejected: "MTU", Peers: peers, Paths: &paths.Outcome{Results: map[string]int{"ok": 3, "mtu": 2, "unknown": 1}},
			Kernel:    status.Kernel{Objects: map[string]dataplane.Count{"route": {Wanted: 4, Present: 3}}, LastSync: time.Unix(1000, 5e8)},
			Datastore: status.Datastore{Connected: true}, Lease: status.Lease{Expires: time.Unix(2000, 0)},
			Network: status.Network{
				BackendType: "udp", NextBackendType: "vxlan", Pool: &status.Pool{Free: 9},
				Cloud: &status.Cloud{Overflow: &status.Overflow{ByCloud: 2, ByTunnel: 1}}, Location: &status.Location{Inside: "host-gw", ByInside: 3, Between: "wireguard", ByBetween: 4},
			},
		},
		PodsCutOff: true, Dropped: map[string]uint64{"malformed": 2},
		Cloud: &cloud.Report{
			Good: time.Unix(3000, 0), Calls: []cloud.CallCount{{Name: "CreateRoute", Result: "ok", N: 4}},
			Tables: []cloud.TableReport{{ID: "rtb-1", Used: map[prefix.Family]int{prefix.IPv4: 7}, Quota: map[prefix.Family]int{prefix.IPv4: 50}}, {ID: "rtb-2"}},
		},
	}
}

func TestMetrics(t *testing.T) {
	m := metrics.New("", true, full)
	m.Synced(3*time.Millisecond, 2, nil)
	m.Synced(time.Second, 0, errors.New("no"))
	m.Firewall(true, nil)
	m.Firewall(false, errors.New("no"))
	m.Answered(2 * time.Millisecond)
	page := scrape(t, m)
	for _, want := range []string{
		"flannel_ready 1", "flannel_pods_cut_off 1", `flannel_backend_info{mode="",type="udp"} 1`, `flannel_peers{state="served"} 4`, `flannel_peers{state="held"} 1`, `flannel_peers{state="refused"} 1`, "flannel_narrow_paths 1",
		`flannel_kernel_objects{kind="route"} 3`, `flannel_kernel_objects_wanted{kind="route"} 4`, "flannel_last_sync_timestamp_seconds 1000.5",
		"flannel_datastore_connected 1", "flannel_lease_expiry_timestamp_seconds 2000", `flannel_pool_subnets{state="free"} 9`,
		"flannel_restart_needed 1", `flannel_paths{result="mtu"} 2`, "flannel_unreachable_peers 2", "flannel_config_rejected 1", `flannel_udp_dropped_packets_total{reason="malformed"} 2`,
		`flannel_migration_peers{backend="next"} 4`, `flannel_migration_peers{backend="present"} 1`,
		`flannel_cloud_calls_total{call="CreateRoute",result="ok"} 4`, `flannel_cloud_routes{family="IPv4",table="rtb-1"} 7`,
		`flannel_cloud_routes_quota{family="IPv4",table="rtb-1"} 50`, `flannel_cloud_peers{by="cloud"} 2`, `flannel_cloud_peers{by="tunnel"} 1`, "flannel_cloud_last_good_timestamp_seconds 3000",
		`flannel_location_peers{backend="host-gw"} 3`, `flannel_location_peers{backend="wireguard"} 4`,
		"flannel_sync_duration_seconds_count 2", `flannel_path_round_trip_seconds_bucket{le="0.001"} 0`, `flannel_path_round_trip_seconds_bucket{le="0.0025"} 1`, "flannel_sync_failures_total 1", "flannel_drift_repaired_total 2",
		"flannel_firewall_repairs_total 1", "flannel_firewall_failures_total 1", "flannel_build_info{", "go_goroutines", "process_resident_memory_bytes",
	} {
		if !strings.Contains(page, "\n"+want) {
			t.Errorf("no %q in\n%s", want, page)
		}
	}
	if strings.Contains(page, `flannel_cloud_routes_quota{family="IPv4",table="rtb-2"}`) || strings.Contains(page, `flannel_cloud_routes_quota{family="IPv6"`) {
		t.Error("there is a quota of a table whose quota is not known")
	}
	problems, err := promlint.New(strings.NewReader(page)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// TestUnknownIsAbsent checks that unknown values are absent instead of zero. Otherwise a
// lease that does not expire would look as if it had expired in 1970.
func TestUnknownIsAbsent(t *testing.T) {
	page := scrape(t, metrics.New("", false, func(context.Context) metrics.Values { return metrics.Values{} }))
	for _, name := range []string{"flannel_lease_expiry", "flannel_last_sync_timestamp", "flannel_pool", "flannel_udp", "flannel_backend_info", "flannel_peers", "flannel_cloud", "flannel_location", "flannel_path_round_trip", "flannel_narrow"} {
		if strings.Contains(page, name) {
			t.Errorf("%s is present although its value is unknown", name)
		}
	}
	if !strings.Contains(page, "\nflannel_ready 0") || !strings.Contains(page, "\nflannel_datastore_connected 0") {
		t.Error("ready and connected must be present, as 0")
	}
}

// TestNoMigration checks that the numbers of a migration are zero without one, also if two backends carry the packets.
func TestNoMigration(t *testing.T) {
	page := scrape(t, metrics.New("", false, func(context.Context) metrics.Values {
		return metrics.Values{Report: status.Report{Peers: []status.Peer{{State: status.InPlace, Backend: "vxlan", Waiting: "no route"}, {State: status.InPlace, Backend: "aws-vpc"}}}}
	}))
	for _, want := range []string{`flannel_migration_peers{backend="next"} 0`, `flannel_migration_peers{backend="present"} 0`, `flannel_peers{state="served"} 2`, `flannel_peers{state="held"} 0`} {
		if !strings.Contains(page, "\n"+want) {
			t.Errorf("no %q in\n%s", want, page)
		}
	}
}

// TestRulesAndDashboardUseExistingMetrics checks that alert rules and the dashboard use only
// metrics that exist.
func TestRulesAndDashboardUseExistingMetrics(t *testing.T) {
	m := metrics.New("", true, full)
	m.Synced(time.Second, 0, nil)
	page := scrape(t, m)
	for _, file := range []string{"../../../dist/prometheus/flannel-rules.yml", "../../../dist/grafana/flannel.json"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		names := regexp.MustCompile(`\bflannel_[a-z_]+`).FindAllString(string(text), -1)
		if len(names) == 0 {
			t.Errorf("%s names no metric", file)
		}
		for _, name := range names {
			if !strings.Contains(page, "\n"+name+"{") && !strings.Contains(page, "\n"+name+" ") {
				t.Errorf("%s uses %s, which does not exist", file, name)
			}
		}
	}
}

// TestSeveralNetworks scrapes a daemon with two networks. The metrics of a network must have its name as
// a label, and the metrics of the process must not have that label.
func TestSeveralNetworks(t *testing.T) {
	red, green := metrics.New("red", true, full), metrics.New("green", true, full)
	red.Synced(time.Millisecond, 2, nil)
	page := scrape(t, green, red)
	for _, want := range []string{
		`flannel_ready{network="red"} 1`, `flannel_ready{network="green"} 1`, `flannel_peers{network="red",state="served"} 4`,
		`flannel_drift_repaired_total{network="red"} 2`, `flannel_drift_repaired_total{network="green"} 0`, "go_goroutines ",
	} {
		if strings.Count(page, "\n"+want) != 1 {
			t.Errorf("not exactly one %q in\n%s", want, page)
		}
	}
}
