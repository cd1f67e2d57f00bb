// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/flanneld/flanneld/test/chart"
	"github.com/flanneld/flanneld/test/must"
)

// Save writes a report as results.json, and each chart as an SVG file with its name, into a
// folder. It creates the folder if necessary.
func Save(folder string, report any, charts map[string]chart.Chart) {
	must.Do(os.MkdirAll(folder, 0o755))
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", " ")
	must.Do(e.Encode(report))
	must.Do(os.WriteFile(filepath.Join(folder, "results.json"), text.Bytes(), 0o644))
	for name, c := range charts {
		must.Do(os.WriteFile(filepath.Join(folder, name+".svg"), c.SVG(), 0o644))
	}
}

// Insert replaces the results on a page of the documentation. They are between two lines, the
// first of which names the command that writes the results. Insert leaves the page unchanged if it
// does not have these lines.
func Insert(page, command string, results func(io.Writer)) {
	begin := "<!-- results: written by " + command + " -->\n"
	end := "<!-- end of results -->\n"
	head, rest, ok := strings.Cut(string(must.Get(os.ReadFile(page))), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		must.Fail("%s has no place for results: want the lines %q and %q", page, begin, end)
	}

	var inserted strings.Builder
	results(&inserted)
	must.Do(os.WriteFile(page, []byte(head+begin+"\n"+inserted.String()+"\n"+end+tail), 0o644))
}
