// SPDX-License-Identifier: Apache-2.0

// Package kubernetes_test renders the chart and compares the result with golden files.
package kubernetes_test

import (
	"encoding/json"
	"errors"
	"flag"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/flanneld/flanneld/subnet"
)

var update = flag.Bool("update", false, "write the rendered chart to the golden files and to base")

// helm is the program that `make components` builds.
const helm = "../../bin/tools/helm"

// render returns the objects that helm renders from the chart. It removes the comments with
// which helm names the source of each object.
func render(t *testing.T, options ...string) string {
	t.Helper()
	return renderChart(t, "chart", "", options...)
}

// renderChart does so with any chart, and with values as YAML.
func renderChart(t *testing.T, chart, values string, options ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), helm, append([]string{"template", "flannel", chart, "--namespace=kube-flannel", "--kube-version=1.30", "--skip-tests", "--values=-"}, options...)...)
	cmd.Stdin = strings.NewReader(values)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("no helm to render with (make components): %v", err)
	}
	if err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	var text strings.Builder
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, "# Source: ") {
			text.WriteString(line)
		}
	}
	return text.String()
}

// license is the first line of the golden files. helm does not print such a line.
const license = "# SPDX-License-Identifier: Apache-2.0\n"

func expectGolden(t *testing.T, path, got string) {
	t.Helper()
	expectFile(t, path, license+got)
}

// expectFile checks that a file has this content, or writes it if the flag -update is set.
func expectFile(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (go test ./dist/kubernetes -update, if this is meant) (-want +got):\n%s", path, diff)
	}
}

// object contains the fields of rendered objects that the tests check.
type object struct {
	Kind string
	Data map[string]string
	Spec struct {
		Selector struct{ MatchLabels map[string]string }
		Template struct {
			Metadata struct{ Labels map[string]string }
		}
	}
}

func objects(t *testing.T, text string) []object {
	t.Helper()
	var all []object
	for part := range strings.SplitSeq(text, "\n---\n") {
		var o object
		if err := yaml.Unmarshal([]byte(part), &o); err != nil {
			t.Fatalf("%v: %s", err, part)
		}
		all = append(all, o)
	}
	return all
}

//stages:rest it needs helm, which takes minutes to build
func TestChartRenders(t *testing.T) {
	values, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(values) == 0 {
		t.Fatalf("no values to render: %v", err)
	}
	for _, file := range values {
		name := strings.TrimSuffix(filepath.Base(file), ".values.yaml")
		t.Run(name, func(t *testing.T) {
			got := render(t, "--values="+file)
			expectGolden(t, filepath.Join("testdata", name+".golden.yaml"), got)
			expectConfig(t, got)
		})
	}
}

// TestHelmTest checks the objects of helm test, which no other test renders.
//
//stages:rest it needs helm, which takes minutes to build
func TestHelmTest(t *testing.T) {
	got := render(t, "--skip-tests=false", "--show-only=templates/tests/connectivity.yaml", "--set=flannel.selectorLabels.k8s-app=flannel")
	expectGolden(t, "testdata/connectivity.golden.yaml", got)
}

// expectConfig checks that the rendered ConfigMap contains a network configuration that the
// daemon accepts without a warning, and a CNI configuration that is JSON.
func expectConfig(t *testing.T, rendered string) {
	t.Helper()
	for _, o := range objects(t, rendered) {
		if o.Kind != "ConfigMap" {
			continue
		}
		cfg, err := subnet.ParseConfig([]byte(o.Data["net-conf.json"]))
		if err != nil || len(cfg.Warnings) > 0 {
			t.Errorf("net-conf.json: %v, %q", err, cfg.Warnings)
		}
		if cni := o.Data["cni-conf.json"]; !json.Valid([]byte(cni)) {
			t.Errorf("cni-conf.json is not JSON: %s", cni)
		}
		return
	}
	t.Error("no ConfigMap")
}

// TestBaseIsTheChart checks that the plain manifests are what the chart renders by default,
// except for the selector. The selector is that of flannel's manifests, so that kubectl can
// apply the plain manifests over those.
//
//stages:rest it needs helm, which takes minutes to build
func TestBaseIsTheChart(t *testing.T) {
	expectGolden(t, "base/flannel.yaml", render(t, "--set=flannel.selectorLabels.k8s-app=flannel"))
}

