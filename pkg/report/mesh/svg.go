// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bytes"
	"fmt"
	"html"
	"io"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// The sizes of a picture, in pixels.
const (
	cellSize   = 16
	charWidth  = 7 // of a label
	lineHeight = 20
	maxLabel   = 40 // bytes
)

// style makes a picture legible on light and dark backgrounds: it has its own background, and colours for
// both. Broken paths also have a letter, for those who cannot tell the colours apart.
const style = `
:root{color-scheme:light dark;--page:#fff;--text:#1f2328;--none:#d0d7de;--r0:#2da44e;--r1:#7bc96f;--r2:#c6d84f;--r3:#e3b341;--bad:#c62828;--on-bad:#fff}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--text:#e6edf3;--none:#3d444d;--r0:#238636;--r1:#3f9142;--r2:#8a8f2c;--r3:#a87b1a;--bad:#ff7b72;--on-bad:#0d1117}}
text{font:12px ui-monospace,monospace;fill:var(--text)}
.page{fill:var(--page)}.unknown{fill:var(--none)}.r0{fill:var(--r0)}.r1{fill:var(--r1)}.r2{fill:var(--r2)}.r3{fill:var(--r3)}.broken{fill:var(--bad)}
.letter{fill:var(--on-bad);text-anchor:middle;font-weight:bold}.row{text-anchor:end}
`

// SVG writes the matrix as a picture that needs no other files. It shows at most MaxCells hosts, the worst
// ones.
func (m *Matrix) SVG(w io.Writer) error {
	var b bytes.Buffer
	shown := m.drawn(MaxCells)
	s := m.Summary()
	longest := 0
	for _, i := range shown {
		longest = max(longest, len([]rune(m.label(i))))
	}

	left := longest*charWidth + cellSize
	top := left + 2*lineHeight
	side := len(shown) * cellSize
	title := fmt.Sprintf("%d hosts, paths: %s", len(m.Hosts), s.Counts)
	if len(shown) < len(m.Hosts) {
		title += fmt.Sprintf("; the %d worst hosts", len(shown))
	}

	key := explanation()
	width := max(left+side+left, len(title)*charWidth+2*cellSize, 300)
	height := top + side + (len(key)+1)*lineHeight
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="title">`, width, height, width, height)
	fmt.Fprintf(&b, "\n<title id=\"title\">%s</title>\n<style>%s</style>\n", html.EscapeString(title), style)
	fmt.Fprintf(&b, `<rect class="page" width="%d" height="%d"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", cellSize, lineHeight, html.EscapeString(title))

	for n, i := range shown {
		x := left + n*cellSize
		y := top + n*cellSize
		fmt.Fprintf(&b, `<text class="row" x="%d" y="%d">%s</text>`+"\n", left-4, y+cellSize-4, html.EscapeString(m.label(i)))
		fmt.Fprintf(&b, `<text transform="translate(%d %d) rotate(-90)">%s</text>`+"\n", x+cellSize-4, top-4, html.EscapeString(m.label(i)))
	}

	for row, from := range shown {
		for column, to := range shown {
			if from != to {
				m.draw(&b, from, to, left+column*cellSize, top+row*cellSize)
			}
		}
	}

	for n, k := range key {
		y := top + side + (n+1)*lineHeight
		k.draw(&b, cellSize, y-cellSize+4, k.Advice)
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", 2*cellSize+4, y, html.EscapeString(k.Advice))
	}

	b.WriteString("</svg>\n")
	_, err := b.WriteTo(w)
	return err
}

// draw writes a cell of the matrix, with the upper left corner at x and y. The title describes the path:
// browsers show it beside the pointer.
func (m *Matrix) draw(b *bytes.Buffer, from, to, x, y int) {
	c := m.Cell(from, to)
	text := fmt.Sprintf("%s -> %s: %s", m.Hosts[from].Name, m.Hosts[to].Name, c.words())
	if c.Advice != "" {
		text += ": " + c.Advice
	}
	c.draw(b, x, y, text)
}

func (c Cell) draw(b *bytes.Buffer, x, y int, title string) {
	kind := "broken"
	switch c.Result {
	case OK:
		kind = fmt.Sprintf("r%d", c.class())
	case Unknown:
		kind = "unknown"
	}
	fmt.Fprintf(b, `<g><title>%s</title><rect class="%s" x="%d" y="%d" width="%d" height="%d"/>`, html.EscapeString(title), kind, x, y, cellSize-1, cellSize-1)
	if c.Result.Broken() {
		fmt.Fprintf(b, `<text class="letter" x="%d" y="%d">%s</text>`, x+cellSize/2, y+cellSize-4, c.mark())
	}
	b.WriteString("</g>\n")
}

// explanation returns a cell of each kind, with what it means in place of an advice.
func explanation() []Cell {
	var lines []Cell
	below := 0.0
	for _, c := range classes() {
		lines = append(lines, Cell{Result: OK, RTT: below, Advice: "round trip " + c.text})
		below = c.below
	}

	for _, r := range results() {
		switch r {
		case OK:
		case Unknown:
			lines = append(lines, Cell{Result: r, Advice: "unknown"})
		default:
			lines = append(lines, Cell{Result: r, Advice: "broken: " + string(r)})
		}
	}
	return lines
}

// label returns the name of a host, shortened.
func (m *Matrix) label(i int) string { return oneline.Shorten(m.Hosts[i].Name, maxLabel) }
