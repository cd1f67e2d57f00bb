// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
)

// recordVar is the environment variable with the directory in which the delegate records its
// calls.
const recordVar = "FLANNEL_TEST_RECORD"

// TestMain makes this binary also act as the plugin and as its delegates, depending on
// the name by which it is run.
func TestMain(m *testing.M) {
	switch name := filepath.Base(os.Args[0]); name {
	case self:
		main()
	case "bridge", "other":
		if err := delegate(name, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintf(os.Stdout, `{"cniVersion":"1.0.0","code":7,"msg":%q}`, err)
			os.Exit(1)
		}
	default:
		os.Exit(m.Run())
	}
}

// delegate acts as the delegate with that name: it records its call. If there is a file "fail" in
// the directory of the records, the call fails with the content of that file.
func delegate(name string, stdin io.Reader, stdout io.Writer) error {
	command := os.Getenv("CNI_COMMAND")
	if command == "VERSION" {
		fmt.Fprint(stdout, `{"cniVersion":"1.1.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}`)
		return nil
	}
	text, err := io.ReadAll(stdin)
	if err != nil {
		return err
	}
	dir := os.Getenv(recordVar)
	if err := os.WriteFile(filepath.Join(dir, "call"), fmt.Appendf(nil, "%s %s %s/%s\n%s",
		name, command, os.Getenv("CNI_CONTAINERID"), os.Getenv("CNI_IFNAME"), text), 0o600); err != nil {
		return err
	}
	calls, err := os.OpenFile(filepath.Join(dir, "calls"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	fmt.Fprintf(calls, "%s %s/%s %s\n", command, os.Getenv("CNI_CONTAINERID"), os.Getenv("CNI_IFNAME"), os.Getenv("CNI_NETNS"))
	if err := calls.Close(); err != nil {
		return err
	}
	if why, err := os.ReadFile(filepath.Join(dir, "fail")); err == nil {
		return errors.New(string(why))
	}
	if command == "ADD" {
		var c struct{ CNIVersion string }
		if err := json.Unmarshal(text, &c); err != nil {
			return err
		}
		fmt.Fprintf(stdout, `{"cniVersion":%q,"ips":[{"version":"4","address":"10.5.7.2/24"}]}`, c.CNIVersion)
	}
	return nil
}

// bed is a host with the plugin, its delegates and a container runtime.
type bed struct {
	t       *testing.T
	dir     string
	runtime *libcni.CNIConfig
}

const dualEnv = `FLANNEL_NETWORK=10.5.0.0/16
FLANNEL_SUBNET=10.5.7.1/24
FLANNEL_IPV6_NETWORK=fd00:5::/48
FLANNEL_IPV6_SUBNET=fd00:5:0:7::1/64
FLANNEL_MTU=1430
FLANNEL_IPMASQ=true
`

const v4Env = `FLANNEL_NETWORK=10.5.0.0/16
FLANNEL_SUBNET=10.5.7.1/24
FLANNEL_MTU=1450
FLANNEL_IPMASQ=false
`

func newBed(t *testing.T, env string) *bed {
	t.Helper()
	b := &bed{t: t, dir: t.TempDir()}
	this, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{self, "bridge", "other"} {
		if err := os.Symlink(this, filepath.Join(b.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if env != "" {
		b.write("subnet.env", env)
	}
	t.Setenv(recordVar, b.dir)
	t.Setenv("GORACE", "atexit_sleep_ms=0") // otherwise each process would wait for a second at its exit, with the race detector
	b.runtime = libcni.NewCNIConfigWithCacheDir([]string{b.dir}, filepath.Join(b.dir, "cache"), nil)
	return b
}

func (b *bed) write(name, text string) {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.dir, name), []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// list returns a network configuration of that CNI version, whose only plugin is flannel. keys
// contains further members of the plugin's JSON object, or is empty.
func (b *bed) list(version, keys string) *libcni.NetworkConfigList {
	b.t.Helper()
	if keys != "" {
		keys = "," + keys
	}
	l, err := libcni.ConfListFromBytes(fmt.Appendf(nil,
		`{"cniVersion":%q,"name":"cbr0","plugins":[{"type":"flannel","subnetFile":%q,"dataDir":%q%s}]}`,
		version, filepath.Join(b.dir, "subnet.env"), filepath.Join(b.dir, "data"), keys))
	if err != nil {
		b.t.Fatal(err)
	}
	return l
}

func container(id, iface string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: id, IfName: iface, NetNS: "/run/netns/not-there"}
}

// called returns the last call of a delegate as "plugin COMMAND container/interface", with its
// configuration, and removes the record. line is empty if no delegate was called since the last
// record was removed.
func (b *bed) called() (line string, config map[string]any) {
	b.t.Helper()
	text, err := os.ReadFile(filepath.Join(b.dir, "call"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	line, rest, _ := strings.Cut(string(text), "\n")
	if err := json.Unmarshal([]byte(rest), &config); err != nil {
		b.t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(b.dir, "call")); err != nil {
		b.t.Fatal(err)
	}
	return line, config
}

func (b *bed) expectCalled(want string) {
	b.t.Helper()
	if line, _ := b.called(); line != want {
		b.t.Errorf("delegate was called with %q, want %q", line, want)
	}
}

// notes returns the names of the files in the data directory.
func (b *bed) notes() (names []string) {
	files, _ := os.ReadDir(filepath.Join(b.dir, "data"))
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

func TestDelegation(t *testing.T) {
	for _, tc := range []struct {
		name, env, version, keys string
		plugin                   string
		want                     string
	}{
		{
			"defaults", v4Env, "0.3.1", "", "bridge",
			`{"name":"cbr0","cniVersion":"0.3.1","type":"bridge","mtu":1450,"ipMasq":true,"isGateway":true,
			 "ipam":{"type":"host-local","ranges":[[{"subnet":"10.5.7.0/24"}]],"routes":[{"dst":"10.5.0.0/16"}]}}`,
		}, {
			"dual", dualEnv, "1.0.0", `"delegate":{"hairpinMode":true,"isDefaultGateway":true}`, "bridge",
			`{"name":"cbr0","cniVersion":"1.0.0","type":"bridge","mtu":1430,"ipMasq":false,"isGateway":true,"hairpinMode":true,"isDefaultGateway":true,
			 "ipam":{"type":"host-local","ranges":[[{"subnet":"10.5.7.0/24"}],[{"subnet":"fd00:5:0:7::/64"}]],"routes":[{"dst":"10.5.0.0/16"},{"dst":"fd00:5::/48"}]}}`,
		}, {
			"IPv6", strings.Join(strings.Split(dualEnv, "\n")[2:], "\n"), "0.4.0", "", "bridge",
			`{"name":"cbr0","cniVersion":"0.4.0","type":"bridge","mtu":1430,"ipMasq":false,"isGateway":true,
			 "ipam":{"type":"host-local","ranges":[[{"subnet":"fd00:5:0:7::/64"}]],"routes":[{"dst":"fd00:5::/48"}]}}`,
		}, {
			"the operator's words count", dualEnv, "1.1.0",
			`"delegate":{"type":"bridge","mtu":1234,"ipMasq":true,"isGateway":false,"bridge":"mybr","big":12345678901234567890,"deep":{"a":[1,null]}},
			 "ipam":{"type":"mine","dataDir":"/run/x","routes":[{"dst":"192.0.2.0/24","gw":"10.5.7.9"}],"ranges":["replaced"]}`, "bridge",
			`{"name":"cbr0","cniVersion":"1.1.0","type":"bridge","mtu":1234,"ipMasq":true,"isGateway":false,"bridge":"mybr","big":12345678901234567890,"deep":{"a":[1,null]},
			 "ipam":{"type":"mine","dataDir":"/run/x","ranges":[[{"subnet":"10.5.7.0/24"}],[{"subnet":"fd00:5:0:7::/64"}]],
			         "routes":[{"dst":"192.0.2.0/24","gw":"10.5.7.9"},{"dst":"10.5.0.0/16"},{"dst":"fd00:5::/48"}]}}`,
		}, {
			"another plugin", v4Env, "0.3.1", `"delegate":{"type":"other"}`, "other",
			`{"name":"cbr0","cniVersion":"0.3.1","type":"other","mtu":1450,"ipMasq":true,
			 "ipam":{"type":"host-local","ranges":[[{"subnet":"10.5.7.0/24"}]],"routes":[{"dst":"10.5.0.0/16"}]}}`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBed(t, tc.env)
			l := b.list(tc.version, tc.keys)
			rt := container("c1", "eth0")
			result, err := b.runtime.AddNetworkList(t.Context(), l, rt)
			if err != nil {
				t.Fatal(err)
			}
			if result.Version() != tc.version {
				t.Errorf("result has version %s", result.Version())
			}
			var want map[string]any
			if err := json.Unmarshal([]byte(tc.want), &want); err != nil {
				t.Fatal(err)
			}
			line, got := b.called()
			if diff := cmp.Diff(want, got); line != tc.plugin+" ADD c1/eth0" || diff != "" {
				t.Errorf("%s (-want +got):\n%s", line, diff)
			}

			b.write("subnet.env", "damaged") // CHECK and DEL must use the configuration in the note
			if tc.version != "0.3.1" {
				if err := b.runtime.CheckNetworkList(t.Context(), l, rt); err != nil {
					t.Error(err)
				}
				line, got = b.called()
				if got["prevResult"] == nil {
					t.Error("CHECK has no previous result")
				}
				delete(got, "prevResult")
				if diff := cmp.Diff(want, got); line != tc.plugin+" CHECK c1/eth0" || diff != "" {
					t.Errorf("%s (-want +got):\n%s", line, diff)
				}
			}
			if err := b.runtime.DelNetworkList(t.Context(), l, rt); err != nil {
				t.Error(err)
			}
			line, got = b.called()
			if diff := cmp.Diff(want, got); line != tc.plugin+" DEL c1/eth0" || diff != "" {
				t.Errorf("%s (-want +got):\n%s", line, diff)
			}
			if notes := b.notes(); len(notes) > 0 {
				t.Errorf("left behind: %v", notes)
			}
		})
	}
}

func TestRuntimeConfig(t *testing.T) {
	b := newBed(t, v4Env)
	rt := container("c1", "eth0")
	rt.CapabilityArgs = map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080.0}}, "other": true}
	if _, err := b.runtime.AddNetworkList(t.Context(), b.list("0.4.0", `"capabilities":{"portMappings":true}`), rt); err != nil {
		t.Fatal(err)
	}
	_, got := b.called()
	want := map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080.0}}}
	if diff := cmp.Diff(want, got["runtimeConfig"]); diff != "" {
		t.Errorf("runtimeConfig (-want +got):\n%s", diff)
	}
}

