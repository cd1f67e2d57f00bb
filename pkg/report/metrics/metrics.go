// SPDX-License-Identifier: Apache-2.0

// Package metrics exports the daemon's metrics to Prometheus. Metrics counts passes,
// repairs, corrected leases and probes when they happen. All other values, also counters
// of other packages, are read at each scrape.
package metrics

import (
	"context"
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"github.com/flanneld/flanneld/pkg/base/version"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/probe/paths"
)

// readTimeout limits how long a scrape waits for Values. The daemon can read some of them, such as
// the state of the peers, only between two passes of a network's Syncer. If it cannot read these in
// time, the scrape still returns the others.
const readTimeout = 2 * time.Second

// Values contains the values that are read at each scrape. A zero time or a nil map means
// unknown: its metrics are absent.
type Values struct {
	Ready         bool
	Backend       string                     // type
	Mode          string                     // of the backend, if it has several
	Peers         map[string]int             // by state: served, held, refused
	Objects       map[string]dataplane.Count // by kind
	LastSync      time.Time
	Connected     bool              // to the datastore
	LeaseExpires  time.Time         // zero for a lease that does not expire
	Pool          map[string]uint64 // subnets by state: free, leased, reserved
	RestartNeeded bool
	// ConfigRejected is set while the configuration in the store cannot be used.
	ConfigRejected bool
	Dropped        map[string]uint64 // packets dropped in user space, by reason
	Paths          *paths.Outcome    // nil without --probe
	NarrowPaths    int               // paths with an MTU smaller than that of the device; unknown if Peers is nil
	Carried        map[string]int    // peers by backend (present, next), during a migration
	Cloud          *cloud.Report     // nil unless the backend uses the routes of a cloud
	CloudPeers     map[string]int    // peers by what carries the packets to them (cloud, tunnel), with Backend.Overflow
	LocationPeers  map[string]int    // peers by type of the backend that carries the packets to them, with Backend.SameLocation
}

// Metrics contains the counters and histograms of one network, in a registry of its own.
type Metrics struct {
	registry *prometheus.Registry
	network  string

	duration         prometheus.Histogram
	failures         prometheus.Counter
	repaired         prometheus.Counter
	differed         prometheus.Counter
	firewallRepairs  prometheus.Counter
	firewallFailures prometheus.Counter
	roundTrips       prometheus.Histogram
}

// New returns the metrics of a network. network is its name if the daemon serves several: all metrics
// get it as a label. If probe is set, there is a histogram of the round trips of probes.
func New(network string, probe bool) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "flannel", Name: name, Help: help})
	}

	m := &Metrics{
		registry: prometheus.NewRegistry(), network: network,
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "flannel", Name: "sync_duration_seconds",
			Help:    "Time to make the kernel match the leases. If it grows and the number of peers does not, another program changes routes on this host.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		failures: counter("sync_failures_total", "Updates of the kernel that failed and are repeated. /readyz and the log give the reason."),
		repaired: counter("drift_repaired_total", "Kernel objects that another program changed or removed, and that flanneld restored. If it keeps growing, ip monitor or the log with --v=4 names the objects."),
		differed: counter("leases_corrected_total", "Leases of the last known state that differed from the datastore's and were corrected. If it grows, the state directory or the datastore was changed by other means, or this is a bug."),
		firewallRepairs: counter("firewall_repairs_total",
			"Times that flanneld restored masquerade or forward rules. If it keeps growing, another program rewrites them."),
		roundTrips: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "flannel", Name: "path_round_trip_seconds",
			Help:    "Round trips of probes to other hosts through the network, with --probe. /statusz names the slowest hosts.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1},
		}),
		firewallFailures: counter("firewall_failures_total", "Attempts to program masquerade or forward rules that failed and are repeated. The log and /readyz give the reason."),
	}

	m.register(m.registry, m.duration, m.failures, m.repaired, m.differed, m.firewallRepairs, m.firewallFailures)
	if probe {
		m.register(m.registry, m.roundTrips)
	}
	return m
}

// register adds metrics of the network to a registry.
func (m *Metrics) register(to prometheus.Registerer, all ...prometheus.Collector) {
	if m.network != "" {
		to = prometheus.WrapRegistererWith(prometheus.Labels{"network": m.network}, to)
	}
	to.MustRegister(all...)
}

