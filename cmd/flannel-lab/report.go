// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/mesh"
	"github.com/flanneld/flanneld/test/lab"
)

// report is the state of a lab, in the form that --json prints.
type report struct {
	OK     bool          `json:"ok"` // every pod reaches every other, and every daemon runs
	Hosts  []hostReport  `json:"hosts"`
	Leases []leaseReport `json:"leases"`
	Matrix []cellReport  `json:"matrix"`
	// LeasesError is the error if the leases cannot be read.
	LeasesError string `json:"leasesError,omitempty"`
}

type hostReport struct {
	Name     string      `json:"name"`
	Flanneld string      `json:"flanneld"` // "running", or the way in which it ended
	PID      int         `json:"pid"`      // process id of flanneld
	Enter    string      `json:"enter"`    // command that enters the host
	Pods     []podReport `json:"pods"`
	Routes   []string    `json:"routes"` // routes to the pods of other hosts
}

type podReport struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	MTU       int      `json:"mtu"`
	Enter     string   `json:"enter"` // command that enters the pod
}

type leaseReport struct {
	Network string          `json:"network,omitempty"` // its name, if the lab has several networks
	Subnet  string          `json:"subnet"`
	Value   json.RawMessage `json:"value"`
	Seconds int             `json:"ttlSeconds"` // 0 if it does not expire
}

type cellReport struct {
	From        string  `json:"from"`
	To          string  `json:"to"`
	FromAddress string  `json:"fromAddress"`
	ToAddress   string  `json:"toAddress"`
	Family      string  `json:"family"`
	OK          bool    `json:"ok"`
	RTT         float64 `json:"rttMilliseconds"`
	Throughput  float64 `json:"bitsPerSecond"`
	Error       string  `json:"error,omitempty"`
}

const running = "running"

func observe(ctx context.Context, l *lab.Lab) (report, error) {
	const budget = 3 * time.Second // total time for measuring throughput

	r := report{OK: true, Hosts: []hostReport{}, Leases: []leaseReport{}, Matrix: []cellReport{}}
	for _, c := range l.Matrix(ctx, l.Families(), budget) {
		cell := cellReport{
			From: c.From.Name(), To: c.To.Name(),
			FromAddress: c.From.Addr(c.Family).String(), ToAddress: c.To.Addr(c.Family).String(),
			Family: c.Family.String(), OK: c.Err == nil,
			RTT: float64(c.RTT) / float64(time.Millisecond), Throughput: c.BitsPerSecond,
		}
		if c.Err != nil {
			cell.Error = c.Err.Error()
			r.OK = false
		}
		r.Matrix = append(r.Matrix, cell)
	}

	for _, h := range l.Hosts() {
		host, err := observeHost(ctx, l, h)
		if err != nil {
			return r, err
		}
		r.OK = r.OK && host.Flanneld == running
		r.Hosts = append(r.Hosts, host)
	}

	// Continue without the store, because the effects of an outage are worth watching.
	if err := r.readLeases(ctx, l); err != nil {
		r.LeasesError = err.Error()
	}
	return r, nil
}

func (r *report) readLeases(ctx context.Context, l *lab.Lab) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()

	leases, err := l.Leases(ctx)
	if err != nil {
		return err
	}

	for _, lease := range leases {
		value := json.RawMessage(lease.Value)
		if !json.Valid(value) {
			value, _ = json.Marshal(lease.Value) // a text has a form in JSON
		}

		r.Leases = append(r.Leases, leaseReport{Network: lease.Network, Subnet: lease.Key, Value: value, Seconds: int(lease.TTL.Seconds())})
	}
	return nil
}