// TestAnotherVersion checks that CHECK and DEL call the delegate with the CNI version of the
// present configuration, even if the container was added with another version.
func TestAnotherVersion(t *testing.T) {
	b := newBed(t, v4Env)
	rt := container("c1", "eth0")
	if _, err := b.runtime.AddNetworkList(t.Context(), b.list("0.3.1", ""), rt); err != nil {
		t.Fatal(err)
	}
	b.called()
	expect := func(command, version string, err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
		if line, got := b.called(); line != "bridge "+command+" c1/eth0" || got["cniVersion"] != version {
			t.Errorf("delegate was called with %q and version %v, want %s", line, got["cniVersion"], version)
		}
	}
	expect("CHECK", "1.0.0", b.runtime.CheckNetworkList(t.Context(), b.list("1.0.0", ""), rt))
	expect("DEL", "0.4.0", b.runtime.DelNetworkList(t.Context(), b.list("0.4.0", ""), rt))
}

func TestErrors(t *testing.T) {
	for _, tc := range []struct {
		name, env, keys string
		code            uint
		want            string
	}{
		{"no subnet file", "", "", types.ErrTryAgainLater, "subnet.env: no such file or directory: flanneld has not written it yet"},
		{"empty subnet file", "\n", "", types.ErrTryAgainLater, "no subnet in it"},
		{"no MTU", "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.7.1/24\n", "", types.ErrTryAgainLater, `FLANNEL_MTU is ""`},
		{"name in delegate", v4Env, `"delegate":{"name":"x"}`, types.ErrInvalidNetworkConfig, "delegate.name is not allowed"},
		{"ipam in delegate", v4Env, `"delegate":{"ipam":{}}`, types.ErrInvalidNetworkConfig, "delegate.ipam is not allowed"},
		{"itself", v4Env, `"delegate":{"type":"flannel"}`, types.ErrInvalidNetworkConfig, `delegate.type is "flannel": want another plugin`},
		{"type of another kind", v4Env, `"delegate":{"type":1}`, types.ErrInvalidNetworkConfig, "delegate.type is 1: want a string"},
		{"ipam type that is empty", v4Env, `"ipam":{"type":""}`, types.ErrInvalidNetworkConfig, `ipam.type is "": want a string`},
		{"delegate of another kind", v4Env, `"delegate":[]`, types.ErrDecodingFailure, "parse network configuration"},
		{"routes of another kind", v4Env, `"ipam":{"routes":1}`, types.ErrInvalidNetworkConfig, "ipam.routes"},
		{"no such delegate", v4Env, `"delegate":{"type":"absent"}`, types.ErrInternal, `failed to find plugin "absent"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBed(t, tc.env)
			_, err := b.runtime.AddNetworkList(t.Context(), b.list("1.0.0", tc.keys), container("c1", "eth0"))
			e, ok := errors.AsType[*types.Error](err)
			if !ok || e.Code != tc.code || !strings.Contains(e.Error(), tc.want) {
				t.Errorf("%#v, want code %d and %q", err, tc.code, tc.want)
			}
			b.expectCalled("")
		})
	}
}

func TestDelegateFails(t *testing.T) {
	b := newBed(t, v4Env)
	l, rt := b.list("1.0.0", ""), container("c1", "eth0")
	b.write("fail", "no addresses left")
	if _, err := b.runtime.AddNetworkList(t.Context(), l, rt); err == nil || !strings.Contains(err.Error(), "no addresses left") {
		t.Errorf("ADD: %v", err)
	}
	b.expectCalled("bridge ADD c1/eth0")
	if err := b.runtime.DelNetworkList(t.Context(), l, rt); err == nil {
		t.Error("DEL succeeds although the delegate fails")
	}
	b.expectCalled("bridge DEL c1/eth0")
	if err := os.Remove(filepath.Join(b.dir, "fail")); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"bridge DEL c1/eth0", ""} { // the second call has nothing to do
		if err := b.runtime.DelNetworkList(t.Context(), l, rt); err != nil {
			t.Error(err)
		}
		b.expectCalled(want)
	}
}

// TestDelDespiteConfig checks that CHECK, DEL and GC call the delegate for attached
// containers, although the configuration has become invalid for adding containers. GC must
// also return an error, because it cannot call GC of the delegate.
//
//stages:rest TestErrors has invalid configurations
func TestDelDespiteConfig(t *testing.T) {
	for name, keys := range map[string]string{
		"name in delegate": `"delegate":{"name":"x"}`,
		"ipam in delegate": `"delegate":{"ipam":{}}`,
		"itself":           `"delegate":{"type":"flannel"}`,
		"type of ipam":     `"ipam":{"type":""}`,
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, v4Env)
			for _, id := range []string{"c1", "c2"} {
				if _, err := b.runtime.AddNetworkList(t.Context(), b.list("1.1.0", ""), container(id, "eth0")); err != nil {
					t.Fatal(err)
				}
			}
			b.called()
			l, rt := b.list("1.1.0", keys), container("c1", "eth0")
			if err := b.runtime.CheckNetworkList(t.Context(), l, rt); err != nil {
				t.Error(err)
			}
			b.expectCalled("bridge CHECK c1/eth0")
			if err := b.runtime.DelNetworkList(t.Context(), l, rt); err != nil {
				t.Error(err)
			}
			b.expectCalled("bridge DEL c1/eth0")
			b.runtime = libcni.NewCNIConfigWithCacheDir([]string{b.dir}, filepath.Join(b.dir, "another-cache"), nil)
			err := b.runtime.GCNetworkList(t.Context(), l, &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}})
			if err == nil || !strings.Contains(err.Error(), "network configuration cbr0") {
				t.Errorf("GC: %v, want no call of the delegate", err)
			}
			b.expectCalled("bridge DEL c2/eth0")
			if notes := b.notes(); len(notes) > 0 {
				t.Errorf("left behind: %v", notes)
			}
		})
	}
}

// TestAddTwice checks that the second call fails if the delegate refuses it, and that the note of
// the first call remains.
func TestAddTwice(t *testing.T) {
	b := newBed(t, v4Env)
	l, rt := b.list("1.0.0", ""), container("c1", "eth0")
	if _, err := b.runtime.AddNetworkList(t.Context(), l, rt); err != nil {
		t.Fatal(err)
	}
	b.write("subnet.env", strings.ReplaceAll(v4Env, "10.5.7", "10.5.8"))
	b.write("fail", "it is there")
	if _, err := b.runtime.AddNetworkList(t.Context(), l, rt); err == nil {
		t.Error("the second ADD succeeds")
	}
	if err := os.Remove(filepath.Join(b.dir, "fail")); err != nil {
		t.Fatal(err)
	}
	if err := b.runtime.DelNetworkList(t.Context(), l, rt); err != nil {
		t.Error(err)
	}
	if _, got := b.called(); !strings.Contains(fmt.Sprint(got["ipam"]), "10.5.7.0/24") {
		t.Errorf("deleted with %v", got)
	}
}

// flannelsNote is the content of a note of flannel's plugin. The name of the note's file is
// the container's id, also if the note is for another interface than the first.
const flannelsNote = `{"cniVersion":"0.3.1","hairpinMode":true,"ipMasq":false,"ipam":{"ranges":[[{"subnet":"10.5.3.0/24"}]],` +
	`"routes":[{"dst":"10.5.0.0/16"}],"type":"host-local"},"isDefaultGateway":true,"isGateway":true,"mtu":1450,"name":"cbr0","type":"bridge"}`

func TestDelAfterFlannelsPlugin(t *testing.T) {
	for name, tc := range map[string]struct {
		note   string
		ifaces []string // in the order of deletion
		calls  string
		left   []string
	}{
		"the usual":          {flannelsNote, []string{"eth0"}, "DEL c1/eth0", nil},
		"another interface":  {flannelsNote, []string{"net1"}, "DEL c1/net1", []string{"c1"}},
		"one note for two":   {flannelsNote, []string{"net1", "eth0"}, "DEL c1/net1 DEL c1/eth0", nil},
		"damaged":            {"", []string{"net1"}, "DEL c1/net1", []string{"c1"}},
		"of another network": {strings.Replace(flannelsNote, "cbr0", "other", 1), []string{"net1"}, "", []string{"c1"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, "")
			if err := os.Mkdir(filepath.Join(b.dir, "data"), 0o700); err != nil {
				t.Fatal(err)
			}
			b.write("data/c1", tc.note)
			for _, iface := range tc.ifaces {
				if err := b.runtime.DelNetworkList(t.Context(), b.list("0.3.1", ""), container("c1", iface)); err != nil {
					t.Error(err)
				}
			}
			calls, _ := os.ReadFile(filepath.Join(b.dir, "calls"))
			if got := strings.ReplaceAll(string(calls), " /run/netns/not-there\n", " "); strings.TrimSpace(got) != tc.calls {
				t.Errorf("delegate was called with %q, want %q", got, tc.calls)
			}
			if diff := cmp.Diff(tc.left, b.notes()); diff != "" {
				t.Errorf("notes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCheckAfterFlannelsPlugin(t *testing.T) {
	b := newBed(t, "")
	if err := os.Mkdir(filepath.Join(b.dir, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	b.write("data/c1", flannelsNote)
	if err := b.runtime.CheckNetworkList(t.Context(), b.list("0.4.0", ""), container("c1", "net1")); err != nil {
		t.Error(err)
	}
	b.expectCalled("bridge CHECK c1/net1")
}

// TestDelOfUnknownInterface checks that deleting an unknown interface does not remove the note of
// another interface.
func TestDelOfUnknownInterface(t *testing.T) {
	b := newBed(t, v4Env)
	l := b.list("0.4.0", "")
	if _, err := b.runtime.AddNetworkList(t.Context(), l, container("c1", "eth0")); err != nil {
		t.Fatal(err)
	}
	for _, iface := range []string{"net1", "net1", "eth0"} {
		if diff := cmp.Diff([]string{"c1"}, b.notes()); diff != "" {
			t.Errorf("notes before DEL of %s (-want +got):\n%s", iface, diff)
		}
		if err := b.runtime.DelNetworkList(t.Context(), l, container("c1", iface)); err != nil {
			t.Error(err)
		}
	}
	b.expectCalled("bridge DEL c1/eth0")
	if notes := b.notes(); len(notes) > 0 {
		t.Errorf("left behind: %v", notes)
	}
}

func TestDelOfDamagedNote(t *testing.T) {
	for name, tc := range map[string]struct{ env, keys, text, ranges string }{
		"empty":                 {v4Env, "", "", "[[map[subnet:10.5.7.0/24]]]"},
		"null":                  {v4Env, "", "null", "[[map[subnet:10.5.7.0/24]]]"},
		"without a subnet file": {"", "", `{"type":`, "[[map[subnet:192.0.2.0/24]]]"}, // any range will do
		"mistaken by now":       {v4Env, `"delegate":{"name":"x","ipam":{}}`, "", "[[map[subnet:10.5.7.0/24]]]"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, tc.env)
			if err := os.Mkdir(filepath.Join(b.dir, "data"), 0o700); err != nil {
				t.Fatal(err)
			}
			b.write("data/c1", tc.text)
			if err := b.runtime.DelNetworkList(t.Context(), b.list("0.3.1", tc.keys), container("c1", "eth0")); err != nil {
				t.Error(err)
			}
			line, got := b.called()
			ipam, _ := got["ipam"].(map[string]any)
			if line != "bridge DEL c1/eth0" || got["name"] != "cbr0" || ipam["type"] != "host-local" || fmt.Sprint(ipam["ranges"]) != tc.ranges {
				t.Errorf("delegate was called with %q and %v, want the ranges %s", line, got, tc.ranges)
			}
			if notes := b.notes(); len(notes) > 0 {
				t.Errorf("left behind: %v", notes)
			}
		})
	}
}

func TestTwoInterfaces(t *testing.T) {
	b := newBed(t, v4Env)
	l := b.list("0.4.0", "")
	for _, iface := range []string{"eth0", "net1"} {
		if _, err := b.runtime.AddNetworkList(t.Context(), l, container("c1", iface)); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"c1", "c1@net1"}, b.notes()); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
	for _, iface := range []string{"eth0", "net1"} {
		if err := b.runtime.DelNetworkList(t.Context(), l, container("c1", iface)); err != nil {
			t.Fatal(err)
		}
		b.expectCalled("bridge DEL c1/" + iface)
	}
}

func TestStatus(t *testing.T) {
	b := newBed(t, "")
	l := b.list("1.1.0", "")
	expect := func(code uint, why string) {
		t.Helper()
		err := b.runtime.GetStatusNetworkList(t.Context(), l)
		if e, ok := errors.AsType[*types.Error](err); !ok || e.Code != code || !strings.Contains(e.Error(), why) {
			t.Errorf("STATUS: %v, want code %d", err, code)
		}
	}
	expect(types.ErrPluginNotAvailable, "flanneld has not written it yet")
	b.write("subnet.env", v4Env)
	if err := b.runtime.GetStatusNetworkList(t.Context(), l); err != nil {
		t.Error(err)
	}
	b.expectCalled("bridge STATUS /")
	b.write("fail", "limited")
	expect(7, "limited")
}

func TestGC(t *testing.T) {
	b := newBed(t, v4Env)
	l := b.list("1.1.0", "")
	for _, c := range []*libcni.RuntimeConf{container("c1", "eth0"), container("c2", "eth0"), container("c2", "net1"), container("c3", "net1")} {
		if _, err := b.runtime.AddNetworkList(t.Context(), l, c); err != nil {
			t.Fatal(err)
		}
	}
	b.write("data/of-another-network", `{"name":"another","type":"bridge"}`)
	b.write("data/damaged", `{`)
	b.write("data/flannels", flannelsNote)
	b.write("data/flannels-gone", flannelsNote)
	b.write("calls", "")
	valid := []types.GCAttachment{{ContainerID: "c1", IfName: "eth0"}, {ContainerID: "c2", IfName: "net1"}, {ContainerID: "flannels", IfName: "net1"}}
	// With its usual cache the runtime would first delete the attachments that it knows.
	// The test is about attachments that the runtime has forgotten.
	b.runtime = libcni.NewCNIConfigWithCacheDir([]string{b.dir}, filepath.Join(b.dir, "another-cache"), nil)
	if err := b.runtime.GCNetworkList(t.Context(), l, &libcni.GCArgs{ValidAttachments: valid}); err != nil {
		t.Fatal(err)
	}
	calls, err := os.ReadFile(filepath.Join(b.dir, "calls"))
	if err != nil || string(calls) != "DEL c2/eth0 \nDEL c3/net1 \nDEL flannels-gone/eth0 \nGC / \n" {
		t.Errorf("delegate was called with %q, %v", calls, err)
	}
	line, got := b.called()
	if line != "bridge GC /" || len(got["cni.dev/valid-attachments"].([]any)) != 3 {
		t.Errorf("%s %v", line, got)
	}
	if diff := cmp.Diff([]string{"c1", "c2@net1", "damaged", "flannels", "of-another-network"}, b.notes()); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}

// TestGCWithoutList checks that GC without a list of valid attachments fails and detaches nothing.
// With an empty list it would detach all containers.
func TestGCWithoutList(t *testing.T) {
	b := newBed(t, v4Env)
	l := b.list("1.1.0", "")
	if _, err := b.runtime.AddNetworkList(t.Context(), l, container("c1", "eth0")); err != nil {
		t.Fatal(err)
	}
	b.called()
	config := fmt.Appendf(nil, `{"cniVersion":"1.1.0","name":"cbr0","type":"flannel","subnetFile":%q,"dataDir":%q}`,
		filepath.Join(b.dir, "subnet.env"), filepath.Join(b.dir, "data"))
	err := invoke.ExecPluginWithoutResult(t.Context(), filepath.Join(b.dir, self), config,
		&invoke.Args{Command: "GC", Path: b.dir}, nil)
	if err == nil || !strings.Contains(err.Error(), "cni.dev/valid-attachments") {
		t.Errorf("GC: %v", err)
	}
	b.expectCalled("")
	if diff := cmp.Diff([]string{"c1"}, b.notes()); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"cniVersion":"1.0.0","name":"cbr0","type":"flannel","delegate":{"hairpinMode":true},"ipam":{"routes":[]}}`))
	f.Add([]byte(`{"delegate":null,"ipam":{"type":""},"subnetFile":""}`))
	env := filepath.Join(f.TempDir(), "subnet.env")
	if err := os.WriteFile(env, []byte(dualEnv), 0o600); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseConfig(text)
		if err != nil {
			return
		}
		c.SubnetFile = env
		d, err := c.delegation()
		if err != nil {
			return
		}
		err = d.delegate(func(_ context.Context, plugin string, stdin []byte, _ invoke.Exec) error {
			if plugin == "" || plugin == self || !json.Valid(stdin) {
				t.Errorf("%s is delegated to %q with %s", text, plugin, stdin)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s is not delegated: %v", text, err)
		}
	})
}
