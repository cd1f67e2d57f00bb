// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"

	"github.com/flanneld/flanneld/test/chart"
)

func (r *report) charts() map[string]chart.Chart {
	all := map[string]chart.Chart{
		"cold":       {Title: "Cold start: from exec to the last kernel object", Unit: "milliseconds, median and range"},
		"latency":    {Title: "One lease: from the write to etcd to the kernel", Unit: "milliseconds, median and range"},
		"latency99":  {Title: "One lease: the slowest one in a hundred", Unit: "milliseconds, median and range"},
		"cpu":        {Title: "One lease: CPU time of the daemon, by number of peers", Unit: "milliseconds, median and range"},
		"memory":     {Title: "Memory at rest, vxlan", Unit: "megabytes, median and range"},
		"cold-ratio": {Title: "Cold start, in multiples of a bare client and the kernel's own limit", Unit: "times, median and range"},
	}

	draw := func(name, label, class string, m *metric) {
		if m == nil {
			return
		}
		c := all[name]
		c.Bars = append(c.Bars, chart.Bar{Label: label, Class: class, Median: m.median(), Low: slices.Min(m.Values), Top: slices.Max(m.Values)})
		all[name] = c
	}

	for _, backend := range []string{"vxlan", "host-gw"} {
		group := backend + ", cold start"
		for _, n := range r.sizes(group, "exec to all programmed") {
			for _, b := range []struct{ name, class, short string }{
				{"exec to all programmed", "ours", "flanneld"},
				{"limit: pipelined, nexthop objects", "limit", "limit, nexthop objects"},
				{"limit: pipelined, plain routes", "limit", "limit, plain routes"},
			} {
				draw("cold", fmt.Sprintf("%s %d: %s", backend, n, b.short), b.class, r.find(group, b.name, n))
			}
			if m := r.find(group, "exec to all programmed / bare client and limit, added", n); m.Target != nil {
				draw("cold-ratio", fmt.Sprintf("%s, %d peers", backend, n), "ours", m)
				draw("cold-ratio", "target", "target", &metric{Values: []float64{*m.Target}})
			}
		}
	}

	const lease = "vxlan, one lease"
	for _, n := range r.sizes(lease, "CPU an event") {
		for name, q := range map[string]string{"latency": "p50", "latency99": "p99"} {
			draw(name, fmt.Sprintf("added, %d peers", n), "ours", r.find(lease, "added, "+q, n))
			draw(name, fmt.Sprintf("removed, %d peers", n), "ours", r.find(lease, "removed, "+q, n))
			draw(name, "etcd watch alone", "limit", r.find(lease, "bare etcd watch, "+q, n))
		}
		draw("cpu", fmt.Sprintf("%d peers", n), "ours", r.find(lease, "CPU an event", n))
	}

	for _, n := range r.sizes("vxlan, at rest", "RSS") {
		draw("memory", fmt.Sprintf("%d peers: anonymous", n), "ours", r.find("vxlan, at rest", "RSS, anonymous", n))
		draw("memory", fmt.Sprintf("%d peers: of files", n), "limit", r.find("vxlan, at rest", "RSS, of files", n))
	}

	for name, c := range all {
		if len(c.Bars) == 0 {
			delete(all, name)
		}
	}
	return all
}
