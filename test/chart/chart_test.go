// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"testing"
)

func TestChart(t *testing.T) {
	c := Chart{Title: "less < more", Unit: "ms", Bars: []Bar{{Label: "a & b", Class: "ours", Median: 3, Low: 2, Top: 1234.5}, {Label: "none"}}}
	for d := xml.NewDecoder(bytes.NewReader(c.SVG())); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%v in:\n%s", err, c.SVG())
		}
	}
	for _, top := range []float64{0.3, 1, 7, 99, 1000, 12345} {
		if step, ticks := scale(top); step*float64(ticks) < top || step*float64(ticks) > 3*top {
			t.Errorf("a scale to %v has %d steps of %v", top, ticks, step)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0.00", 0.123: "0.12", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 12345: "12345"} {
		if got := Number(v); got != want {
			t.Errorf("Number(%v) = %q, want %q", v, got, want)
		}
	}
}
