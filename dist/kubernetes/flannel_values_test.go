// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

var flannelChart = flag.String("flannel-chart", "", "folder of flannel's chart, to check flannelValues with it instead of this project's chart")

// flannelValue is a value of flannel's chart.
type flannelValue struct {
	name string
	def  string // as YAML, from flannel's values.yaml, which has some in comments
	sets []setting
}

// setting is a way to set a value, and its effect.
type setting struct {
	value string            // as YAML
	with  map[string]string // further values, by name
	want  fields
	// why flannel's chart does not do the same; empty if it does
	differs string
}

// fields are fields of the view of a rendered chart. nil means that there is no such field.
type fields map[string]any

var (
	wireguard = map[string]string{"flannel.backend": "wireguard"}
	udp       = map[string]string{"flannel.backend": "udp"}
	hostGW    = map[string]string{"flannel.backend": "host-gw"}
	netpol    = map[string]string{"netpol.enabled": "true"}
	onlyIPv6  = map[string]string{"podCidrv6": "fd00:10:5::/48"}
)

// flannelValues are all values of flannel's chart v0.28.9. Someone who replaces that chart
// keeps them, so each must have the same effect in this project's chart.
var flannelValues = []flannelValue{
	{"global.imagePullSecrets", "null", []setting{
		{value: "[{name: registry}]", want: fields{"pod/imagePullSecrets": []any{map[string]any{"name": "registry"}}}},
		{value: "null", want: fields{"pod/imagePullSecrets": nil}},
	}},
	{"podCidr", "10.244.0.0/16", []setting{
		{value: "10.5.0.0/16", want: fields{"net-conf/Network": "10.5.0.0/16", "net-conf/EnableIPv4": nil}},
		{value: `""`, with: onlyIPv6, want: fields{"net-conf/Network": nil, "net-conf/EnableIPv4": false}},
	}},
	{"podCidrv6", `""`, []setting{
		{value: "fd00:10:5::/48", want: fields{"net-conf/IPv6Network": "fd00:10:5::/48", "net-conf/EnableIPv6": true, "net-conf/Network": "10.244.0.0/16"}},
		{value: `""`, want: fields{"net-conf/IPv6Network": nil, "net-conf/EnableIPv6": nil}},
	}},
	{"flannel.image.repository", "ghcr.io/flannel-io/flannel", []setting{
		{value: "registry.example.com/x", with: map[string]string{"flannel.image.tag": "v1"}, want: fields{
			"pod/containers/kube-flannel/image": "registry.example.com/x:v1", "pod/initContainers/install-cni/image": "registry.example.com/x:v1",
		}},
	}},
	{"flannel.image.tag", "v0.28.9", []setting{
		{value: `"1.10"`, with: map[string]string{"flannel.image.repository": "x"}, want: fields{
			"pod/containers/kube-flannel/image": "x:1.10", "pod/initContainers/install-cni/image": "x:1.10",
		}},
	}},
	{"flannel.flannel_cni.image.repository", "ghcr.io/flannel-io/flannel-cni-plugin", []setting{
		{value: "registry.example.com/x", want: fields{
			"pod/initContainers/install-cni-plugin/image":   "registry.example.com/x:v1.9.1-flannel3",
			"pod/initContainers/install-cni-plugin/command": []any{"cp", "-f", "/flannel", "/opt/cni/bin/flannel"},
		}},
	}},
	{"flannel.flannel_cni.image.tag", "v1.9.1-flannel3", []setting{
		{value: "v2", want: fields{"pod/initContainers/install-cni-plugin/image": "ghcr.io/flannel-io/flannel-cni-plugin:v2"}},
	}},
	{"flannel.cniBinDir", "/opt/cni/bin", []setting{
		{value: "/usr/libexec/cni", want: fields{"pod/volumes/cni-plugin/hostPath/path": "/usr/libexec/cni"}},
	}},
	{"flannel.cniConfDir", "/etc/cni/net.d", []setting{
		{value: "/etc/x", want: fields{"pod/volumes/cni/hostPath/path": "/etc/x"}},
	}},
	{"flannel.skipCNIConfigInstallation", "false", []setting{
		{value: "true", want: fields{"pod/initContainers/install-cni": nil}},
		{value: `"true"`, want: fields{"pod/initContainers/install-cni": nil}},
		{value: `"false"`, want: fields{"pod/initContainers/install-cni/name": "install-cni"}, differs: "every text means true"},
	}},
	{"flannel.enableNFTables", "false", []setting{
		{value: "true", want: fields{"net-conf/EnableNFTables": true}},
		{value: `"true"`, want: fields{"net-conf/EnableNFTables": true}},
		{value: `"false"`, want: fields{"net-conf/EnableNFTables": false}, differs: "every text means true"},
	}},
	{"flannel.args", "[--ip-masq, --kube-subnet-mgr]", []setting{
		{value: "[--ip-masq, --kube-subnet-mgr, --iface=eth1, -v=4]", want: fields{
			"flags/ip-masq": "", "flags/kube-subnet-mgr": "", "flags/iface": "eth1", "flags/v": "4", "flags/healthz-port": "8081", "flags/probe": nil,
		}},
		{value: "[--kube-subnet-mgr]", want: fields{"flags/ip-masq": nil, "flags/kube-subnet-mgr": ""}},
		{value: "[--ip-masq]", want: fields{"flags/ip-masq": "", "flags/kube-subnet-mgr": ""}, differs: "the daemon looks for etcd"},
		{value: "null", want: fields{"flags/ip-masq": nil, "flags/kube-subnet-mgr": ""}, differs: "the daemon looks for etcd"},
		{value: "[--ip-masq, -kube-subnet-mgr=true]", want: fields{"flags/kube-subnet-mgr": "true"}},
	}},
	{"flannel.backend", "vxlan", []setting{
		{value: "host-gw", want: fields{"net-conf/Backend": map[string]any{"Type": "host-gw"}}},
		{value: "wireguard", want: fields{"net-conf/Backend": map[string]any{"Type": "wireguard"}}},
		{value: "udp", want: fields{"net-conf/Backend": map[string]any{"Type": "udp"}}},
	}},
	{"flannel.backendPort", "0", []setting{
		{value: "4789", want: fields{"net-conf/Backend/Port": 4789}},
		{value: `"4789"`, want: fields{"net-conf/Backend/Port": 4789}},
		{value: "0", want: fields{"net-conf/Backend/Port": nil}},
		{value: "null", want: fields{"net-conf/Backend/Port": nil}},
		{value: "51000", with: wireguard, want: fields{"net-conf/Backend/ListenPort": 51000, "net-conf/Backend/Port": nil}},
		{value: `"51000"`, with: wireguard, want: fields{"net-conf/Backend/ListenPort": 51000}},
		{value: "8000", with: udp, want: fields{"net-conf/Backend/Port": 8000}},
		{value: "8000", with: hostGW, want: fields{"net-conf/Backend/Port": nil}},
	}},
	{"flannel.backendPortv6", "51821", []setting{
		{value: "51001", with: wireguard, want: fields{"net-conf/Backend/ListenPortV6": 51001}},
		{value: `"51001"`, with: wireguard, want: fields{"net-conf/Backend/ListenPortV6": 51001}},
		{value: "0", with: wireguard, want: fields{"net-conf/Backend/ListenPortV6": nil}},
	}},
	{"flannel.mtu", "1500", []setting{
		{value: "9000", want: fields{"net-conf/Backend/MTU": 9000}},
		{value: `"9000"`, want: fields{"net-conf/Backend/MTU": 9000}},
		{value: "0", want: fields{"net-conf/Backend/MTU": nil}},
		{value: `""`, want: fields{"net-conf/Backend/MTU": nil}},
		{value: "1400", with: wireguard, want: fields{"net-conf/Backend/MTU": 1400}},
		{value: "1400", with: udp, want: fields{"net-conf/Backend/MTU": nil}},
	}},
	{"flannel.vni", "1", []setting{
		{value: "4096", want: fields{"net-conf/Backend/VNI": 4096}},
		{value: "9999999", want: fields{"net-conf/Backend/VNI": 9999999}, differs: "the template writes 9.999999e+06"},
		{value: `"4096"`, want: fields{"net-conf/Backend/VNI": 4096}},
		{value: `"0"`, want: fields{"net-conf/Backend/VNI": 0}},
		{value: "0", want: fields{"net-conf/Backend/VNI": nil}},
		{value: "7", with: wireguard, want: fields{"net-conf/Backend/VNI": nil}},
	}},
	{"flannel.GBP", "false", []setting{
		{value: "true", want: fields{"net-conf/Backend/GBP": true}},
		{value: `"true"`, want: fields{"net-conf/Backend/GBP": true}},
		{value: "false", want: fields{"net-conf/Backend/GBP": nil}},
	}},
	{"flannel.directRouting", "false", []setting{
		{value: "true", want: fields{"net-conf/Backend/DirectRouting": true}},
		{value: `"true"`, want: fields{"net-conf/Backend/DirectRouting": true}},
		{value: `"false"`, want: fields{"net-conf/Backend/DirectRouting": false}},
		{value: "false", want: fields{"net-conf/Backend/DirectRouting": nil}},
	}},
	{"flannel.macPrefix", "0E-2A", []setting{
		{value: "0E-2B", want: fields{"net-conf/Backend/MacPrefix": "0E-2B"}},
		{value: `""`, want: fields{"net-conf/Backend/MacPrefix": nil}},
	}},
	{"flannel.psk", "0", []setting{
		{value: "6dZ5Vl8Ii8fGMFd0nKMFTd3GMhV7m7Il9gv9uEVO5V0=", with: wireguard, want: fields{"net-conf/Backend/PSK": "6dZ5Vl8Ii8fGMFd0nKMFTd3GMhV7m7Il9gv9uEVO5V0="}},
		{value: "0", with: wireguard, want: fields{"net-conf/Backend/PSK": nil}},
	}},
	{"flannel.tunnelMode", "separate", []setting{
		{value: `'"auto"'`, with: wireguard, want: fields{"net-conf/Backend/Mode": "auto"}},
		{value: "auto", with: wireguard, want: fields{"net-conf/Backend/Mode": "auto"}, differs: "the template writes no quotes, which is not JSON"},
	}},
	{"flannel.keepaliveInterval", "0", []setting{
		{value: "25", with: wireguard, want: fields{"net-conf/Backend/PersistentKeepaliveInterval": 25}},
		{value: `"25"`, with: wireguard, want: fields{"net-conf/Backend/PersistentKeepaliveInterval": 25}},
		{value: "0", with: wireguard, want: fields{"net-conf/Backend/PersistentKeepaliveInterval": nil}},
	}},
	{"flannel.cniConf", `'{"name": "cbr0", "cniVersion": "0.3.1", "plugins": [
		{"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
		{"type": "portmap", "capabilities": {"portMappings": true}}]}'`, []setting{
		{value: `'{"name": "mine", "cniVersion": "1.0.0"}'`, want: fields{"cni-conf": map[string]any{"name": "mine", "cniVersion": "1.0.0"}}},
	}},
	{"flannel.resources.requests.cpu", "100m", []setting{
		{value: "7m", want: fields{"pod/containers/kube-flannel/resources": map[string]any{"requests": map[string]any{"cpu": "7m", "memory": "50Mi"}}}},
	}},
	{"flannel.resources.requests.memory", "50Mi", []setting{
		{value: "77Mi", want: fields{"pod/containers/kube-flannel/resources/requests/memory": "77Mi"}},
	}},
	{"flannel.healthz.port", "8081", []setting{
		{value: "9091", want: fields{
			"flags/healthz-port":                                      "9091",
			"pod/containers/kube-flannel/ports":                       []any{map[string]any{"name": "healthz", "containerPort": 9091, "protocol": "TCP"}},
			"pod/containers/kube-flannel/livenessProbe/httpGet/port":  "healthz",
			"pod/containers/kube-flannel/livenessProbe/httpGet/path":  "/healthz",
			"pod/containers/kube-flannel/readinessProbe/httpGet/port": "healthz",
			"pod/containers/kube-flannel/readinessProbe/httpGet/path": "/readyz",
		}},
		{value: `"9091"`, want: fields{"flags/healthz-port": "9091"}},
		{value: "0", want: fields{
			"flags/healthz-port": nil, "pod/containers/kube-flannel/ports": nil,
			"pod/containers/kube-flannel/livenessProbe": nil, "pod/containers/kube-flannel/readinessProbe": nil,
		}},
	}},
	{"flannel.healthz.livenessProbe.initialDelaySeconds", "10", []setting{
		{value: "7", want: fields{"pod/containers/kube-flannel/livenessProbe/initialDelaySeconds": 7}},
	}},
	{"flannel.healthz.livenessProbe.periodSeconds", "30", []setting{
		{value: "7", want: fields{"pod/containers/kube-flannel/livenessProbe/periodSeconds": 7}},
	}},
	{"flannel.healthz.readinessProbe.initialDelaySeconds", "5", []setting{
		{value: "7", want: fields{"pod/containers/kube-flannel/readinessProbe/initialDelaySeconds": 7}},
	}},
	{"flannel.healthz.readinessProbe.periodSeconds", "10", []setting{
		{value: "7", want: fields{"pod/containers/kube-flannel/readinessProbe/periodSeconds": 7}},
	}},
	{"flannel.tolerations", "[{effect: NoExecute, operator: Exists}, {effect: NoSchedule, operator: Exists}]", []setting{
		{value: "[{key: a, operator: Exists}]", want: fields{"pod/tolerations": []any{map[string]any{"key": "a", "operator": "Exists"}}}},
		{value: "null", want: fields{"pod/tolerations": nil}},
	}},
	{"flannel.nodeSelector", "{}", []setting{
		{value: "{pool: workers}", want: fields{"pod/nodeSelector": map[string]any{"pool": "workers"}}},
	}},
	{"netpol.enabled", "false", []setting{
		{value: "true", want: fields{
			"pod/containers/kube-network-policies/image":                      "registry.k8s.io/networking/kube-network-policies:v1.0.0",
			"pod/containers/kube-network-policies/command":                    []any{"/bin/netpol", "--hostname-override=$(MY_NODE_NAME)", "--v=2"},
			"pod/containers/kube-network-policies/env":                        []any{map[string]any{"name": "MY_NODE_NAME", "valueFrom": map[string]any{"fieldRef": map[string]any{"fieldPath": "spec.nodeName"}}}},
			"pod/containers/kube-network-policies/securityContext/privileged": true,
			"pod/volumes/lib-modules/hostPath/path":                           "/lib/modules",
			"may/watch pods":                                                  true,
			"may/watch namespaces":                                            true,
			"may/watch networkpolicies":                                       true,
			"may/list adminnetworkpolicies":                                   true,
			"may/watch baselineadminnetworkpolicies":                          true,
		}},
		{value: `"true"`, want: fields{"pod/containers/kube-network-policies/name": "kube-network-policies", "may/watch networkpolicies": true}},
		{value: `"false"`, want: fields{"pod/containers/kube-network-policies": nil}, differs: "every text means true"},
	}},
	{"netpol.args", "['--hostname-override=$(MY_NODE_NAME)', --v=2]", []setting{
		{value: "[--v=4]", with: netpol, want: fields{"pod/containers/kube-network-policies/command": []any{"/bin/netpol", "--v=4"}}},
	}},
	{"netpol.image.repository", "registry.k8s.io/networking/kube-network-policies", []setting{
		{value: "registry.example.com/x", with: netpol, want: fields{"pod/containers/kube-network-policies/image": "registry.example.com/x:v1.0.0"}},
	}},
	{"netpol.image.tag", "v1.0.0", []setting{
		{value: "v2", with: netpol, want: fields{"pod/containers/kube-network-policies/image": "registry.k8s.io/networking/kube-network-policies:v2"}},
	}},
}

