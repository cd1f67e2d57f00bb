// SPDX-License-Identifier: Apache-2.0

// Package documentation_test compares the pages with the code.
package documentation_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/options"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend/alivpc"
	"github.com/flanneld/flanneld/backend/alloc"
	"github.com/flanneld/flanneld/backend/awsvpc"
	"github.com/flanneld/flanneld/backend/extension"
	"github.com/flanneld/flanneld/backend/gce"
	"github.com/flanneld/flanneld/backend/hostgw"
	"github.com/flanneld/flanneld/backend/ipip"
	"github.com/flanneld/flanneld/backend/tencentvpc"
	"github.com/flanneld/flanneld/backend/udp"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/backend/wireguard"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/daemon"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

var update = flag.Bool("update", false, "generate the pages again")

const referenceHead = `# Reference

All keys of the network configuration and all metrics, generated from the code by
` + "`go test ./Documentation -update`" + `. The flags are on a page of [their own](flags.md).

`

// section is a section of the reference: the keys of one struct of the configuration. Sections with the same title are
// one table, which says which backends have a key.
type section struct {
	title    string
	folder   string // of the package that defines the struct
	defaults any
	backend  string // Type of the backend; empty for the keys outside of Backend
}

var sections = []section{
	{"Network configuration", "subnet", subnet.Defaults(), ""},
	{"Backend vxlan", "backend/vxlan", vxlan.Defaults(), vxlan.Type},
	{"Backend wireguard", "backend/wireguard", wireguard.Defaults(), wireguard.Type},
	{"Backend ipip", "backend/ipip", ipip.Defaults(), ipip.Type},
	{"Backend udp", "backend/udp", udp.Defaults(), udp.Type},
	{"Backends of clouds", "backend/awsvpc", awsvpc.Defaults(), awsvpc.Type},
	{"Backends of clouds", "backend/gce", gce.Defaults(), gce.Type},
	{"Backends of clouds", "backend/cloudnet", alivpc.Defaults(), alivpc.Type},
	{"Backends of clouds", "backend/cloudnet", tencentvpc.Defaults(), tencentvpc.Type},
	{"Backend extension", "backend/extension", extension.Defaults(), extension.Type},
	{"Backends host-gw and alloc", "backend/hostgw", struct{}{}, hostgw.Type},
	{"Backends host-gw and alloc", "backend/alloc", struct{}{}, alloc.Type},
}

// TestReference checks that reference.md is what the code generates. With -update it
// first writes the page.
func TestReference(t *testing.T) {
	var b strings.Builder
	b.WriteString(referenceHead)
	for rest := sections; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(s section) bool { return s.title != rest[0].title })
		if n < 0 {
			n = len(rest)
		}
		write(t, &b, rest[:n])
		rest = rest[n:]
	}
	writeMetrics(t, &b)
	want := b.String()
	if *update {
		if err := os.WriteFile("reference.md", []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile("reference.md")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(have)); diff != "" {
		t.Errorf("reference.md is out of date, run go test ./Documentation -update (-code +page):\n%s", diff)
	}
}

func allBackends() backend.Catalog {
	all, err := builtin.New(options.Options{AllowExtensionBackend: true})
	if err != nil {
		panic(err)
	}
	return all
}

// TestReferenceHasAllBackends checks that every backend of the daemon has a section, and
// every section a backend.
func TestReferenceHasAllBackends(t *testing.T) {
	_, _, _, err := daemon.ValidateConfig([]byte(`{"Network": "10.5.0.0/16", "Backend": {"Type": "?"}}`), true, allBackends().Registry)
	if err == nil {
		t.Fatal("the backend ? is accepted")
	}
	_, list, _ := strings.Cut(err.Error(), "must be one of ")
	var known []string
	for _, s := range sections {
		if s.backend != "" {
			known = append(known, s.backend)
		}
	}
	slices.Sort(known)
	if diff := cmp.Diff(strings.Split(list, ", "), known); diff != "" {
		t.Errorf("sections (-daemon +page):\n%s", diff)
	}
}

func write(t *testing.T, b *strings.Builder, same []section) {
	fmt.Fprintf(b, "## %s\n\n", same[0].title)
	var rows []string
	backends := map[string][]string{} // by row
	for _, s := range same {
		for _, row := range s.rows(t) {
			if backends[row] == nil {
				rows = append(rows, row)
			}
			backends[row] = append(backends[row], s.backend)
		}
	}

	if rows == nil {
		b.WriteString("No keys but `Type`.\n\n")
		return
	}
	head, line := "| Key | Value | Default | Meaning |", "|---|---|---|---|"
	if len(same) > 1 {
		head, line = head+" Backends |", line+"---|"
	}
	fmt.Fprintf(b, "%s\n%s\n", head, line)
	for _, row := range rows {
		switch having := backends[row]; {
		case len(same) == 1:
		case len(having) == len(same):
			row += " all |"
		default:
			row += " " + strings.Join(having, ", ") + " |"
		}
		b.WriteString(row + "\n")
	}
	b.WriteString("\n")
}

