package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"flanneld/pkg/lab"
)

// kubelet runs pods of the cluster's API server on hosts of the lab, as far as a
// network daemon needs one: every container is from one image and on the network
// of its host; probes are left to the test.
type kubelet struct {
	c     *cluster
	image string   // the image's root
	env   []string // of the image
}

// pod is what the kubelet reads of a Pod.
type pod struct {
	Metadata struct{ Name, Namespace string }
	Spec     struct {
		NodeName           string
		ServiceAccountName string
		InitContainers     []podContainer
		Containers         []podContainer
		Volumes            []podVolume
	}
}

type podContainer struct {
	Name, Image   string
	Command, Args []string
	Env           []struct {
		Name, Value string
		ValueFrom   struct{ FieldRef struct{ FieldPath string } }
	}
	VolumeMounts []struct {
		Name, MountPath string
		ReadOnly        bool
	}
	SecurityContext struct {
		ReadOnlyRootFilesystem, Privileged bool
		AllowPrivilegeEscalation           *bool
		Capabilities                       struct{ Add, Drop []string }
	}
	LivenessProbe, ReadinessProbe struct {
		HTTPGet struct {
			Host, Path string
			Port       any
		}
	}
}

type podVolume struct {
	Name      string
	HostPath  *struct{ Path, Type string }
	ConfigMap *struct{ Name string }
	Projected *struct {
		Sources []struct {
			ServiceAccountToken *struct{ Path string }
			ConfigMap           *struct{ Name string }
			DownwardAPI         *struct {
				Items []struct {
					Path     string
					FieldRef struct{ FieldPath string }
				}
			}
		}
	}
}

func (p pod) field(t *testing.T, path string) string {
	t.Helper()
	value, ok := map[string]string{
		"metadata.name": p.Metadata.Name, "metadata.namespace": p.Metadata.Namespace, "spec.nodeName": p.Spec.NodeName,
	}[path]
	if !ok {
		t.Fatalf("field %s is none that these tests know", path)
	}
	return value
}

// schedule makes the Pod of a DaemonSet for Node n, as its controller does; the
// API server fills in what the manifest leaves to it.
func (k *kubelet) schedule(namespace, daemonSet string, n int) pod {
	c := k.c
	c.t.Helper()
	var ds struct {
		Spec struct {
			Template struct {
				Metadata struct{ Labels, Annotations map[string]string }
				Spec     map[string]any
			}
		}
	}
	raw := c.do(http.MethodGet, "/apis/apps/v1/namespaces/"+namespace+"/daemonsets/"+daemonSet, nil, "")
	if err := json.Unmarshal(raw, &ds); err != nil {
		c.t.Fatal(err)
	}
	spec := ds.Spec.Template.Spec
	spec["nodeName"] = nodeName(n)
	raw = c.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods", map[string]any{
		"apiVersion": "v1", "kind": "Pod", "spec": spec,
		"metadata": map[string]any{
			"name": fmt.Sprintf("%s-%d", daemonSet, n), "labels": ds.Spec.Template.Metadata.Labels, "annotations": ds.Spec.Template.Metadata.Annotations,
		},
	}, "")
	var p pod
	if err := json.Unmarshal(raw, &p); err != nil {
		c.t.Fatal(err)
	}
	for _, one := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		if one.Image != p.Spec.Containers[0].Image {
			c.t.Fatalf("%s is from %s, and not from the image under test", one.Name, one.Image)
		}
	}
	return p
}

// run runs the init containers, one after the other, and starts the daemon, as
// which the first container is taken.
func (k *kubelet) run(h *lab.Host, p pod, afterInit func(name string)) {
	t := k.c.t
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range p.Spec.InitContainers {
		if out, err := h.Exec(background(t), "env", containerSpec+"="+k.container(h, p, one), self); err != nil {
			t.Fatalf("%s of %s: %v: %s", one.Name, p.Metadata.Name, err, out)
		}
		afterInit(one.Name)
	}
	start(t, h, lab.FlanneldOptions{Path: self, Env: []string{containerSpec + "=" + k.container(h, p, p.Spec.Containers[0])}})
}

// exec runs a command where the daemon runs, as kubectl exec has it done.
func (k *kubelet) exec(h *lab.Host, p pod, command ...string) string {
	t := k.c.t
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	one := p.Spec.Containers[0]
	one.Command, one.Args = command, nil
	out, err := h.Exec(background(t), "env", containerSpec+"="+k.container(h, p, one), self)
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(command, " "), err, out)
	}
	return string(out)
}