// Source is what Handler serves for one network.
type Source struct{ gatherers prometheus.Gatherers }

// With returns a source of m and of the values that read returns at each scrape. When the context of
// read ends, read may return the values that it has so far.
func (m *Metrics) With(read func(context.Context) Values) Source {
	values := prometheus.NewRegistry()
	m.register(values, &collector{read})
	return Source{prometheus.Gatherers{m.registry, values}}
}

// Handler serves scrapes of the process and of the networks that list returns.
func Handler(list func() []Source) http.Handler {
	process := prometheus.NewRegistry()
	process.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	all := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		gatherers := prometheus.Gatherers{process}
		for _, s := range list() {
			gatherers = append(gatherers, s.gatherers...)
		}
		return gatherers.Gather()
	})
	return promhttp.HandlerFor(all, promhttp.HandlerOpts{Registry: process})
}

// Synced records one pass of the lease-watch loop, with the number of kernel objects that
// it has repaired.
func (m *Metrics) Synced(took time.Duration, repaired int, err error) {
	m.duration.Observe(took.Seconds())
	m.repaired.Add(float64(repaired))
	if err != nil {
		m.failures.Inc()
	}
}

// Differed records leases that a comparison with the datastore has corrected.
func (m *Metrics) Differed(leases int) { m.differed.Add(float64(leases)) }

// Answered records the round trip of a probe.
func (m *Metrics) Answered(rtt time.Duration) { m.roundTrips.Observe(rtt.Seconds()) }

// Firewall records one pass over the traffic rules: whether it restored rules that were
// in place before, and whether it failed.
func (m *Metrics) Firewall(repaired bool, err error) {
	if repaired {
		m.firewallRepairs.Inc()
	}
	if err != nil {
		m.firewallFailures.Inc()
	}
}

// collector turns Values into metrics.
type collector struct{ read func(context.Context) Values }

// gauge describes the metric of one of the Values. Its kind is gauge or counter.
type gauge struct {
	*prometheus.Desc
	kind prometheus.ValueType
}

func describe(kind prometheus.ValueType, name, help string, labels ...string) gauge {
	return gauge{prometheus.NewDesc("flannel_"+name, help, labels, nil), kind}
}

// gauges returns the descriptions of all Values, by a name of this package. It builds them
// at each call, so that no package variable is needed. Calls are rare.
func gauges() map[string]gauge {
	g := prometheus.GaugeValue
	return map[string]gauge{
		"build":    describe(g, "build_info", "Always 1; the labels say which flanneld this is.", "version", "goversion"),
		"backend":  describe(g, "backend_info", "Always 1; the labels give the backend and how it carries packets.", "type", "mode"),
		"ready":    describe(g, "ready", "1 while /readyz answers 200. If it is 0, its body gives the reasons."),
		"peers":    describe(g, "peers", "Other hosts by how this host serves them: served, held although the store no longer contains them, or refused for a reason in the log.", "state"),
		"objects":  describe(g, "kernel_objects", "Kernel objects that are wanted and present. If it stays below flannel_kernel_objects_wanted, see the log.", "kind"),
		"wanted":   describe(g, "kernel_objects_wanted", "Kernel objects that should be present.", "kind"),
		"lastSync": describe(g, "last_sync_timestamp_seconds", "When the kernel last matched the leases. If that is long ago, /readyz and the log give the reason."),
		"store":    describe(g, "datastore_connected", "1 while etcd or the Kubernetes API answers. Otherwise traffic continues, but changes of leases do not arrive."),
		"lease":    describe(g, "lease_expiry_timestamp_seconds", "When this host's lease expires unless it is renewed. If it comes near, the store does not accept renewals."),
		"pool":     describe(g, "pool_subnets", "Subnets of the configured range by state. If none is free, no host can join.", "state"),
		"restart":  describe(g, "restart_needed", "1 if the network configuration was deleted or, with --follow-config=false, has changed: flanneld keeps the old one until it is restarted."),
		"rejected": describe(g, "config_rejected", "1 while this host cannot use the network configuration in the datastore and continues with its own. flannelctl status and the log give the reason."),
		"paths":    describe(g, "paths", "Paths to other hosts by the result of the last probe: ok, or the part that does not work. Needs --probe. flannelctl status names the hosts.", "result"),
		"broken":   describe(g, "unreachable_peers", "Paths to other hosts that do not work, with --probe. flannelctl status names the hosts and what to look at."),
		"narrow":   describe(g, "narrow_paths", "Paths to other hosts that carry only packets smaller than the MTU of the device, with Backend.MTU \"probe\". flannelctl status names the hosts: repair the MTU of the network between them."),
		"carried":  describe(g, "migration_peers", "Other hosts by the backend that carries the packets to them during a migration: present or next. If some stay with the present one, flannelctl migrate status gives the reason.", "backend"),
		"dropped": describe(prometheus.CounterValue, "udp_dropped_packets_total",
			"Packets that the udp backend dropped, by reason.", "reason"),
		"cloudCalls": describe(prometheus.CounterValue, "cloud_calls_total",
			"Calls of the cloud's API. If throttled ones keep growing, raise --resync; for denied ones the log names the permission.", "call", "result"),
		"cloudRoutes":   describe(g, "cloud_routes", "Routes of a route table that count towards its quota.", "table", "family"),
		"cloudQuota":    describe(g, "cloud_routes_quota", "Routes that the cloud allows in a table. Absent until a table has refused a route of the family.", "table", "family"),
		"cloudPeers":    describe(g, "cloud_peers", "Other hosts by what carries the packets to them: the cloud, or the tunnel of Backend.Overflow. If some stay with the tunnel, flannelctl status gives the reason.", "by"),
		"locationPeers": describe(g, "location_peers", "Other hosts by the backend that carries the packets to them, with Backend.SameLocation. If one at the location of this host is not served inside, flannelctl status gives the reason.", "backend"),
		"cloudGood":     describe(g, "cloud_last_good_timestamp_seconds", "When a comparison last found or put the cloud's routes to this host in order. If that is long ago, /readyz and the log give the reason."),
	}
}

