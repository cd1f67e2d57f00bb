package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
)

// chart is a bar chart. A bar shows the median, a whisker the range.
type chart struct {
	title string
	unit  string
	bars  []bar
}

type bar struct {
	label            string
	class            string // ours, limit or target
	median, low, top float64
}

// In SVG units, which are pixels if the picture is not scaled.
const (
	chartWidth = 760
	labelWidth = 300
	valueWidth = 70 // right of the axis, for the value at the longest bar
	rowHeight  = 24
	barHeight  = 14
	headHeight = 44
	footHeight = 34
)

// Styles for pages with a light and with a dark colour scheme.
const chartStyle = `<style>
text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600;font-size:15px}.small{font-size:11px;fill:#59636e}
.ours{fill:#0969da}.limit{fill:#8c959f}.target{fill:#bf8700}.grid{stroke:#d1d9e0}.whisker{stroke:#1f2328}
@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.small{fill:#9198a1}.ours{fill:#4493f8}.limit{fill:#656c76}.target{fill:#d29922}.grid{stroke:#3d444d}.whisker{stroke:#f0f6fc}}
</style>
`

// svg returns the chart as an SVG document.
func (c chart) svg() []byte {
	var top float64
	for _, b := range c.bars {
		top = max(top, b.top, b.median)
	}
	step, ticks := scale(top)
	const axis = float64(chartWidth - labelWidth - valueWidth)
	x := func(v float64) float64 { return labelWidth + v/(step*float64(ticks))*axis }
	height := headHeight + rowHeight*len(c.bars) + footHeight
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s">`+"\n",
		chartWidth, height, chartWidth, height, html.EscapeString(c.title))
	out.WriteString(chartStyle)
	fmt.Fprintf(&out, `<text class="title" x="8" y="22">%s</text>`+"\n", html.EscapeString(c.title))
	bottom := headHeight + rowHeight*len(c.bars)
	for i := range ticks + 1 {
		v := step * float64(i)
		fmt.Fprintf(&out, `<line class="grid" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`, x(v), headHeight-6, x(v), bottom)
		fmt.Fprintf(&out, `<text class="small" x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", x(v), bottom+14, label(v, step))
	}
	fmt.Fprintf(&out, `<text class="small" x="%d" y="%d" text-anchor="end">%s</text>`+"\n", chartWidth-8, bottom+28, html.EscapeString(c.unit+", median and range"))
	for i, b := range c.bars {
		y := headHeight + rowHeight*i
		middle := float64(y) + barHeight/2
		fmt.Fprintf(&out, `<text x="%d" y="%.1f" text-anchor="end">%s</text>`, labelWidth-8, middle+4, html.EscapeString(b.label))
		fmt.Fprintf(&out, `<rect class="%s" x="%d" y="%d" width="%.1f" height="%d"/>`, b.class, labelWidth, y, max(1, x(b.median)-labelWidth), barHeight)
		if b.low < b.top {
			fmt.Fprintf(&out, `<path class="whisker" fill="none" d="M%.1f %.1fH%.1fM%.1f %.1fv8M%.1f %.1fv8"/>`,
				x(b.low), middle, x(b.top), x(b.low), middle-4, x(b.top), middle-4)
		}
		fmt.Fprintf(&out, `<text class="small" x="%.1f" y="%.1f">%s</text>`+"\n", x(max(b.median, b.top))+6, middle+4, number(b.median))
	}
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// scale returns a round step of the axis, and the number of steps that reach top.
func scale(top float64) (step float64, ticks int) {
	if top <= 0 {
		return 1, 1
	}
	step = math.Pow(10, math.Floor(math.Log10(top)))
	for _, divisor := range []float64{5, 2} {
		if top/(step/divisor) <= 8 {
			step /= divisor
			break
		}
	}
	return step, int(math.Ceil(top / step * 0.9999))
}

func label(v, step float64) string {
	return fmt.Sprintf("%.*f", max(0, int(math.Ceil(-math.Log10(step)))), v)
}

// charts returns the charts for which the report has data, by file name.
func (r *report) charts() map[string]chart {
	all := map[string]chart{
		"cold":       {title: "Cold start: from exec to the last kernel object", unit: "milliseconds"},
		"latency":    {title: "One lease: from the write to etcd to the kernel", unit: "milliseconds"},
		"latency99":  {title: "One lease: the slowest one in a hundred", unit: "milliseconds"},
		"cpu":        {title: "One lease: CPU time of the daemon, by number of peers", unit: "milliseconds"},
		"memory":     {title: "Memory at rest, vxlan", unit: "megabytes"},
		"cold-ratio": {title: "Cold start, in multiples of a bare client and the kernel's own limit", unit: "times"},
	}
	draw := func(name, label, class string, m *metric) {
		if m == nil {
			return
		}
		c := all[name]
		c.bars = append(c.bars, bar{label, class, m.median(), slices.Min(m.Values), slices.Max(m.Values)})
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
		for chart, q := range map[string]string{"latency": "p50", "latency99": "p99"} {
			draw(chart, fmt.Sprintf("added, %d peers", n), "ours", r.find(lease, "added, "+q, n))
			draw(chart, fmt.Sprintf("removed, %d peers", n), "ours", r.find(lease, "removed, "+q, n))
			draw(chart, "etcd watch alone", "limit", r.find(lease, "bare etcd watch, "+q, n))
		}
		draw("cpu", fmt.Sprintf("%d peers", n), "ours", r.find(lease, "CPU an event", n))
	}
	for _, n := range r.sizes("vxlan, at rest", "RSS") {
		draw("memory", fmt.Sprintf("%d peers: anonymous", n), "ours", r.find("vxlan, at rest", "RSS, anonymous", n))
		draw("memory", fmt.Sprintf("%d peers: of files", n), "limit", r.find("vxlan, at rest", "RSS, of files", n))
	}
	for name, c := range all {
		if len(c.bars) == 0 {
			delete(all, name)
		}
	}
	return all
}