// container returns the specification of one container, for becomeContainer.
func (k *kubelet) container(h *lab.Host, p pod, one podContainer) string {
	t := k.c.t
	t.Helper()
	sc := one.SecurityContext
	spec := container{
		Root: k.image, ReadOnlyRoot: sc.ReadOnlyRootFilesystem, Privileged: sc.Privileged,
		NoNewPrivs: sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation,
		Command:    slices.Concat(one.Command, one.Args), Env: slices.Clone(k.env),
	}
	if !slices.Contains(sc.Capabilities.Drop, "ALL") {
		spec.Capabilities = defaultCapabilities()
	}
	spec.Capabilities = append(spec.Capabilities, sc.Capabilities.Add...)
	api := k.c.api.Addr(h)
	spec.Env = append(spec.Env, "KUBERNETES_SERVICE_HOST="+api.Addr().String(), fmt.Sprintf("KUBERNETES_SERVICE_PORT=%d", api.Port()))
	for _, v := range one.Env {
		if v.ValueFrom.FieldRef.FieldPath != "" {
			v.Value = p.field(t, v.ValueFrom.FieldRef.FieldPath)
		}
		spec.Env = append(spec.Env, v.Name+"="+v.Value)
	}
	for _, m := range one.VolumeMounts {
		i := slices.IndexFunc(p.Spec.Volumes, func(v podVolume) bool { return v.Name == m.Name })
		if i < 0 {
			t.Fatalf("%s mounts %s, which is no volume", one.Name, m.Name)
		}
		if v := p.Spec.Volumes[i].HostPath; v != nil && v.Path == "/" { // no more of it than what hosts of the lab have to themselves
			for _, folder := range []string{"/run/flannel", "/var/lib/flannel", "/etc/cni/net.d"} {
				spec.Mounts = append(spec.Mounts, bind{From: onNode(folder), To: m.MountPath + folder})
			}
			continue
		}
		from := k.volume(h, p, p.Spec.Volumes[i])
		spec.Mounts = append(spec.Mounts, bind{From: from, To: m.MountPath, ReadOnly: m.ReadOnly})
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// onNode is where a path of the node is on its host: what hosts of the lab do
// not have to themselves is kept below /run.
func onNode(path string) string {
	for _, own := range []string{"/run/", "/var/lib/"} {
		if strings.HasPrefix(path, own) {
			return path
		}
	}
	return "/run/node" + path
}

// volume prepares a volume and returns where it is on the host.
func (k *kubelet) volume(h *lab.Host, p pod, v podVolume) string {
	t := k.c.t
	t.Helper()
	dir := filepath.Join("/run/kubelet", p.Metadata.Name, v.Name)
	switch {
	case v.HostPath != nil:
		path := onNode(v.HostPath.Path)
		err := os.MkdirAll(filepath.Dir(h.Path(path)), 0o755)
		if v.HostPath.Type == "FileOrCreate" {
			if _, missing := os.Stat(h.Path(path)); err == nil && missing != nil {
				err = os.WriteFile(h.Path(path), nil, 0o600)
			}
		} else if err == nil {
			err = os.MkdirAll(h.Path(path), 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	case v.ConfigMap != nil:
		for name, text := range k.configMap(p.Metadata.Namespace, v.ConfigMap.Name) {
			k.put(h, filepath.Join(dir, name), text)
		}
	case v.Projected != nil:
		for _, s := range v.Projected.Sources {
			switch {
			case s.ServiceAccountToken != nil:
				k.put(h, filepath.Join(dir, s.ServiceAccountToken.Path), k.token(p))
			case s.ConfigMap != nil:
				for name, text := range k.configMap(p.Metadata.Namespace, s.ConfigMap.Name) {
					k.put(h, filepath.Join(dir, name), text)
				}
			case s.DownwardAPI != nil:
				for _, item := range s.DownwardAPI.Items {
					k.put(h, filepath.Join(dir, item.Path), p.field(t, item.FieldRef.FieldPath))
				}
			}
		}
	default:
		t.Fatalf("volume %s is of a kind that these tests do not know", v.Name)
	}
	return dir
}

func (k *kubelet) put(h *lab.Host, path, text string) {
	k.c.t.Helper()
	err := os.MkdirAll(filepath.Dir(h.Path(path)), 0o755)
	if err == nil {
		err = os.WriteFile(h.Path(path), []byte(text), 0o600)
	}
	if err != nil {
		k.c.t.Fatal(err)
	}
}

func (k *kubelet) configMap(namespace, name string) map[string]string {
	k.c.t.Helper()
	var m struct{ Data map[string]string }
	if err := json.Unmarshal(k.c.do(http.MethodGet, "/api/v1/namespaces/"+namespace+"/configmaps/"+name, nil, ""), &m); err != nil {
		k.c.t.Fatal(err)
	}
	return m.Data
}

// token asks for one of the Pod's ServiceAccount.
func (k *kubelet) token(p pod) string {
	k.c.t.Helper()
	path := fmt.Sprintf("/api/v1/namespaces/%s/serviceaccounts/%s/token", p.Metadata.Namespace, p.Spec.ServiceAccountName)
	var answer struct{ Status struct{ Token string } }
	raw := k.c.do(http.MethodPost, path, map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": map[string]any{}}, "")
	if err := json.Unmarshal(raw, &answer); err != nil {
		k.c.t.Fatal(err)
	}
	return answer.Status.Token
}

// publishRoot does what a controller does in every namespace: it puts what the
// API server's certificate is checked against where pods find it.
func (k *kubelet) publishRoot(namespace string) {
	k.c.t.Helper()
	ca, err := os.ReadFile(k.c.api.CA())
	if err != nil {
		k.c.t.Fatal(err)
	}
	k.c.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/configmaps", map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "kube-root-ca.crt"}, "data": map[string]string{"ca.crt": string(ca)},
	}, "")
}