func observeHost(ctx context.Context, l *lab.Lab, h *lab.Host) (hostReport, error) {
	r := hostReport{Name: h.Name(), Flanneld: running, PID: h.Daemon().PID(), Enter: h.Nsenter(), Routes: []string{}}
	if err := h.Daemon().Ended(); err != nil {
		r.Flanneld = err.Error()
	}

	var own []prefix.Family
	for _, p := range h.Pods() {
		pod := podReport{Name: p.Name(), MTU: p.MTU(), Enter: p.Nsenter()}
		for _, a := range p.Addrs() {
			pod.Addresses = append(pod.Addresses, a.String())
			own = append(own, prefix.FamilyOf(a))
		}
		r.Pods = append(r.Pods, pod)
	}

	routes, err := h.Routes(ctx)
	if err != nil {
		return r, err
	}

	for _, route := range routes {
		f := prefix.FamilyOf(route.Dst.Addr())
		kernels := route.Protocol == unix.RTPROT_KERNEL || l.IsBridge(route.Dev)
		if !kernels && !route.Refuses && slices.Contains(own, f) && l.HasPods(route.Dst) {
			r.Routes = append(r.Routes, route.String())
		}
	}
	return r, nil
}

// verdict is nil if every pod is reachable, every daemon runs, and the leases can be read.
func (r report) verdict() error {
	failed := 0
	for _, c := range r.Matrix {
		if !c.OK {
			failed++
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d cells failed", failed, len(r.Matrix))
	}

	for _, h := range r.Hosts {
		if h.Flanneld != running {
			return fmt.Errorf("flanneld has ended: %s", h.Flanneld)
		}
	}
	if r.LeasesError != "" {
		return errors.New(r.LeasesError)
	}
	return nil
}

// fingerprint changes if the report is worth printing again. It omits measured values and the
// remaining time of leases, which change all the time.
func (r report) fingerprint() string {
	var b strings.Builder
	for _, c := range r.Matrix {
		fmt.Fprintln(&b, c.FromAddress, c.ToAddress, c.Error)
	}
	for _, h := range r.Hosts {
		fmt.Fprintln(&b, h.Name, h.Flanneld, h.Routes)
	}
	for _, l := range r.Leases {
		fmt.Fprintln(&b, l.Network, l.Subnet, string(l.Value))
	}
	fmt.Fprintln(&b, r.LeasesError)
	return b.String()
}

func (r report) text() string {
	var b strings.Builder
	w := table(&b) // it aligns the columns of each table, which ends before a line without any
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		r.writeMatrix(w, f.String())
	}
	r.writeLeases(w)
	r.writeHosts(w)
	w.Flush()
	return b.String()
}

const (
	maxColumns  = 6  // maximum number of pods in a table with names and figures, and of hosts in hints
	maxFailures = 10 // maximum number of failures that are printed for a family
)

func (r report) writeMatrix(w io.Writer, family string) {
	cells := map[[2]string]cellReport{}
	var pods, labels, failures []string
	for _, c := range r.Matrix {
		if c.Family != family {
			continue
		}
		cells[[2]string{c.From, c.To}] = c
		if !slices.Contains(pods, c.From) {
			pods = append(pods, c.From)
			labels = append(labels, c.From+" "+c.FromAddress)
		}
		if !c.OK {
			failures = append(failures, c.Error)
		}
	}
	if len(cells) == 0 {
		return
	}

	short := len(pods) > maxColumns
	mesh.Grid(w, family+" FROM", pods, labels, short, func(from, to int) string {
		return cells[[2]string{pods[from], pods[to]}].text(short)
	})
	fmt.Fprintf(w, "%d of %d reachable%s\n", len(cells)-len(failures), len(cells), r.span(family))
	for i, text := range failures {
		if i == maxFailures {
			fmt.Fprintf(w, "and %d more\n", len(failures)-i)
			break
		}
		fmt.Fprintf(w, "FAIL: %s\n", text)
	}
	fmt.Fprintln(w)
}