// nested returns values as YAML. all has values as YAML, by their names with dots.
func nested(t *testing.T, all map[string]string) string {
	t.Helper()
	root := map[string]any{}
	for name, text := range all {
		parts := strings.Split(name, ".")
		at := root
		for _, part := range parts[:len(parts)-1] {
			if at[part] == nil {
				at[part] = map[string]any{}
			}
			at = at[part].(map[string]any)
		}
		var value any
		if err := yaml.Unmarshal([]byte(text), &value); err != nil {
			t.Fatalf("%s: %v: %s", name, err, text)
		}
		at[parts[len(parts)-1]] = value
	}
	text, err := yaml.Marshal(root)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// renderValues renders the chart with values, and returns a view of it.
func renderValues(t *testing.T, values map[string]string) map[string]any {
	t.Helper()
	chart := "chart"
	if *flannelChart != "" {
		chart = *flannelChart
	}
	return view(t, renderChart(t, chart, nested(t, values)))
}

// view returns what values of the chart can change, in a form that does not depend on the
// way in which a chart writes it:
//
//	net-conf, cni-conf  the configurations
//	pod                 the spec of the pods; containers, initContainers and volumes by their
//	                    names, and a command with its arguments
//	flags               the flags of flanneld without dashes
//	may                 what the role allows, such as "watch nodes"
func view(t *testing.T, text string) map[string]any {
	t.Helper()
	flags, may := map[string]any{}, map[string]any{}
	all := map[string]any{"flags": flags, "may": may}
	for part := range strings.SplitSeq(text, "\n---\n") {
		var o struct {
			Kind  string
			Data  map[string]string
			Rules []struct{ Resources, Verbs []string }
			Spec  struct{ Template struct{ Spec map[string]any } }
		}
		if err := yaml.Unmarshal([]byte(part), &o); err != nil {
			t.Fatalf("%v: %s", err, part)
		}
		switch o.Kind {
		case "ConfigMap":
			for key, name := range map[string]string{"net-conf.json": "net-conf", "cni-conf.json": "cni-conf"} {
				var conf any
				if err := json.Unmarshal([]byte(o.Data[key]), &conf); err != nil {
					t.Fatalf("%s: %v: %s", key, err, o.Data[key])
				}
				all[name] = conf
			}
		case "ClusterRole":
			for _, rule := range o.Rules {
				for _, resource := range rule.Resources {
					for _, verb := range rule.Verbs {
						may[verb+" "+resource] = true
					}
				}
			}
		case "DaemonSet":
			all["pod"] = o.Spec.Template.Spec
		}
	}
	pod := all["pod"].(map[string]any)
	for _, key := range []string{"containers", "initContainers", "volumes"} {
		list, byName := pod[key].([]any), map[string]any{}
		for _, item := range list {
			item := item.(map[string]any)
			if args, ok := item["args"].([]any); ok {
				item["command"] = append(item["command"].([]any), args...)
			}
			byName[item["name"].(string)] = item
		}
		pod[key] = byName
	}
	for _, arg := range lookup(all, "pod/containers/kube-flannel/command").([]any)[1:] {
		name, value, _ := strings.Cut(strings.TrimLeft(arg.(string), "-"), "=")
		flags[name] = value
	}
	return all
}

// lookup returns the field with this path, or nil if there is none.
func lookup(in any, path string) any {
	for part := range strings.SplitSeq(path, "/") {
		m, ok := in.(map[string]any)
		if !ok {
			return nil
		}
		in = m[part]
	}
	return in
}

// expectFields compares fields of a view. Numbers have the type float64 in a view.
func expectFields(t *testing.T, want fields, rendered map[string]any) {
	t.Helper()
	raw, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var asJSON fields
	if err := json.Unmarshal(raw, &asJSON); err != nil {
		t.Fatal(err)
	}
	for path, value := range asJSON {
		if diff := cmp.Diff(value, lookup(rendered, path)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", path, diff)
		}
	}
}

// TestFlannelValues checks that each value of flannel's chart has its effect. The following command
// checks that flannelValues is right about flannel's chart:
//
//	go test ./dist/kubernetes -run TestFlannel -flannel-chart=$PWD/../flannel/chart/kube-flannel
//
//stages:rest it needs helm, which takes minutes to build
func TestFlannelValues(t *testing.T) {
	for _, v := range flannelValues {
		for _, s := range v.sets {
			t.Run(v.name+"="+s.value, func(t *testing.T) {
				t.Parallel()
				if *flannelChart != "" && s.differs != "" {
					return
				}
				values := map[string]string{v.name: s.value}
				maps.Copy(values, s.with)
				expectFields(t, s.want, renderValues(t, values))
			})
		}
	}
}

// TestFlannelValuesMatter checks that TestFlannelValues fails if the chart ignores a value: its
// first setting must expect something that is not so by default.
//
//stages:rest it needs helm, which takes minutes to build
func TestFlannelValuesMatter(t *testing.T) {
	for _, v := range flannelValues {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			first := v.sets[0]
			rendered := renderValues(t, first.with)
			for path, want := range first.want {
				raw, _ := json.Marshal(want)
				got, _ := json.Marshal(lookup(rendered, path))
				if string(raw) != string(got) {
					return
				}
			}
			t.Errorf("without the value the chart renders the same: %v", first.want)
		})
	}
}

