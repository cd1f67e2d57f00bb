// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/websocket"
)

// packedFile returns an archive like that of a host, with one file.
func packedFile(t *testing.T, name, text string) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	w := tar.NewWriter(z)
	_ = w.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(text))})
	_, _ = w.Write([]byte(text))
	_, _ = w.Close(), z.Close()
	return out.Bytes()
}

// fakeCluster is an API server with a pod of flanneld on each of its nodes.
type fakeCluster struct {
	t     *testing.T
	pods  []string                         // in JSON
	execs map[string]func(*websocket.Conn) // nil if the command is refused
}

// add adds a Node with a pod of a phase, which runs exec.
func (c *fakeCluster) add(node, phase string, restarts int, exec func(*websocket.Conn)) {
	c.pods = append(c.pods, fmt.Sprintf(`{"metadata":{"name":"pod-%s","managedFields":["long"]},"spec":{"nodeName":%[1]q,"initContainers":[{"name":"install"}],
		"containers":[{"name":"kube-flannel","env":[{"name":"ETCD_PASSWORD","value":"secret of pod"}]}]},
		"status":{"phase":%q,"containerStatuses":[{"name":"kube-flannel","restartCount":%d}]}}`, node, phase, restarts))
	c.execs["pod-"+node] = exec
}

// sends returns a command that writes an archive in several messages, and then has an outcome.
func sends(archive []byte, outcome string) func(*websocket.Conn) {
	return answers(archive, "text of the failure", outcome)
}

func answers(archive []byte, stderr, outcome string) func(*websocket.Conn) {
	return func(ws *websocket.Conn) {
		for part := range slices.Chunk(archive, 100) {
			_ = websocket.Message.Send(ws, append([]byte{1}, part...))
		}
		_ = websocket.Message.Send(ws, []byte("\x02"+stderr))
		_ = websocket.Message.Send(ws, []byte("\x03"+outcome))
	}
}