func (c cellReport) text(short bool) string {
	switch {
	case c.From == "":
		return "-"
	case !c.OK && short:
		return "FAIL"
	case !c.OK:
		return "FAIL: " + c.Error[strings.LastIndex(": "+c.Error, ": "):] // the innermost cause
	case short:
		return "ok"
	}
	return milliseconds(c.RTT) + " " + bits(c.Throughput)
}

func (r report) span(family string) string {
	var rtt, bps []float64
	for _, c := range r.Matrix {
		if c.Family == family && c.OK {
			rtt = append(rtt, c.RTT)
			bps = append(bps, c.Throughput)
		}
	}
	if len(rtt) == 0 {
		return ""
	}
	return fmt.Sprintf(", round trip %s to %s, throughput %s to %s",
		milliseconds(slices.Min(rtt)), milliseconds(slices.Max(rtt)), bits(slices.Min(bps)), bits(slices.Max(bps)))
}

func milliseconds(ms float64) string { return fmt.Sprintf("%.2fms", ms) }

func bits(bps float64) string {
	if bps >= 1e9 {
		return fmt.Sprintf("%.1fGbit/s", bps/1e9)
	}
	if bps >= 1e6 {
		return fmt.Sprintf("%.1fMbit/s", bps/1e6)
	}
	return fmt.Sprintf("%.1fkbit/s", bps/1e3)
}

func (r report) writeLeases(w io.Writer) {
	if r.LeasesError != "" {
		fmt.Fprintf(w, "LEASES CANNOT BE READ\n%s\n\n", r.LeasesError)
		return
	}

	several := slices.ContainsFunc(r.Leases, func(l leaseReport) bool { return l.Network != "" })
	if several {
		fmt.Fprint(w, "NETWORK\t")
	}

	fmt.Fprintln(w, "LEASE\tPUBLIC IP\tBACKEND\tEXPIRES")
	for _, l := range r.Leases {
		if several {
			fmt.Fprintf(w, "%s\t", l.Network)
		}

		var v struct{ PublicIP, PublicIPv6, BackendType string }
		if err := json.Unmarshal(l.Value, &v); err != nil {
			fmt.Fprintf(w, "%s\tunreadable\t\t\n", l.Subnet)
			continue
		}

		var public []string
		for _, ip := range []string{v.PublicIP, v.PublicIPv6} {
			if ip != "" && ip != "0.0.0.0" && ip != "::" {
				public = append(public, ip)
			}
		}

		expires := "never"
		if l.Seconds > 0 {
			expires = "in " + (time.Duration(l.Seconds) * time.Second).String()
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", l.Subnet, strings.Join(public, " "), cmp.Or(v.BackendType, "-"), expires)
	}
	fmt.Fprintln(w)
}

func (r report) writeHosts(w io.Writer) {
	fmt.Fprintln(w, "HOST\tROUTES TO OTHER HOSTS' PODS")
	for _, h := range r.Hosts {
		name := h.Name
		if h.Flanneld != running {
			fmt.Fprintf(w, "%s\tflanneld has ended: %s\n", name, h.Flanneld)
			name = ""
		}
		for _, route := range h.Routes {
			fmt.Fprintf(w, "%s\t%s\n", name, route)
			name = ""
		}
		if name != "" {
			fmt.Fprintf(w, "%s\tnone\n", name)
		}
	}
}

func (r report) hints() string {
	var b strings.Builder
	w := table(&b)
	fmt.Fprintln(w, "TO LOOK INSIDE\tRUN")

	for i, h := range r.Hosts {
		if i == maxColumns {
			fmt.Fprintf(w, "%d more\tsee --json\n", len(r.Hosts)-i)
			break
		}
		fmt.Fprintf(w, "%s\t%s\n", h.Name, h.Enter)
		for _, p := range h.Pods {
			fmt.Fprintf(w, "%s\t%s\n", p.Name, p.Enter)
		}
	}
	w.Flush()
	return b.String()
}

func table(b *strings.Builder) *tabwriter.Writer { return tabwriter.NewWriter(b, 0, 0, 3, ' ', 0) }