// Describe implements prometheus.Collector.
func (*collector) Describe(ch chan<- *prometheus.Desc) {
	for _, g := range gauges() {
		ch <- g.Desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	values := c.read(ctx)
	all := gauges()
	set := func(name string, value float64, labels ...string) {
		//nolint:promlinter // promlinter does not find the description; a test lints the names
		ch <- prometheus.MustNewConstMetric(all[name].Desc, all[name].kind, value, labels...)
	}

	at := func(name string, t time.Time) {
		if !t.IsZero() {
			set(name, float64(t.UnixMilli())/1000)
		}
	}

	set("build", 1, version.Version, runtime.Version())
	if values.Backend != "" {
		set("backend", 1, values.Backend, values.Mode)
	}

	set("ready", number(values.Ready))
	set("store", number(values.Connected))
	set("restart", number(values.RestartNeeded))
	set("rejected", number(values.ConfigRejected))
	at("lastSync", values.LastSync)
	at("lease", values.LeaseExpires)
	for state, n := range values.Peers {
		set("peers", float64(n), state)
	}
	if values.Peers != nil {
		set("narrow", float64(values.NarrowPaths))
	}

	for kind, n := range values.Objects {
		set("objects", float64(n.Present), kind)
		set("wanted", float64(n.Wanted), kind)
	}

	for state, n := range values.Pool {
		set("pool", float64(n), state)
	}
	if values.Paths != nil {
		for result, n := range values.Paths.Results() {
			set("paths", float64(n), result)
		}
		set("broken", float64(values.Paths.Unreachable()))
	}

	for backend, n := range values.Carried {
		set("carried", float64(n), backend)
	}
	for reason, n := range values.Dropped {
		set("dropped", float64(n), reason)
	}

	for backend, n := range values.LocationPeers {
		set("locationPeers", float64(n), backend)
	}
	for by, n := range values.CloudPeers {
		set("cloudPeers", float64(n), by)
	}
	if values.Cloud == nil {
		return
	}

	at("cloudGood", values.Cloud.Good)
	for _, c := range values.Cloud.Calls {
		set("cloudCalls", float64(c.N), c.Name, c.Result)
	}

	for _, t := range values.Cloud.Tables {
		for family, n := range t.Used {
			set("cloudRoutes", float64(n), t.ID, family.String())
		}
		for family, n := range t.Quota {
			set("cloudQuota", float64(n), t.ID, family.String())
		}
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
