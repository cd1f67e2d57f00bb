// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/flanneld/flanneld/test/chart"
)

// Save writes a report as results.json, and each chart as an SVG file with its name, into a
// folder. It creates the folder if necessary.
func Save(folder string, report any, charts map[string]chart.Chart) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", " ")
	if err := e.Encode(report); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, "results.json"), text.Bytes(), 0o644); err != nil {
		return err
	}

	for name, c := range charts {
		if err := os.WriteFile(filepath.Join(folder, name+".svg"), c.SVG(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// Insert replaces the results on a page of the documentation. They are between two lines, the
// first of which names the command that writes the results. Insert returns an error and
// leaves the page unchanged if it does not have these lines.
func Insert(page, command string, results func(io.Writer)) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	begin := "<!-- results: written by " + command + " -->\n"
	end := "<!-- end of results -->\n"
	head, rest, ok := strings.Cut(string(text), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no place for results: want the lines %q and %q", page, begin, end)
	}

	var inserted strings.Builder
	results(&inserted)
	return os.WriteFile(page, []byte(head+begin+"\n"+inserted.String()+"\n"+end+tail), 0o644)
}
