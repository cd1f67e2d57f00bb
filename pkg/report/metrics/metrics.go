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
	"github.com/flanneld/flanneld/pkg/report/status"
)

// readTimeout limits how long a scrape waits for Values. The daemon can read some of them, such as
// the state of the peers, only between two passes of a network's Syncer. If it cannot read these in
// time, the scrape still returns the others.
const readTimeout = 2 * time.Second

// Values contains the values that are read at each scrape. A value that is nil or a zero time is unknown: its metrics are
// absent.
type Values struct {
	status.Report                   // of one network; Peers is nil if they are not known
	PodsCutOff    bool              // see doctor.CutOff
	Dropped       map[string]uint64 // packets dropped in user space, by reason
	Cloud         *cloud.Report     // nil unless the backend uses the routes of a cloud
}

// Metrics contains the metrics of one network, in a registry of its own.
type Metrics struct {
	registry *prometheus.Registry

	duration         prometheus.Histogram
	failures         prometheus.Counter
	repaired         prometheus.Counter
	differed         prometheus.Counter
	firewallRepairs  prometheus.Counter
	firewallFailures prometheus.Counter
	roundTrips       prometheus.Histogram
}

// New returns the metrics of a network. network is its name if the daemon serves several: all metrics
// get it as a label. If probe is set, there is a histogram of the round trips of probes. read is called at
// each scrape. When its context ends, read may return the values that it has so far.
func New(network string, probe bool, read func(context.Context) Values) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "flannel", Name: name, Help: help})
	}

	m := &Metrics{
		registry: prometheus.NewRegistry(),
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

	to := prometheus.Registerer(m.registry)
	if network != "" {
		to = prometheus.WrapRegistererWith(prometheus.Labels{"network": network}, to)
	}
	to.MustRegister(&collector{read}, m.duration, m.failures, m.repaired, m.differed, m.firewallRepairs, m.firewallFailures)
	if probe {
		to.MustRegister(m.roundTrips)
	}
	return m
}