//stages:rest it needs helm, which takes minutes to build
func TestChartRefusesMistakes(t *testing.T) {
	for name, tc := range map[string]struct{ set, want string }{
		"no network":            {"podCidr=", "podCidr and podCidrv6 are both empty"},
		"an address":            {"podCidr=10.244.0.0", "'/podCidr'"},
		"a long prefix":         {"podCidr=10.244.0.0/33", "'/podCidr'"},
		"a large byte":          {"podCidr=10.256.0.0/16", "'/podCidr'"},
		"two networks":          {"podCidr=10.244.0.0/16\\,10.245.0.0/16", "'/podCidr'"},
		"IPv6 as IPv4":          {"podCidr=fd00::/48", "'/podCidr'"},
		"IPv4 as IPv6":          {"podCidrv6=10.244.0.0/16", "'/podCidrv6'"},
		"two gaps":              {"podCidrv6=fd00::1::/48", "'/podCidrv6'"},
		"a long IPv6 prefix":    {"podCidrv6=fd00::/129", "'/podCidrv6'"},
		"an unknown value":      {"podCIDR=10.244.0.0/16", "'podCIDR'"},
		"unknown in flannel":    {"flannel.backendport=8472", "'backendport'"},
		"unknown in an image":   {"flannel.flannel_cni.image.tags=v1", "'tags'"},
		"unknown in healthz":    {"flannel.healthz.ports=1", "'ports'"},
		"unknown in netpol":     {"netpol.enable=true", "'enable'"},
		"an unknown backend":    {"flannel.backend=ipsec", "'/flannel/backend': value must be one of 'vxlan', 'host-gw'"},
		"no backend":            {"flannel.backend=null", "'backend'"},
		"port":                  {"flannel.backendPort=70000", "backendPort"},
		"a port in words":       {"flannel.healthz.port=http", "healthz/port"},
		"a switch in words":     {"netpol.enabled=yes", "netpol/enabled"},
		"probe host":            {"flannel.healthz.probeHost=1", "healthz/probeHost"},
		"one argument":          {"flannel.args=--ip-masq", "args"},
		"VNI":                   {"flannel.vni=10000000", "vni"},
		"VNI with IPv6":         {"flannel.vni=10000,podCidrv6=fd00:10:5::/48", "vni"},
		"mode":                  {"flannel.tunnelMode=both", "tunnelMode"},
		"a number as PSK":       {"flannel.psk=12345", "psk"},
		"no selector":           {"flannel.selectorLabels=null", "selectorLabels"},
		"a number as tag":       {"flannel.image.tag=1", "flannel/image/tag"},
		"a monitor on loopback": {"podMonitor.enabled=true", "flannel.healthz.probeHost empty"},
		"a monitor, no port":    {"podMonitor.enabled=true,flannel.healthz.port=0,flannel.healthz.probeHost=", "flannel.healthz.port other than 0"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), helm, "template", "chart", "--set="+tc.set).CombinedOutput()
			if err == nil || !strings.Contains(string(out), tc.want) {
				t.Errorf("%v: %s; want an error with %q", err, out, tc.want)
			}
		})
	}
}

// TestAdmissionPolicy checks when the chart contains the policy, and for which annotations.
//
//stages:rest it needs helm, which takes minutes to build
func TestAdmissionPolicy(t *testing.T) {
	for name, tc := range map[string]struct{ option, want string }{
		"default":                      {"", "map(name, 'flannel.alpha.coreos.com/' + name)"},
		"another prefix":               {"--set=flannel.args={--kube-subnet-mgr,--kube-annotation-prefix=example.org}", "map(name, 'example.org/' + name)"},
		"a prefix as another argument": {"--set=flannel.args={--kube-annotation-prefix,example.org}", "map(name, 'example.org/' + name)"},
		"a prefix with a name":         {"--set=flannel.args={--kube-annotation-prefix=example.org/net}", "map(name, 'example.org/net-' + name)"},
		"off":                          {"--set=flannel.admissionPolicy=false", ""},
		"an older Kubernetes":          {"--kube-version=1.29", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := render(t, slices.DeleteFunc([]string{tc.option}, func(o string) bool { return o == "" })...)
			if has := strings.Contains(got, "ValidatingAdmissionPolicy"); has != (tc.want != "") || !strings.Contains(got, tc.want) {
				t.Errorf("a policy: %v, want %q in it:\n%s", has, tc.want, got)
			}
		})
	}
}

