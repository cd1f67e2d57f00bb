// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/options"
)

// schema is the part of values.schema.json that the tests read.
type schema struct {
	Ref        string `json:"$ref"`
	Enum       []any
	Properties map[string]*schema
	// AdditionalProperties is false in objects that refuse unknown values.
	AdditionalProperties *bool
	Definitions          map[string]*schema
}

func readSchema(t *testing.T) *schema {
	t.Helper()
	text, err := os.ReadFile("chart/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var root schema
	if err := json.Unmarshal(text, &root); err != nil {
		t.Fatal(err)
	}
	return &root
}

// names returns the names of all values below s, with dots, without those that contain others.
func (s *schema) names(t *testing.T, root *schema, prefix string) []string {
	t.Helper()
	if definition, ok := strings.CutPrefix(s.Ref, "#/definitions/"); ok {
		s = root.Definitions[definition]
	}
	if len(s.Properties) == 0 {
		return []string{strings.TrimSuffix(prefix, ".")}
	}
	// Parent charts put the values of all their charts into global.
	if prefix != "global." && (s.AdditionalProperties == nil || *s.AdditionalProperties) {
		t.Errorf("%s: the schema allows unknown values", prefix)
	}
	var all []string
	for key, value := range s.Properties {
		all = append(all, value.names(t, root, prefix+key+".")...)
	}
	slices.Sort(all)
	return all
}

// valueDoc is a line of values.yaml that sets a value, or a comment that shows how to set it.
type valueDoc struct {
	name, def, doc string
	unset          bool // it is in a comment
}

var (
	valueLine   = regexp.MustCompile(`^( *)(# )?(\w+):(?: +([^#\s].*?))?(?: +# (.*))?$`)
	commentLine = regexp.MustCompile(`^ *# (.*)$`)
)

// readDocs reads values.yaml line by line: the comment of a value is above it, or at the end of
// its line. A value in a comment has a comment at its end.
func readDocs(t *testing.T) []valueDoc {
	t.Helper()
	text, err := os.ReadFile("chart/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var all []valueDoc
	var above, path []string
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		m := valueLine.FindStringSubmatch(line)
		if comment := commentLine.FindStringSubmatch(line); comment != nil && (m == nil || m[5] == "") {
			above = append(above, comment[1])
			continue
		}
		if m != nil {
			path = append(path[:len(m[1])/2], m[3])
			doc := strings.TrimSpace(strings.Join(above, " ") + " " + m[5])
			all = append(all, valueDoc{strings.Join(path, "."), m[4], doc, m[2] != ""})
		}
		if m == nil || m[2] == "" {
			above = nil
		}
	}
	return all
}

// TestReadme checks that values.yaml explains exactly the values that the schema allows, that it
// marks those as new which flannel's chart does not have, and that README.md lists them all.
func TestReadme(t *testing.T) {
	root := readSchema(t)
	names := slices.DeleteFunc(root.names(t, root, ""), func(name string) bool { return name == "enabled" })
	text, err := os.ReadFile("chart/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var defaults any
	if err := yaml.Unmarshal(text, &defaults); err != nil {
		t.Fatal(err)
	}

	var table strings.Builder
	documented := map[string]bool{}
	for _, v := range readDocs(t) {
		if !slices.Contains(names, v.name) {
			continue // it contains values, or is in one
		}
		documented[v.name] = true
		doc, isNew := strings.CutSuffix(v.doc, "(new)")
		if isNew == isFlannelValue(v.name) {
			t.Errorf("%s: marked as new: %v, want %v", v.name, isNew, !isNew)
		}
		if strings.TrimSpace(doc) == "" {
			t.Errorf("%s: no comment in values.yaml", v.name)
		}
		if v.def == "" || v.def == "|" { // on the lines after the name
			raw, err := json.Marshal(lookup(defaults, strings.ReplaceAll(v.name, ".", "/")))
			if err != nil {
				t.Fatal(err)
			}
			v.def = string(raw)
		}
		switch {
		case v.unset:
			v.def = "unset"
		case len(v.def) > 80:
			v.def = "as in values.yaml"
		default:
			v.def = "`" + v.def + "`"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", v.name, v.def, v.doc)
	}
	if diff := cmp.Diff(names, slices.Sorted(maps.Keys(documented))); diff != "" {
		t.Errorf("values (-schema +values.yaml):\n%s", diff)
	}
	expectFile(t, "chart/README.md", `# Helm chart of flanneld

[How to install it](https://github.com/flanneld/flanneld/blob/main/Documentation/kubernetes.md#install-with-helm).
The chart replaces flannel's: values of that have the same names and effects. Others are marked (new). Unknown values
are refused. `+"`go test ./dist/kubernetes -update`"+` generates this page from values.yaml.

| Value | Default | Meaning |
|---|---|---|
`+table.String())
}

// TestSchemaHasAllBackends checks that the schema allows exactly the backends of flanneld.
func TestSchemaHasAllBackends(t *testing.T) {
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var allowed []string
	for _, kind := range readSchema(t).Properties["flannel"].Properties["backend"].Enum {
		allowed = append(allowed, kind.(string))
	}
	slices.Sort(allowed)
	if diff := cmp.Diff(catalog.Types(), allowed); diff != "" {
		t.Errorf("backends (-flanneld +schema):\n%s", diff)
	}
}
