// SPDX-License-Identifier: Apache-2.0

// Package chart draws bar charts as SVG documents.
package chart

import (
	"bytes"
	"fmt"
	"html"
	"math"
)

// Chart is a bar chart.
type Chart struct {
	Title string
	Unit  string // printed below the axis
	Bars  []Bar
}

// Bar is one row of a chart. The bar shows the median, and a whisker shows the range
// from Low to Top unless both are equal.
type Bar struct {
	Label            string
	Class            string // style of the bar: ours, limit or target
	Median, Low, Top float64
}

// Number formats a value with three digits, but with at most two decimals. It does
// not round the integer part.
func Number(v float64) string {
	digits := 2 - int(math.Floor(math.Log10(max(math.Abs(v), 0.001))))
	return fmt.Sprintf("%.*f", min(max(digits, 0), 2), v)
}

// Sizes in SVG units, which are pixels if the picture is not scaled.
const (
	chartWidth = 760
	labelWidth = 300
	valueWidth = 70 // space to the right of the axis, for the value beside the longest bar
	rowHeight  = 24
	barHeight  = 14
	headHeight = 44
	footHeight = 34
)

// chartStyle contains styles for pages with a light and with a dark colour scheme.
const chartStyle = `<style>
text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600;font-size:15px}.small{font-size:11px;fill:#59636e}
.ours{fill:#0969da}.limit{fill:#8c959f}.target{fill:#bf8700}.grid{stroke:#d1d9e0}.whisker{stroke:#1f2328}
@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.small{fill:#9198a1}.ours{fill:#4493f8}.limit{fill:#656c76}.target{fill:#d29922}.grid{stroke:#3d444d}.whisker{stroke:#f0f6fc}}
</style>
`

// SVG returns the chart as an SVG document.
func (c Chart) SVG() []byte {
	var top float64
	for _, b := range c.Bars {
		top = max(top, b.Top, b.Median)
	}

	step, ticks := scale(top)
	const axis = float64(chartWidth - labelWidth - valueWidth)
	x := func(v float64) float64 { return labelWidth + v/(step*float64(ticks))*axis }
	height := headHeight + rowHeight*len(c.Bars) + footHeight
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s">`+"\n",
		chartWidth, height, chartWidth, height, html.EscapeString(c.Title))
	out.WriteString(chartStyle)
	fmt.Fprintf(&out, `<text class="title" x="8" y="22">%s</text>`+"\n", html.EscapeString(c.Title))
	bottom := headHeight + rowHeight*len(c.Bars)
	for i := range ticks + 1 {
		v := step * float64(i)
		fmt.Fprintf(&out, `<line class="grid" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`, x(v), headHeight-6, x(v), bottom)
		fmt.Fprintf(&out, `<text class="small" x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", x(v), bottom+14, label(v, step))
	}

	fmt.Fprintf(&out, `<text class="small" x="%d" y="%d" text-anchor="end">%s</text>`+"\n", chartWidth-8, bottom+28, html.EscapeString(c.Unit))
	for i, b := range c.Bars {
		y := headHeight + rowHeight*i
		middle := float64(y) + barHeight/2
		fmt.Fprintf(&out, `<text x="%d" y="%.1f" text-anchor="end">%s</text>`, labelWidth-8, middle+4, html.EscapeString(b.Label))
		fmt.Fprintf(&out, `<rect class="%s" x="%d" y="%d" width="%.1f" height="%d"/>`, b.Class, labelWidth, y, max(1, x(b.Median)-labelWidth), barHeight)
		if b.Low < b.Top {
			fmt.Fprintf(&out, `<path class="whisker" fill="none" d="M%.1f %.1fH%.1fM%.1f %.1fv8M%.1f %.1fv8"/>`,
				x(b.Low), middle, x(b.Top), x(b.Low), middle-4, x(b.Top), middle-4)
		}
		fmt.Fprintf(&out, `<text class="small" x="%.1f" y="%.1f">%s</text>`+"\n", x(max(b.Median, b.Top))+6, middle+4, Number(b.Median))
	}
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// scale returns a round step for the marks of the axis, and the number of steps after
// which the axis reaches top.
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