// TestBackendOptions checks that backendOptions reach the configuration even if they are 0 or
// false, and that a value of the chart takes precedence over the same key there, whether they
// come from a file or from the command line.
//
//stages:rest it needs helm, which takes minutes to build
func TestBackendOptions(t *testing.T) {
	for name, tc := range map[string]struct {
		values map[string]string
		want   map[string]any
	}{
		"0 and false": {
			map[string]string{"flannel.backendOptions.VNI": "0", "flannel.backendOptions.Learning": "false", "flannel.backendOptions.Port": "0"},
			map[string]any{"Type": "vxlan", "VNI": 0, "Learning": false, "Port": 0},
		},
		"a value beside an option": {
			map[string]string{"flannel.vni": "9999999", "flannel.backendOptions.VNI": "7"},
			map[string]any{"Type": "vxlan", "VNI": 9999999},
		},
		"an unset value beside an option": {
			map[string]string{"flannel.vni": "0", "flannel.backendOptions.VNI": "7"},
			map[string]any{"Type": "vxlan", "VNI": 7},
		},
		"the MTU of each path": {
			map[string]string{"flannel.backend": "wireguard", "flannel.mtu": "probe"},
			map[string]any{"Type": "wireguard", "MTU": "probe"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var options []string
			for value, to := range tc.values {
				options = append(options, "--set="+value+"="+to)
			}
			want := fields{"net-conf/Backend": tc.want}
			expectFields(t, want, view(t, render(t, options...)))
			expectFields(t, want, renderValues(t, tc.values))
		})
	}
}

// TestSelectorIsInThePod checks that the selector has the labels of the values, also a label
// with an empty value, and that the pod has the labels of the selector.
//
//stages:rest it needs helm, which takes minutes to build
func TestSelectorIsInThePod(t *testing.T) {
	got := render(t, "--set=flannel.selectorLabels.app=", "--set=flannel.selectorLabels.tier=network")
	if n := strings.Count(got, "        app: \"\"\n        tier: network\n"); n != 1 {
		t.Errorf("the pod has other labels than the selector:\n%s", got)
	}
	daemonSets := slices.DeleteFunc(objects(t, got), func(o object) bool { return o.Kind != "DaemonSet" })
	if len(daemonSets) != 1 {
		t.Fatalf("%d DaemonSets, want one", len(daemonSets))
	}
	selector, labels := daemonSets[0].Spec.Selector.MatchLabels, daemonSets[0].Spec.Template.Metadata.Labels
	if diff := cmp.Diff(map[string]string{"app": "", "tier": "network"}, selector); diff != "" {
		t.Errorf("labels of the selector (-want +got):\n%s", diff)
	}
	for key, value := range selector {
		if has, ok := labels[key]; !ok || has != value {
			t.Errorf("the pod has the labels %q, want %s %q as in the selector", labels, key, value)
		}
	}
}

