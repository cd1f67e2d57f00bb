// SPDX-License-Identifier: Apache-2.0

// Package scripttest runs scripts that say how the tested code behaves. Each line is a command or a comment. The lines
// below it that begin with four blanks say what the code does then, and when.
package scripttest

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write what the scripts print into them")

const indent = "    "

// Run calls play with each script in testdata, and compares the result with the script. With -update it writes the
// result into the script.
func Run(t *testing.T, play func(t *testing.T, script string) (played string)) {
	scripts, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, path := range scripts {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			got := play(t, string(want))
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("the code does something else (-script +code):\n%s", diff)
			}
		})
	}
}

// Transcript is a script that is being played. It is safe for concurrent use.
type Transcript struct {
	mu    sync.Mutex
	lines []line
}

// line is a line of the script. at and last belong to what the code does.
type line struct {
	text string
	at   time.Duration
	last bool
}

// Play calls command for each command of a script.
func (p *Transcript) Play(script string, command func(name string, args []string)) {
	for text := range strings.Lines(script) {
		if strings.HasPrefix(text, indent) {
			continue
		}
		p.mu.Lock()
		p.lines = append(p.lines, line{text: text})
		p.mu.Unlock()
		if words := strings.Fields(text); len(words) > 0 && words[0] != "#" {
			command(words[0], words[1:])
		}
	}
}

// Did adds a line about what the code does at a time since the start. Goroutines do several things at one moment, in any
// order, so lines with last come after the others of their moment, sorted.
func (p *Transcript) Did(at time.Duration, last bool, what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := line{fmt.Sprintf("%s%-8s %s\n", indent, at.Round(time.Millisecond), what), at, last}
	i := len(p.lines)
	for ; i > 0 && p.lines[i-1].last && p.lines[i-1].at == at && (!last || l.text < p.lines[i-1].text); i-- {
		continue
	}
	p.lines = slices.Insert(p.lines, i, l)
}

func (p *Transcript) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out strings.Builder
	for _, l := range p.lines {
		out.WriteString(l.text)
	}
	return out.String()
}
