// SPDX-License-Identifier: Apache-2.0

package options

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestHelp(t *testing.T) {
	golden := filepath.Join("testdata", "help.golden")
	if *update {
		if err := os.WriteFile(golden, []byte(Help()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), Help()); diff != "" {
		t.Errorf("help text (-want +got):\n%s", diff)
	}
	for line := range strings.SplitSeq(Help(), "\n") {
		if len(line) > helpWidth {
			t.Errorf("line of %d columns: %s", len(line), line)
		}
	}
}

func TestHelpNamesEveryFlag(t *testing.T) {
	help := Help()
	for _, s := range settings(&Options{}) {
		if !strings.Contains(help, "\n  --"+s.name) {
			t.Errorf("no entry for --%s", s.name)
		}
		if s.name != "version" && !strings.Contains(help, " "+Variable(s.name)+"\n") {
			t.Errorf("no entry for %s", Variable(s.name))
		}
		if s.usage == "" {
			t.Errorf("--%s has no usage", s.name)
		}
	}
}
