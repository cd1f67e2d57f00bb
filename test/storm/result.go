// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"time"

	"github.com/flanneld/flanneld/test/chart"
	"github.com/flanneld/flanneld/test/figures"
)

// report is the result of a run.
type report struct {
	Commit string    `json:"commit"`
	Date   time.Time `json:"date"`
	figures.Machine
	Results []*result `json:"results"`
}

// String returns the result as one line for a terminal.
func (r *result) String() string {
	text := fmt.Sprintf("%s %d %s: %d right after %.1f s, half after %.1f s; leases after %.1f s; store %.1f s CPU, %.0f MB peak; hosts %.1f s CPU, %.0f MB peak; %.1f MB sent, %.1f MB received; bystander %.2f s at most, %.3f s p99, %d of %d failed; %d outages; %s",
		r.Store, r.N, r.Scenario, r.Right, r.Seconds, r.Half, r.Leased, r.StoreCPU, r.Peak/1e6, r.HostsCPU, r.HostsPeak/1e6, r.Sent/1e6, r.Received/1e6,
		r.Slowest, r.P99, r.Failed, r.Bystanding, r.Outages, r.Calls)
	if r.Example != "" {
		text += "; " + r.Example
	}
	return text
}

func (r *report) markdown(out io.Writer) {
	fmt.Fprintf(out, "flanneld %s on %s, %s.\n\n", r.Commit, r.Date.UTC().Format("2006-01-02 15:04 UTC"), r.Machine)
	fmt.Fprintln(out, "| scenario | store, hosts | leases, s | half right, s | all right, s | CPU, s | memory, MB | sent, MB | a host, kB | requests | bystander, s | CPU of hosts, s |")
	fmt.Fprintln(out, "|---|---|---|---|---|---|---|---|---|---|---|---|")

	for _, sc := range scenarios() {
		for _, one := range r.Results {
			if one.Scenario != sc.name {
				continue
			}
			fmt.Fprintf(out, "| %s | %s, %d | %s | %s | %s | %s | %.0f | %s | %s | %.0f | %s | %s |\n", sc.name, one.Store, one.N,
				seconds(one.Leased), seconds(one.Half), chart.Number(one.Seconds), chart.Number(one.StoreCPU), one.Peak/1e6, chart.Number(one.Sent/1e6),
				chart.Number(one.Sent/1e3/float64(one.N)), one.Calls.Total(), chart.Number(one.Slowest), chart.Number(one.HostsCPU))
		}
	}
}

func seconds(s float64) string {
	if s <= 0 {
		return ""
	}
	return chart.Number(s)
}

func (r *report) charts() map[string]chart.Chart {
	all := map[string]chart.Chart{}
	for _, kind := range []struct {
		name, title, unit string
		value             func(*result) float64
	}{
		{"seconds", "Until the last host is right", "seconds", func(r *result) float64 { return r.Seconds }},
		{"cpu", "CPU time of the store", "seconds", func(r *result) float64 { return r.StoreCPU }},
		{"bytes", "Sent by the store to each host", "kilobytes", func(r *result) float64 { return r.Sent / 1e3 / float64(r.N) }},
		{"memory", "Peak memory of the store", "megabytes", func(r *result) float64 { return r.Peak / 1e6 }},
	} {
		c := chart.Chart{Title: kind.title, Unit: kind.unit}
		for _, sc := range scenarios() {
			for _, one := range r.Results {
				if one.Scenario == sc.name {
					c.Bars = append(c.Bars, chart.Bar{Label: fmt.Sprintf("%s: %s, %d hosts", sc.name, one.Store, one.N), Class: "ours", Median: kind.value(one)})
				}
			}
		}
		if len(c.Bars) > 0 {
			all[kind.name] = c
		}
	}
	return all
}
