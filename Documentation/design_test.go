// SPDX-License-Identifier: Apache-2.0

package documentation_test

import (
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// packageRow matches a row of the drawing of packages on the page about the design: a package and, after
// commas, others of the same folder, and then the text, which may continue on indented lines.
var packageRow = regexp.MustCompile(`(?m)^([A-Za-z][^\s,]*(?:, [^\s,]+)*)(.*(?:\n .*)*)`)

// drawing returns for each package on the page about the design how many rows it has, and the packages after
// the arrow in its row.
func drawing(t *testing.T) (rows map[string]int, arrows map[string][]string) {
	t.Helper()
	page, err := os.ReadFile("design.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "## Find your way in the packages\n")
	rows, arrows = map[string]int{}, map[string][]string{}
	for _, row := range packageRow.FindAllStringSubmatch(fenced.FindString(section), -1) {
		names := strings.Split(row[1], ", ")
		_, arrow, _ := strings.Cut(row[2], "→ ")
		for i, name := range names {
			if i > 0 {
				name = path.Join(path.Dir(names[0]), name)
			}
			rows[name]++
			arrows[name] = strings.Split(arrow, ", ")
		}
	}
	return rows, arrows
}

// imports returns the packages of the module that each of its packages imports outside of tests. The names
// lack the path of the module.
func imports(t *testing.T) map[string][]string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Module.Path}} {{.ImportPath}} {{join .Imports \" \"}}", "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	all := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		module := fields[0] + "/"
		name := strings.TrimPrefix(fields[1], module)
		all[name] = nil
		for _, imported := range fields[2:] {
			if own, ok := strings.CutPrefix(imported, module); ok {
				all[name] = append(all[name], own)
			}
		}
	}
	return all
}

// TestDesignListsAllPackages checks that the list of packages on the page about the design
// contains each package of the module once, and nothing else.
func TestDesignListsAllPackages(t *testing.T) {
	rows, _ := drawing(t)
	for name := range imports(t) {
		if rows[name] != 1 {
			t.Errorf("design.md: the list of packages has %s %d times, want once", name, rows[name])
		}
		delete(rows, name)
	}
	for name := range rows {
		t.Errorf("design.md: the list of packages has %s, which is not a package", name)
	}
}

// TestDesignDrawsAllImports checks that every import is in the drawing of packages, and that none leads to a
// higher floor. Packages for tests may import any.
func TestDesignDrawsAllImports(t *testing.T) {
	_, arrows := drawing(t)
	for name, imported := range imports(t) {
		if floor(name) == tests {
			continue
		}
		for _, other := range imported {
			if floor(other) > floor(name) {
				t.Errorf("%s imports %s, which is on a higher floor", name, other)
			}
			if floor(name) == parts && floor(other) == parts && folder(name) != folder(other) {
				t.Errorf("%s imports %s, which stands beside it", name, other)
			}
			if !slices.ContainsFunc(arrows[name], func(target string) bool { return covers(target, name, other) }) {
				t.Errorf("design.md: the row of %s does not have the import of %s", name, other)
			}
		}
	}
}

// The floors, from the lowest one.
const (
	tests = iota
	base
	parts // of the kernel, of a cloud, and probes; none imports another
	reports
	leases
	backends
	flags
	daemons
	commands
)

func floor(name string) int {
	in := func(folder string) bool { return name == folder || strings.HasPrefix(name, folder+"/") }
	switch {
	case in("test"), strings.HasSuffix(name, "test"):
		return tests
	case in("cmd"):
		return commands
	case in("backend/builtin"), in("pkg/daemon"):
		return daemons
	case in("pkg/options"):
		return flags
	case in("backend"):
		return backends
	case in("subnet"):
		return leases
	case in("pkg/report"):
		return reports
	case in("pkg/kernel"), in("pkg/probe"), in("pkg/cloud"):
		return parts
	case in("pkg/base"):
		return base
	}
	return tests // Documentation and dist
}

func folder(name string) string {
	first, rest, _ := strings.Cut(name, "/")
	second, _, _ := strings.Cut(rest, "/")
	return path.Join(first, second)
}

// covers reports whether target, which is after the arrow in the row of the package name, includes the import
// of other. target is "" if there is no arrow.
func covers(target, name, other string) bool {
	switch target {
	case "", "pkg":
		return strings.HasPrefix(other, "pkg/") && floor(other) <= floor(name)
	case "everything below":
		return floor(other) < floor(name)
	case "the backends":
		return floor(other) == backends
	}
	return other == target
}