// TestFlannelDefaults renders the chart with the values of flannel's values.yaml, also those
// in comments there, as someone has them who keeps a copy of that file.
//
//stages:rest it needs helm, which takes minutes to build
func TestFlannelDefaults(t *testing.T) {
	values := map[string]string{}
	for _, v := range flannelValues {
		values[v.name] = v.def
	}
	expectFields(t, fields{
		"net-conf/Network":                            "10.244.0.0/16",
		"net-conf/IPv6Network":                        nil,
		"net-conf/Backend":                            map[string]any{"Type": "vxlan", "VNI": 1, "MTU": 1500, "MacPrefix": "0E-2A"},
		"cni-conf/name":                               "cbr0",
		"pod/containers/kube-flannel/image":           "ghcr.io/flannel-io/flannel:v0.28.9",
		"pod/initContainers/install-cni-plugin/image": "ghcr.io/flannel-io/flannel-cni-plugin:v1.9.1-flannel3",
		"pod/containers/kube-network-policies":        nil,
		"flags/healthz-port":                          "8081",
		"flags/kube-subnet-mgr":                       "",
	}, renderValues(t, values))
	if *flannelChart != "" {
		expectAllValues(t, values)
	}
}

// expectAllValues checks that values are those of flannel's values.yaml, except for values
// that are in comments there.
func expectAllValues(t *testing.T, values map[string]string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(*flannelChart, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var want, have map[string]any
	for raw, to := range map[string]*map[string]any{string(text): &want, nested(t, values): &have} {
		if err := yaml.Unmarshal([]byte(raw), to); err != nil {
			t.Fatal(err)
		}
	}
	for _, one := range []map[string]any{want, have} { // compare the content of the text
		in, conf := one["flannel"].(map[string]any), any(nil)
		if err := json.Unmarshal([]byte(in["cniConf"].(string)), &conf); err != nil {
			t.Fatal(err)
		}
		in["cniConf"] = conf
	}
	for name := range strings.FieldsSeq("backendPort backendPortv6 mtu vni GBP directRouting macPrefix psk tunnelMode keepaliveInterval") {
		if !strings.Contains(string(text), "# "+name+": ") && !strings.Contains(string(text), "#"+name+": ") {
			t.Errorf("flannel's values.yaml does not have %s any more", name)
		}
		delete(have["flannel"].(map[string]any), name)
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("values (-flannel's +flannelValues):\n%s", diff)
	}
}

// isFlannelValue reports whether flannel's chart has the value, or values inside of it.
func isFlannelValue(name string) bool {
	return slices.ContainsFunc(flannelValues, func(v flannelValue) bool {
		return v.name == name || strings.HasPrefix(v.name, name+".")
	})
}