// TestPodMetadata checks that pods have further annotations and labels, and that further labels do
// not replace those of the chart.
//
//stages:rest it needs helm, which takes minutes to build
func TestPodMetadata(t *testing.T) {
	got := render(t, "--set=flannel.podAnnotations.note=x", "--set=flannel.podLabels.team=net", "--set=flannel.podLabels.app=other")
	for _, want := range []string{"        note: x\n    spec:\n", "      labels:\n        app: flannel\n        team: net\n        tier: node\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

// TestMonitoring checks that the PodMonitor selects the pods and a port that they have, and that
// the PrometheusRule contains the alerts of dist/prometheus. The chart has a copy of these, because
// helm packages only files of its folder.
//
//stages:rest it needs helm, which takes minutes to build
func TestMonitoring(t *testing.T) {
	rules, err := os.ReadFile("../prometheus/flannel-rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	expectFile(t, "chart/files/flannel-rules.yml", string(rules))
	want := struct{ Groups any }{}
	if err := yaml.Unmarshal(rules, &want); err != nil {
		t.Fatal(err)
	}
	got := render(t, "--set=podMonitor.enabled=true,podMonitor.interval=30s,podMonitor.labels.release=prometheus,flannel.healthz.probeHost=",
		"--set=prometheusRule.enabled=true,prometheusRule.labels.release=prometheus", "--set=flannel.selectorLabels.k8s-app=flannel")
	found := map[string]bool{}
	for part := range strings.SplitSeq(got, "\n---\n") {
		var o struct {
			Kind     string
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				Groups              any
				Selector            struct{ MatchLabels map[string]string }
				PodMetricsEndpoints []struct{ Port, Interval string }
			}
		}
		if err := yaml.Unmarshal([]byte(part), &o); err != nil {
			t.Fatalf("%v: %s", err, part)
		}
		switch o.Kind {
		case "PodMonitor":
			if diff := cmp.Diff(map[string]string{"app": "flannel", "k8s-app": "flannel"}, o.Spec.Selector.MatchLabels); diff != "" {
				t.Errorf("labels of the selector (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff([]struct{ Port, Interval string }{{"healthz", "30s"}}, o.Spec.PodMetricsEndpoints); diff != "" {
				t.Errorf("endpoints (-want +got):\n%s", diff)
			}
		case "PrometheusRule":
			if diff := cmp.Diff(want.Groups, o.Spec.Groups); diff != "" {
				t.Errorf("groups of rules (-want +got):\n%s", diff)
			}
		default:
			continue
		}
		found[o.Kind] = o.Metadata.Labels["release"] == "prometheus"
	}
	if diff := cmp.Diff(map[string]bool{"PodMonitor": true, "PrometheusRule": true}, found); diff != "" {
		t.Errorf("objects, and whether they have the label of the values (-want +got):\n%s", diff)
	}
}

// TestNotes checks what helm prints after an installation.
//
//stages:rest it needs helm, which takes minutes to build
func TestNotes(t *testing.T) {
	chart := t.TempDir()
	if err := os.CopyFS(chart, os.DirFS("chart")); err != nil {
		t.Fatal(err)
	}
	// helm template does not print notes.
	const notes = `notes: {{ include (print .Template.BasePath "/NOTES.txt") . | quote }}`
	if err := os.WriteFile(filepath.Join(chart, "templates/notes.yaml"), []byte(notes), 0o600); err != nil {
		t.Fatal(err)
	}
	const noImage, noPolicies = "every node must have the image flanneld:dev already", "NetworkPolicies have no effect"
	for name, tc := range map[string]struct {
		set        string
		has, lacks []string
	}{
		"default":  {"flannel.vni=1", []string{noImage, noPolicies}, nil},
		"complete": {"flannel.image.repository=registry.example.com/x,netpol.enabled=true", nil, []string{noImage, noPolicies}},
	} {
		t.Run(name, func(t *testing.T) {
			var got struct{ Notes string }
			if err := yaml.Unmarshal([]byte(renderChart(t, chart, "", "--show-only=templates/notes.yaml", "--set="+tc.set)), &got); err != nil {
				t.Fatal(err)
			}
			for _, want := range append(tc.has, "\n    kubectl --namespace=kube-flannel rollout status daemonset/kube-flannel-ds\n",
				"\n    kubectl label namespace kube-flannel pod-security.kubernetes.io/enforce=privileged\n") {
				if !strings.Contains(got.Notes, want) {
					t.Errorf("no %q in\n%s", want, got.Notes)
				}
			}
			for _, unwanted := range tc.lacks {
				if strings.Contains(got.Notes, unwanted) {
					t.Errorf("%q in\n%s", unwanted, got.Notes)
				}
			}
		})
	}
}

//stages:rest it needs helm, which takes minutes to build
func TestLint(t *testing.T) {
	if out, err := exec.CommandContext(t.Context(), helm, "lint", "--strict", "chart").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