func (s section) rows(t *testing.T) (rows []string) {
	v := reflect.ValueOf(s.defaults)
	if v.NumField() == 0 {
		return nil
	}
	comments := fieldComments(t, s.folder, v.Type().Name())
	for i := range v.NumField() {
		key := v.Type().Field(i).Name
		if comments[key] == "" {
			t.Errorf("%s: %s.%s has no comment", s.folder, v.Type().Name(), key)
		}
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |", key, s.wants(t, key, v.Field(i)), textOf(v.Field(i)), comments[key]))
	}
	if !v.FieldByName("MTU").IsValid() && s.backend != "" && s.refusal("MTU", "probe") == "" { // the registry knows the key, not the backend
		rows = append(rows, "| `MTU` | \"probe\" | none | each host [finds the MTU](paths.md#let-hosts-find-the-mtu-of-each-path) of the path to each peer |")
	}
	return rows
}

// textOf returns a default as it would stand in the configuration, or "none" for an
// empty one. The default of a number or bool is never empty.
func textOf(v reflect.Value) string {
	if v.Kind() != reflect.Bool && v.Kind() != reflect.Int && v.IsZero() {
		return "none"
	}
	raw, err := json.Marshal(v.Interface())
	if err != nil {
		return err.Error()
	}
	return "`" + string(raw) + "`"
}

// wants returns a description of the values that a key accepts. It derives the
// description from the errors with which the daemon refuses other values. v is the
// default of the key.
func (s section) wants(t *testing.T, key string, v reflect.Value) string {
	kind := wanted(s.refusal(key, map[string]any{}))
	if key == "Backend" {
		return "an object"
	}
	if v.Kind() == reflect.Slice && strings.HasPrefix(kind, "a list") {
		return kind
	}
	if kind == "" {
		t.Errorf("%s %s: an object is accepted", s.title, key)
	}
	if s.backend != "" && v.Kind() == reflect.Int {
		inside := func(n int64) bool {
			return !strings.HasPrefix(s.refusal(key, n), fmt.Sprintf("Backend.%s is %d: want", key, n))
		}
		lo := sort.Search(math.MaxInt32, func(n int) bool { return inside(int64(n)) || int64(n) >= v.Int() })
		above := sort.Search(math.MaxInt32-int(v.Int()), func(n int) bool { return !inside(v.Int() + int64(n)) })
		if inside(-1) || above == math.MaxInt32-int(v.Int()) {
			return kind
		}
		return fmt.Sprintf("%d to %d", lo, v.Int()+int64(above)-1)
	}
	if s.backend == "" && v.Kind() == reflect.Uint16 { // the length of a prefix
		var taken []int
		for n := 1; n <= 128; n++ {
			if s.refusal(key, n) == "" {
				taken = append(taken, n)
			}
		}
		if network := s.network(key); len(taken) > 1 && taken[len(taken)-1]-taken[0] == len(taken)-1 && s.refusal(key, 0) == "" {
			return fmt.Sprintf("0, or %d to %d in a /%d", taken[0], taken[len(taken)-1], network.Bits())
		}
		t.Errorf("%s: the accepted values are not a range: %v", key, taken)
	}
	if kind == "a string" {
		if _, more, ok := strings.Cut(s.refusal(key, "?"), "want "); ok {
			return strings.TrimRight(strings.TrimPrefix(more, "for "), ")")
		}
	}
	return kind
}

// wanted returns the part of an error that describes the expected value, or "" if there
// is none.
func wanted(refusal string) string {
	_, after, _ := strings.Cut(refusal, ": want ")
	before, _, _ := strings.Cut(after, ", have ")
	return before
}

// network returns the pod range of the configuration in which a key is tested: an IPv6
// range if the name of the key begins with IPv6.
func (section) network(key string) netip.Prefix {
	if strings.HasPrefix(key, "IPv6") {
		return netip.MustParsePrefix("fd00:5::/48")
	}
	return netip.MustParsePrefix("10.5.0.0/16")
}