func (c *fakeCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const namespaced = "/api/v1/namespaces/kube-flannel/"
	q := r.URL.Query()
	list := func(objects ...string) { fmt.Fprintf(w, `{"items":[%s]}`, strings.Join(objects, ",")) }
	pod, sub, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, namespaced+"pods/"), "/")
	switch {
	case r.URL.Path == namespaced+"pods":
		list(c.pods...)
	case r.URL.Path == "/apis/apps/v1/namespaces/kube-flannel/daemonsets" && q.Get("labelSelector") == "app=flannel":
		list(`{"kind":"DaemonSet","args":["--etcd-password","secret of args"]}`)
	case r.URL.Path == namespaced+"configmaps":
		list(`{"data":{"net-conf.json":"{\n  \"Backend\": {\"PSK\": \"secret+of/config=\"}}"}}`)
	case r.URL.Path == "/api/v1/nodes" && q.Get("continue") == "":
		fmt.Fprint(w, `{"metadata":{"continue":"2"},"items":[{"metadata":{"name":"first"},"status":{"images":["long"],"conditions":["c"]}}]}`)
	case r.URL.Path == "/api/v1/nodes":
		list(`{"metadata":{"name":"second"}}`)
	case r.URL.Path == namespaced+"events":
		list(`{"message":"of a pod"}`)
	case r.URL.Path == "/api/v1/namespaces/default/events" && q.Get("fieldSelector") == "involvedObject.kind=Node":
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"message":"events is forbidden"}`)
	case sub == "log":
		fmt.Fprintf(w, "log of %s, previous %q: secret of args, secret+of/config=, secret of pod", q.Get("container"), q.Get("previous"))
	case sub == "exec" && c.execs[pod] == nil:
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, `{"message":"pods %s is forbidden"}`, pod)
	case sub == "exec":
		if command := strings.Join(q["command"], " "); command != "flannelctl sysdump --file=-" || q.Get("container") != "kube-flannel" {
			c.t.Errorf("%q is executed in %s", command, q.Get("container"))
		}
		websocket.Server{
			Handshake: func(config *websocket.Config, _ *http.Request) error {
				config.Protocol = config.Protocol[:1]
				return nil
			},
			Handler: func(ws *websocket.Conn) {
				ws.PayloadType = websocket.BinaryFrame
				c.execs[pod](ws)
			},
		}.ServeHTTP(w, r)
	default:
		c.t.Errorf("%s is requested", r.URL)
		http.NotFound(w, r)
	}
}

// TestSysdumpCluster checks that the archive of a cluster has what the API server and all pods that answer say, without
// secrets, and that each pod that does not is named in one line.
func TestSysdumpCluster(t *testing.T) {
	const success = `{"status":"Success"}`
	c := &fakeCluster{t: t, execs: map[string]func(*websocket.Conn){}}
	good := sends(packedFile(t, "folder/kernel/links.txt", "link, secret+of/config= and \"secret of args\""), success)
	released := make(chan struct{})
	c.add("hangs", "Running", 0, func(*websocket.Conn) { <-released })
	c.add("good0", "Running", 0, good)
	c.add("good1", "Running", 1, good)
	c.add("waits", "Pending", 0, good)
	c.add("escapes", "Running", 0, sends(packedFile(t, "folder/../../etc/passwd", "x"), success))
	c.add("fails", "Running", 0, sends(nil, `{"status":"Failure","message":"no such file"}`))
	// The first is what the commit before that of sysdump answers, the second what containerd says about flannel's image.
	c.add("old1", "Running", 0, answers(nil, "flannelctl: unknown command \"sysdump\" for \"flannelctl\"\n",
		`{"status":"Failure","message":"command terminated with non-zero exit code: command terminated with exit code 1","reason":"NonZeroExitCode"}`))
	c.add("old2", "Running", 0, answers(nil, "",
		`{"status":"Failure","message":"Internal error occurred: error executing command in container: failed to exec in container: failed to start exec \"1a2b3c\": OCI runtime exec failed: exec failed: unable to start container process: exec: \"flannelctl\": executable file not found in $PATH: unknown"}`))
	c.add("ends", "Running", 0, func(*websocket.Conn) {})
	c.add("refused1", "Running", 0, nil)
	c.add("refused2", "Running", 0, nil)
	server := httptest.NewServer(c)
	defer server.Close()
	defer close(released)
	h, dir := emptyHost(t)
	file := filepath.Join(dir, "cluster.tar.gz")
	out, err := h.run(t, "sysdump", "cluster", "--kube-api-url="+server.URL, "--timeout=2s", "--file="+file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for i, want := range []string{
		file, "incomplete: cluster/events-of-nodes.json: you need the right to list events: ", "incomplete: hangs: no answer within 2s",
		"incomplete: waits: the pod pod-waits does not run: it is Pending", `incomplete: escapes: its archive has the file "folder/../../etc/passwd"`,
		"incomplete: fails: no such file: text of the failure",
		"incomplete: old1, old2: the image of the pod has no flannelctl, or an older one without sysdump: only the logs of the pod are here", "incomplete: ends: the connection to the pod has ended before the command",
		"incomplete: refused1, refused2: you need the rights to get and create pods/exec in namespace kube-flannel: ",
	} {
		if i >= len(lines) || !strings.HasPrefix(lines[i], want) {
			t.Errorf("no line %d %q in\n%s", i, want, out)
		}
	}
	packed, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	files := unpack(t, string(packed))
	for name, want := range map[string]string{
		"cluster/daemonsets.json": `"DaemonSet"`, "cluster/configmaps.json": "net-conf.json", "cluster/pods.json": `"pod-waits"`,
		"cluster/nodes.json": `"second"`, "cluster/events.json": "of a pod", "cluster/events-of-nodes.json": "incomplete: ",
		"hosts/good1/kernel/links.txt": "link, [redacted] and", "hosts/good1/pod-good1/install.log": "log of install", "hosts/good1/pod-good1/sysdump.txt": "1 files",
		"hosts/good1/pod-good1/kube-flannel-previous.log": `previous "true"`, "hosts/waits/pod-waits/kube-flannel.log": "log of kube-flannel",
		"hosts/old1/pod-old1/sysdump.txt": "0 files\n\nincomplete: the image of the pod has no flannelctl, ", "hosts/old1/pod-old1/kube-flannel.log": "log of kube-flannel",
		"hosts/hangs/pod-hangs/sysdump.txt": "incomplete: no answer within 2s",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s: no %q in %q", name, want, files[name])
		}
	}
	for name, text := range files {
		for _, secret := range []string{"secret of args", "secret+of/config=", "secret of pod", `"long"`} {
			if strings.Contains(text, secret) {
				t.Errorf("%s contains %q", name, secret)
			}
		}
		if _, ok := strings.CutPrefix(name, "cluster/"); ok && name != "cluster/events-of-nodes.json" {
			for d := json.NewDecoder(strings.NewReader(text)); d.More(); {
				if err := d.Decode(&struct{}{}); err != nil {
					t.Errorf("%s: %v", name, err)
					break
				}
			}
		}
	}
	if _, ok := files["hosts/good0/pod-good0/kube-flannel-previous.log"]; ok {
		t.Error("a log before a restart exists of a container that was not restarted")
	}
}
