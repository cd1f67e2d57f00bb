// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// registry is the name of the registry in references to test images. There is no such
// registry.
const registry = "images.invalid"

// image is a container image whose files are programs and other files of this machine.
type image struct {
	names      []string          // full references to the image
	files      map[string]string // path in the image to path on this machine
	links      map[string]string // path in the image to target
	entrypoint []string
}

// testImages returns the images of all pods except the daemon's: those in the list of
// Kubernetes' tests, that of the sandbox of every pod, and that of the cluster's DNS.
func testImages(t *testing.T) []image {
	t.Helper()
	pause := image{names: []string{registry + "/pause:test"}, files: map[string]string{"/pause": tool(t, "kubernetes/pause")}, entrypoint: []string{"/pause"}}
	dns := image{names: []string{registry + "/dns:test"}, files: map[string]string{"/dns": tool(t, "kubernetes/dns")}, entrypoint: []string{"/dns"}}
	box := busybox(t)
	host := busybox(t)
	host.names = []string{agnhost}
	host.files["/agnhost"] = tool(t, "kubernetes/agnhost")
	for _, file := range []string{"localhost.crt", "localhost.key"} { // for the server with TLS of agnhost
		host.files["/"+file] = tool(t, "kubernetes/"+file)
	}
	host.links["/agnhost-2"] = "agnhost"
	host.entrypoint = []string{"/agnhost", "pause"}
	for _, program := range []string{"curl", "dig", "getent", "nc", "sh", "ss"} { // sh too, because the shell of busybox prefers the nc of busybox
		host.addProgram(t, program)
	}
	of := map[string]*image{"/agnhost": &host, "/glibc-dns-testing": &host, "/busybox": &box, "/pause": &pause}
	list := exec.CommandContext(t.Context(), tool(t, "kubernetes/conformance.test"), "--list-images")
	list.Env = append(os.Environ(), repositories(t))
	out, err := list.Output()
	if err != nil {
		t.Fatalf("list images: %v", err)
	}
	for name := range strings.FieldsSeq(string(out)) {
		repository, _, _ := strings.Cut(name, ":")
		if i := of[strings.TrimPrefix(repository, registry)]; i != nil {
			i.names = append(i.names, name)
		}
	}
	return []image{pause, dns, box, host}
}

// agnhost is the reference with which the tests of this package use the image with the
// servers of Kubernetes' tests. Kubernetes' tests use the same image with a reference of
// their own.
const agnhost = registry + "/agnhost:test"

// repositories returns the environment variable, as NAME=value, that makes Kubernetes'
// tests use images of registry.
func repositories(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "repositories.yaml")
	if err := os.WriteFile(file, []byte("promoterE2eRegistry: "+registry+"\ngcRegistry: "+registry+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return "KUBE_TEST_REPO_LIST=" + file
}

// busybox returns an image with busybox and links for all of its applets, including a
// shell.
func busybox(t *testing.T) image {
	t.Helper()
	const program = "/bin/busybox"
	out, err := exec.CommandContext(t.Context(), program, "--list").Output()
	if err != nil {
		t.Fatalf("list what busybox can do (make deps): %v", err)
	}
	i := image{files: map[string]string{program: program}, links: map[string]string{}, entrypoint: []string{"sh"}}
	for applet := range strings.FieldsSeq(string(out)) {
		if applet != "busybox" {
			i.links["/bin/"+applet] = program
		}
	}
	return i
}

// addProgram adds a program of this machine and the libraries that it loads. It removes
// the applet of busybox with the same name.
func (i *image) addProgram(t *testing.T, name string) {
	t.Helper()
	program, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%v (make deps)", err)
	}
	out, err := exec.CommandContext(t.Context(), "ldd", program).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", program, err)
	}
	for word := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(word, "/") {
			i.files[word] = word
		}
	}
	delete(i.links, "/bin/"+name)
	i.files["/bin/"+name] = program
}

// pack writes the images to an OCI archive, each with all of its names, and returns the
// path.
func pack(t *testing.T, images []image) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "images.tar")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	a := &archive{tar: tar.NewWriter(f), written: map[string]bool{}}
	var index []descriptor
	for _, i := range images {
		d, err := a.image(t.TempDir(), i)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range i.names {
			d.Annotations = map[string]string{"org.opencontainers.image.ref.name": name}
			index = append(index, d)
		}
	}
	err = errors.Join(
		a.json("index.json", map[string]any{"schemaVersion": 2, "manifests": index}),
		a.json("oci-layout", map[string]string{"imageLayoutVersion": "1.0.0"}),
		a.tar.Close(),
	)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// descriptor refers to a blob of an archive.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type archive struct {
	tar     *tar.Writer
	written map[string]bool // digests
}

// image adds the blobs of an image with one uncompressed layer, and returns the
// descriptor of its manifest.
func (a *archive) image(dir string, i image) (descriptor, error) {
	file := filepath.Join(dir, "layer.tar")
	if err := i.writeLayer(file); err != nil {
		return descriptor{}, err
	}
	layer, err := a.blobFile("application/vnd.oci.image.layer.v1.tar", file)
	if err != nil {
		return descriptor{}, err
	}
	config, err := a.blobJSON("application/vnd.oci.image.config.v1+json", map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "rootfs": map[string]any{"type": "layers", "diff_ids": []string{layer.Digest}},
		"config": map[string]any{"Env": []string{"PATH=/bin"}, "Entrypoint": i.entrypoint[:1], "Cmd": i.entrypoint[1:]},
	})
	if err != nil {
		return descriptor{}, err
	}
	const manifest = "application/vnd.oci.image.manifest.v1+json"
	return a.blobJSON(manifest, map[string]any{"schemaVersion": 2, "mediaType": manifest, "config": config, "layers": []descriptor{layer}})
}

func (i image) writeLayer(file string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	for _, folder := range []string{"/tmp", "/etc", "/uploads"} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: folder[1:] + "/", Mode: 0o777}))
	}
	for to, from := range i.files {
		err = errors.Join(err, addFile(w, to, from))
	}
	for from, to := range i.links {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: from[1:], Linkname: to, Mode: 0o777}))
	}
	return errors.Join(err, w.Close())
}

func addFile(w *tar.Writer, to, from string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: to[1:], Mode: 0o755, Size: info.Size()}); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}

func (a *archive) json(name string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return a.add(name, int64(len(text)), strings.NewReader(string(text)))
}

func (a *archive) add(name string, size int64, text io.Reader) error {
	if a.written[name] {
		return nil
	}
	a.written[name] = true
	if err := a.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: size}); err != nil {
		return err
	}
	_, err := io.Copy(a.tar, text)
	return err
}

func (a *archive) blobJSON(mediaType string, value any) (descriptor, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return descriptor{}, err
	}
	return a.blob(mediaType, strings.NewReader(string(text)))
}

func (a *archive) blobFile(mediaType, file string) (descriptor, error) {
	f, err := os.Open(file)
	if err != nil {
		return descriptor{}, err
	}
	defer f.Close()
	return a.blob(mediaType, f)
}

func (a *archive) blob(mediaType string, text io.ReadSeeker) (descriptor, error) {
	sum := sha256.New()
	size, err := io.Copy(sum, text)
	if err != nil {
		return descriptor{}, err
	}
	if _, err := text.Seek(0, io.SeekStart); err != nil {
		return descriptor{}, err
	}
	digest := fmt.Sprintf("%x", sum.Sum(nil))
	return descriptor{MediaType: mediaType, Digest: "sha256:" + digest, Size: size}, a.add(path.Join("blobs/sha256", digest), size, text)
}