// Handler serves scrapes of the process and of the networks that list returns.
func Handler(list func() []*Metrics) http.Handler {
	process := prometheus.NewRegistry()
	process.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	all := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		gatherers := prometheus.Gatherers{process}
		for _, m := range list() {
			gatherers = append(gatherers, m.registry)
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

// Describe implements prometheus.Collector. It describes nothing, because Collect names the metrics.
func (*collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	values := c.read(ctx)
	counter := func(name, help string, labels ...string) metric {
		return metric{ch, prometheus.NewDesc("flannel_"+name, help, labels, nil), prometheus.CounterValue}
	}
	gauge := func(name, help string, labels ...string) metric {
		return metric{ch, prometheus.NewDesc("flannel_"+name, help, labels, nil), prometheus.GaugeValue}
	}

	gauge("build_info", "Always 1; the labels say which flanneld this is.", "version", "goversion").
		set(1, version.Version, runtime.Version())
	network := values.Network
	if network.BackendType != "" {
		gauge("backend_info", "Always 1; the labels give the backend and how it carries packets.", "type", "mode").
			set(1, network.BackendType, network.Mode)
	}

	gauge("ready", "1 while /readyz answers 200. If it is 0, its body gives the reasons.").flag(values.Ready)
	gauge("pods_cut_off", "1 while the kernel does not carry packets of pods although flanneld's objects are in place. flannelctl doctor names the cause.").flag(values.PodsCutOff)
	gauge("datastore_connected", "1 while etcd or the Kubernetes API answers. Otherwise traffic continues, but changes of leases do not arrive.").flag(values.Datastore.Connected)
	gauge("restart_needed", "1 if the network configuration was deleted or, with --follow-config=false, has changed: flanneld keeps the old one until it is restarted.").flag(values.RestartNeeded != "")
	gauge("config_rejected", "1 while this host cannot use the network configuration in the datastore and continues with its own. flannelctl status and the log give the reason.").flag(values.ConfigRejected != "")
	gauge("last_sync_timestamp_seconds", "When the kernel last matched the leases. If that is long ago, /readyz and the log give the reason.").time(values.Kernel.LastSync)
	gauge("lease_expiry_timestamp_seconds", "When this host's lease expires unless it is renewed. If it comes near, the store does not accept renewals.").time(values.Lease.Expires)

	if values.Peers != nil {
		states := values.PeerStates()
		carried, narrow := countPeers(values.Report)
		each(map[string]int{"served": states[status.InPlace] + states[status.Missing], "held": states[status.Held], "refused": states[status.Refused]},
			gauge("peers", "Other hosts by how this host serves them: served, held although the store no longer contains them, or refused for a reason in the log.", "state"))
		each(carried, gauge("migration_peers", "Other hosts by the backend that carries the packets to them during a migration: present or next. If some stay with the present one, flannelctl migrate status gives the reason.", "backend"))
		gauge("narrow_paths", "Paths to other hosts that carry only packets smaller than the MTU of the device, with Backend.MTU \"probe\". flannelctl status names the hosts: repair the MTU of the network between them.").
			set(float64(narrow))
	}

	objects := gauge("kernel_objects", "Kernel objects that are wanted and present. If it stays below flannel_kernel_objects_wanted, see the log.", "kind")
	wanted := gauge("kernel_objects_wanted", "Kernel objects that should be present.", "kind")
	for kind, n := range values.Kernel.Objects {
		objects.set(float64(n.Present), kind)
		wanted.set(float64(n.Wanted), kind)
	}

	if p := network.Pool; p != nil {
		each(map[string]uint64{"free": p.Free, "leased": p.Leased, "reserved": p.Reserved},
			gauge("pool_subnets", "Subnets of the configured range by state. If none is free, no host can join.", "state"))
	}
	if values.Paths != nil {
		each(values.Paths.Results, gauge("paths", "Paths to other hosts by the result of the last probe: ok, or the part that does not work. Needs --probe. flannelctl status names the hosts.", "result"))
		gauge("unreachable_peers", "Paths to other hosts that do not work, with --probe. flannelctl status names the hosts and what to look at.").
			set(float64(values.Paths.Unreachable()))
	}

	each(values.Dropped, counter("udp_dropped_packets_total", "Packets that the udp backend dropped, by reason.", "reason"))
	if by := network.Location; by != nil {
		each(map[string]int{by.Inside: by.ByInside, by.Between: by.ByBetween},
			gauge("location_peers", "Other hosts by the backend that carries the packets to them, with Backend.SameLocation. If one at the location of this host is not served inside, flannelctl status gives the reason.", "backend"))
	}
	if network.Cloud != nil && network.Cloud.Overflow != nil {
		by := network.Cloud.Overflow
		each(map[string]int{"cloud": by.ByCloud, "tunnel": by.ByTunnel},
			gauge("cloud_peers", "Other hosts by what carries the packets to them: the cloud, or the tunnel of Backend.Overflow. If some stay with the tunnel, flannelctl status gives the reason.", "by"))
	}
	if values.Cloud == nil {
		return
	}

	gauge("cloud_last_good_timestamp_seconds", "When a comparison last found or put the cloud's routes to this host in order. If that is long ago, /readyz and the log give the reason.").time(values.Cloud.Good)
	calls := counter("cloud_calls_total", "Calls of the cloud's API. If throttled ones keep growing, raise --resync; for denied ones the log names the permission.", "call", "result")
	for _, c := range values.Cloud.Calls {
		calls.set(float64(c.N), c.Name, c.Result)
	}

	used := gauge("cloud_routes", "Routes of a route table that count towards its quota.", "table", "family")
	quota := gauge("cloud_routes_quota", "Routes that the cloud allows in a table. Absent until a table has refused a route of the family.", "table", "family")
	for _, t := range values.Cloud.Tables {
		for family, n := range t.Used {
			used.set(float64(n), t.ID, family.String())
		}
		for family, n := range t.Quota {
			quota.set(float64(n), t.ID, family.String())
		}
	}
}

// countPeers returns the number of peers by the backend of a migration that carries the packets to them, and the number of
// narrow paths. The numbers of a migration are zero, and not absent, without one, because a short one may be over before
// the metric is read.
func countPeers(r status.Report) (carried map[string]int, narrow int) {
	carried = map[string]int{"present": 0, "next": 0}
	for _, p := range r.Peers {
		narrow += len(p.PathMTU)
		switch {
		case r.Network.NextBackendType == "" || p.Backend == "": // other networks with two backends name one, too
		case p.Waiting == "":
			carried["next"]++
		default:
			carried["present"]++
		}
	}
	return carried, narrow
}

// metric is a metric whose values go to a scrape.
type metric struct {
	to   chan<- prometheus.Metric
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// set sends a value, with the values of the labels.
func (m metric) set(value float64, labels ...string) {
	//nolint:promlinter // promlinter does not find the description; a test lints the names
	m.to <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
}

func (m metric) flag(b bool) {
	if b {
		m.set(1)
	} else {
		m.set(0)
	}
}

// time sends a time unless it is not known.
func (m metric) time(t time.Time) {
	if !t.IsZero() {
		m.set(float64(t.UnixMilli()) / 1000)
	}
}

// each sends the values of a metric that has one label.
func each[N int | uint64](values map[string]N, m metric) {
	for label, n := range values {
		m.set(float64(n), label)
	}
}
