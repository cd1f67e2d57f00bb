// SPDX-License-Identifier: Apache-2.0

package documentation_test

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

	"github.com/flanneld/flanneld/pkg/daemon"
)

const featuresHead = `# Features that meet

After this page you know which features may meet in one network, and which tests prove it. It is generated from the code
by ` + "`go test ./Documentation -update`" + `, which asks the check of configurations, and fails for a pair that is accepted
and has no test. A backend refuses a feature that is not in its row, or ignores its key with a warning.

| Backend | Features |
|---|---|
`

const pairsHead = `
| Pair | Backends that serve both | Tests, or why it is refused |
|---|---|---|
`

const processHead = `
A host can have these with every configuration, because they are options of the process:

| Option | Tests |
|---|---|
`

// feature is a key of the configuration. set puts it into the configuration of a network with a backend.
type feature struct {
	name string
	set  func(network, backend map[string]any)
}

// features are all that may meet in one configuration. A backend that refuses a feature alone, or ignores its key, does not
// have it.
var features = []feature{
	{"NextBackend", func(n, _ map[string]any) {
		n["NextBackend"] = map[string]any{"Type": "vxlan", "VNI": 9, "Port": 4789}
	}},
	{"SameLocation", func(_, b map[string]any) { b["SameLocation"] = "vxlan" }},
	{"Overflow", func(_, b map[string]any) { b["Overflow"] = "vxlan" }},
	{`"MTU": "probe"`, func(_, b map[string]any) { b["MTU"] = "probe" }},
	{"EndpointSharingInterval", func(_, b map[string]any) { b["EndpointSharingInterval"] = 30 }},
	{"IPv6", func(n, _ map[string]any) { n["EnableIPv6"], n["IPv6Network"] = true, "fd00:5::/48" }},
}

// proofs are the tests of the pairs.
var proofs = map[string]string{
	"NextBackend and SameLocation":               "TestLocationMigration",
	`NextBackend and "MTU": "probe"`:             "TestPathMTUThroughMigration",
	"NextBackend and EndpointSharingInterval":    "TestBothBackendsPublish",
	"NextBackend and IPv6":                       "TestBackendMigration, TestVMBackendMigration",
	"SameLocation and EndpointSharingInterval":   "TestBackendBetweenPublishes",
	"SameLocation and IPv6":                      "TestLocationsVXLAN, TestLocationsHostGW",
	"Overflow and IPv6":                          "TestOverflowOutside",
	`"MTU": "probe" and EndpointSharingInterval`: "TestVMWireGuardPathMTU",
	`"MTU": "probe" and IPv6`:                    "TestPathMTU, TestVMIPIPPathMTU, TestVMWireGuardPathMTU",
	"EndpointSharingInterval and IPv6":           "TestSharedEndpointsInALease, TestTwoDevices",
}

// processOptions are features that no configuration turns on, with their tests.
var processOptions = [][2]string{
	{"several networks (`--networks`)", "TestWalks, TestNetworksOfOneBackend, TestNetworksOfCommands, TestVMNetworksIPIP"},
	{"probes (`--probe`)", "TestProbes, TestProbesOfLargePackets"},
	{"unreachable routes (`--ip-blackhole-route`)", "TestBlackhole, TestNothingLeavesWithoutTheTunnel"},
}

// validate returns whether a backend serves the features, and the error if it refuses them.
func validate(t *testing.T, kind string, fs ...feature) (serves bool, refused error) {
	t.Helper()
	network, backend := map[string]any{"Network": "10.5.0.0/16"}, map[string]any{"Type": kind}
	for _, f := range fs {
		f.set(network, backend)
	}
	network["Backend"] = backend
	text, err := json.Marshal(network)
	if err != nil {
		t.Fatal(err)
	}
	_, _, warnings, err := daemon.ValidateConfig(text, true, allBackends().Registry)
	ignored := func(w string) bool { return strings.Contains(w, "unknown") }
	return err == nil && !slices.ContainsFunc(warnings, ignored), err
}

// TestFeatures checks that features.md is what the code generates, and that each pair of features is refused or has a test.
// With -update it first writes the page.
func TestFeatures(t *testing.T) {
	var b strings.Builder
	b.WriteString(featuresHead)
	kinds := allBackends().Registry.Types()
	for _, kind := range kinds {
		var names []string
		for _, f := range features {
			if has, _ := validate(t, kind, f); has {
				names = append(names, f.name)
			}
		}
		fmt.Fprintf(&b, "| %s | %s |\n", kind, strings.Join(names, ", "))
	}

	b.WriteString(pairsHead)
	unused := maps.Clone(proofs)
	for i, first := range features {
		for _, second := range features[i+1:] {
			name := first.name + " and " + second.name
			served, refused := meet(t, kinds, first, second)
			if (proofs[name] == "") != (len(served) == 0) {
				t.Errorf("%s: served by %v, tests %q", name, served, proofs[name])
			}
			delete(unused, name)
			if proofs[name] != "" {
				refused = append([]string{proofs[name]}, refused...)
			}
			if len(refused) > 0 {
				fmt.Fprintf(&b, "| %s | %s | %s |\n", name, strings.Join(served, ", "), strings.Join(refused, "; "))
			}
		}
	}
	for name := range unused {
		t.Errorf("%s: not a pair", name)
	}

	b.WriteString(processHead)
	for _, o := range processOptions {
		fmt.Fprintf(&b, "| %s | %s |\n", o[0], o[1])
	}
	if *update {
		if err := os.WriteFile("internals/features.md", []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile("internals/features.md")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(b.String(), string(have)); diff != "" {
		t.Errorf("features.md is out of date, run go test ./Documentation -update (-code +page):\n%s", diff)
	}

	sources := testSources(t, "../backend/*/*_test.go", "../backend/*/*/*_test.go", "../backend/*/internal/*/*_test.go", "../test/e2e/*_test.go")
	for _, name := range regexp.MustCompile(`Test[A-Z]\w*`).FindAllString(b.String(), -1) {
		if !strings.Contains(sources, "func "+name+"(") {
			t.Errorf("%s does not exist", name)
		}
	}
}

// meet returns the backends that serve both features, and for those that refuse them together the line that says so.
// Backends that lack one of the two are in neither.
func meet(t *testing.T, kinds []string, first, second feature) (served, refused []string) {
	t.Helper()
	for _, kind := range kinds {
		one, _ := validate(t, kind, first)
		other, _ := validate(t, kind, second)
		if !one || !other {
			continue
		}

		if both, err := validate(t, kind, first, second); both {
			served = append(served, kind)
		} else if err != nil {
			refused = append(refused, kind+": "+err.Error())
		}
	}
	return served, refused
}