// refusal returns the error with which the daemon refuses one key with that value, or ""
// if it accepts the value.
func (s section) refusal(key string, value any) string {
	config := map[string]any{"Network": s.network("")}
	switch {
	case s.backend != "":
		config["Backend"] = map[string]any{"Type": s.backend, key: value}
	case strings.HasPrefix(key, "IPv6"):
		config["IPv6Network"], config["EnableIPv6"] = s.network(key), true
		config[key] = value
	default:
		config["Backend"] = map[string]any{"Type": alloc.Type}
		config[key] = value
	}
	raw, err := json.Marshal(config)
	if err != nil {
		return err.Error()
	}
	if _, _, _, err = daemon.ValidateConfig(raw, true, allBackends().Registry); err != nil {
		return strings.TrimPrefix(err.Error(), "invalid network configuration: ")
	}
	return ""
}

// fieldComments returns the comments of the fields of the struct name in folder, by
// field and each on one line. It removes "Field says" from the start of a comment.
func fieldComments(t *testing.T, folder, name string) map[string]string {
	comments := map[string]string{}
	files, err := filepath.Glob(filepath.Join("..", folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || spec.Name.Name != name {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					for _, id := range f.Names {
						text := strings.Join(strings.Fields(f.Doc.Text()+" "+f.Comment.Text()), " ")
						comments[id.Name] = strings.TrimPrefix(text, id.Name+" says ")
					}
				}
			}
			return false
		})
	}
	return comments
}

// scrape returns the page /metrics as a daemon would serve it that has a value for every
// metric.
func scrape(t *testing.T) string {
	m := metrics.New("", true, func(context.Context) metrics.Values {
		one := map[string]int{"": 1}
		return metrics.Values{
			Report: status.Report{
				Peers: []status.Peer{}, Paths: &paths.Outcome{Results: one}, Lease: status.Lease{Expires: time.Unix(1, 0)},
				Kernel:  status.Kernel{Objects: map[string]dataplane.Count{"": {}}, LastSync: time.Unix(1, 0)},
				Network: status.Network{BackendType: "vxlan", Pool: &status.Pool{}, Location: &status.Location{}, Cloud: &status.Cloud{Overflow: &status.Overflow{}}},
			},
			Dropped: map[string]uint64{"": 1},
			Cloud: &cloud.Report{
				Good: time.Unix(1, 0), Calls: []cloud.CallCount{{N: 1}}, Tables: []cloud.TableReport{{Used: map[prefix.Family]int{prefix.IPv4: 1}, Quota: map[prefix.Family]int{prefix.IPv4: 1}}},
			},
		}
	})
	w := httptest.NewRecorder()
	metrics.Handler(func() []*metrics.Metrics { return []*metrics.Metrics{m} }).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	return w.Body.String()
}

func writeMetrics(t *testing.T, b *strings.Builder) {
	page := scrape(t)
	b.WriteString("## Metrics\n\nBesides these come the usual `go_` and `process_` metrics.\n\n| Metric | Kind | Labels | Meaning, and what to do |\n|---|---|---|---|\n")
	for _, m := range regexp.MustCompile(`(?m)^# HELP (flannel_\w+) (.*)\n# TYPE \w+ (\w+)\n\w+(?:\{(.*)\})?`).FindAllStringSubmatch(page, -1) {
		var labels []string
		for _, l := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(m[4], -1) {
			if l[1] != "le" {
				labels = append(labels, "`"+l[1]+"`")
			}
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", m[1], m[3], strings.Join(labels, ", "), m[2])
	}
}

// TestFlags checks that the first code block of flags.md is the output of flanneld
// --help.
func TestFlags(t *testing.T) {
	page, err := os.ReadFile("flags.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(page), "```\n")
	shown, _, _ := strings.Cut(after, "```\n")
	if diff := cmp.Diff(options.Help(), shown); diff != "" {
		t.Errorf("flags.md is not what flanneld --help prints (-help +page):\n%s", diff)
	}
}

// TestPagesNameExistingMetrics checks that each name on a page that begins with flannel_
// is a metric. A name that ends with _ stands for all metrics that begin with it. A name after
// a point does not count: it is a value of the Helm chart.
func TestPagesNameExistingMetrics(t *testing.T) {
	page := scrape(t)
	for path, text := range pages(t) {
		for _, name := range regexp.MustCompile(`(?:^|[^.\w])(flannel_\w+)`).FindAllStringSubmatch(text, -1) {
			metric := "\n# TYPE " + name[1]
			if !strings.HasSuffix(name[1], "_") {
				metric += " "
			}
			if !strings.Contains(page, metric) {
				t.Errorf("%s: there is no metric %s", path, name[1])
			}
		}
	}
}
