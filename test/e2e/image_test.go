// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"crypto/x509"
	"debug/elf"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// unpackImage builds the image and unpacks it like a container runtime. root is the folder with
// its files. unpackImage also checks the name of the image in the archive.
func unpackImage(t *testing.T) (root string, config imageConfig) {
	t.Helper()
	dir := t.TempDir()
	archive := filepath.Join(dir, "image.tar")
	build := exec.CommandContext(t.Context(), "make", "--no-print-directory", "image", "ARCHIVE="+archive, "VERSION=test", "BIN="+filepath.Join(dir, "bin"))
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	oci := filepath.Join(dir, "oci")
	extract(t, archive, oci)
	blob := func(digest string) string { return filepath.Join(oci, "blobs", strings.ReplaceAll(digest, ":", "/")) }
	var index, manifest struct {
		Manifests, Layers []struct {
			Digest      string
			Annotations map[string]string
		}
		Config struct{ Digest string }
	}
	decodeJSONFile(t, filepath.Join(oci, "index.json"), &index)
	const full = "docker.io/library/flanneld:test" // kubelet expands the name in the manifests to this
	if name := index.Manifests[0].Annotations["org.opencontainers.image.ref.name"]; name != full {
		t.Errorf("the archive names its image %q, want %q", name, full)
	}
	decodeJSONFile(t, blob(index.Manifests[0].Digest), &manifest)
	decodeJSONFile(t, blob(manifest.Config.Digest), &config)
	root = filepath.Join(dir, "root")
	for _, l := range manifest.Layers {
		extract(t, blob(l.Digest), root)
	}
	return root, config
}

// imageConfig contains the keys of an image's configuration that tests read.
type imageConfig struct {
	Config struct {
		Entrypoint []string
		Env        []string
	}
}

// decodeJSONFile decodes a JSON file into the value that into points to.
func decodeJSONFile(t *testing.T, path string, into any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// extract unpacks a tar archive, which may be compressed with gzip. The archive may contain only
// folders, links and regular files; otherwise the test fails. extract runs the program tar,
// because unpacking large files in this process would be slow under the race detector, and would
// delay other tests.
func extract(t *testing.T, archive, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	// With --verbose twice, tar prints a line for each file. It begins with the type, as in ls -l.
	list, err := exec.CommandContext(t.Context(), "tar", "--extract", "--verbose", "--verbose", "--file", archive, "--directory", dir).Output()
	if err != nil {
		t.Fatalf("extract %s: %v", archive, err)
	}
	for line := range strings.Lines(string(list)) {
		if !strings.ContainsRune("dl-", rune(line[0])) {
			t.Errorf("want a folder, link or regular file: %s", line)
		}
	}
}

// TestImage checks that the image contains all programs that the manifests of flannel and of
// distributions call, and that they work with only the files of the image. It also checks the entry point, the CA
// certificates, and that no file is setuid or setgid.
//
//stages:rest it builds images
func TestImage(t *testing.T) {
	t.Parallel()
	root, config := unpackImage(t)
	if e := config.Config.Entrypoint; len(e) != 1 || e[0] != "/opt/bin/flanneld" {
		t.Errorf("the entry point is %q, want /opt/bin/flanneld", e)
	}
	env := []string{"PATH=/none"}
	for _, v := range config.Config.Env {
		if strings.HasPrefix(v, "PATH=") {
			env = []string{v}
		}
	}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", `exec "$@"`, "sh")
		cmd.Args = append(cmd.Args, args...)
		cmd.Env, cmd.Dir = env, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v: %s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	for _, path := range []string{"etc/kube-flannel", "etc/cni/net.d", "opt/cni/bin", "run/flannel"} {
		if err := os.MkdirAll(filepath.Join(root, path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for path, text := range map[string]string{
		"etc/kube-flannel/cni-conf.json": `{"name":"cbr0"}`,
		"run/flannel/subnet.env":         "FLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
	} {
		if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run("/opt/bin/flanneld", "--version")
	run("flannelctl", "version")
	run("/opt/bin/install-conf", "/etc/kube-flannel/cni-conf.json", "/etc/cni/net.d/10-flannel.conflist")
	if text, err := os.ReadFile(filepath.Join(root, "etc/cni/net.d/10-flannel.conflist")); err != nil || string(text) != `{"name":"cbr0"}` {
		t.Errorf("install-conf has written %q (%v), want the configuration that it installs", text, err)
	}
	for _, d := range distributions(t) {
		for _, command := range d.Init {
			copied := filepath.Join(root, command[len(command)-1])
			if err := os.RemoveAll(copied); err != nil {
				t.Fatal(err)
			}
			run(command...)
			want, errWant := os.ReadFile(filepath.Join(root, command[len(command)-2]))
			got, err := os.ReadFile(copied)
			if err := errors.Join(errWant, err); err != nil || len(want) == 0 || !bytes.Equal(got, want) {
				t.Errorf("%s: %s: %v, want a copy", d.name, strings.Join(command, " "), err)
			}
		}
	}
	if info, err := os.Lstat(filepath.Join(root, "opt/cni/bin/flannel")); err != nil || !info.Mode().IsRegular() || info.Size() < 1<<20 {
		t.Errorf("the CNI plugin is %v (%v), want a regular file of at least 1 MiB", info, err)
	}
	run("/opt/bin/mk-docker-opts.sh", "-c")
	if text, err := os.ReadFile(filepath.Join(root, "run/docker_opts.env")); err != nil || !strings.Contains(string(text), "--bip=10.1.74.1/24") {
		t.Errorf("the options for Docker are %q (%v), want --bip=10.1.74.1/24", text, err)
	}
	for command, want := range map[string]string{"iptables": "nf_tables", "iptables-legacy": "legacy", "ip6tables-nft": "nf_tables"} {
		if out := run(command, "--version"); !strings.Contains(out, want) {
			t.Errorf("%s --version is %q, want %s", command, out, want)
		}
	}
	run("iptables-nft", "-t", "nat", "-A", "POSTROUTING", "-m", "mark", "--mark", "0x4000/0x4000", "-m", "comment", "--comment", "x", "-j", "MASQUERADE", "--random-fully")

	run("sh", "-c", `iptables-legacy -t nat -A PREROUTING -m statistic --mode random --probability 0.5 -j ACCEPT && iptables-legacy-save`) // a rule like kube-proxy's
	expectLibraries(t, root)

	roots := x509.NewCertPool()
	if text, err := os.ReadFile(filepath.Join(root, "etc/ssl/certs/ca-certificates.crt")); err != nil || !roots.AppendCertsFromPEM(text) {
		t.Errorf("the image contains no CA certificates: %v", err)
	}

	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Mode()&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
			t.Errorf("%s has mode %s, want neither setuid nor setgid", path, info.Mode())
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// expectLibraries checks that the image contains all libraries that its programs and libraries
// load. It compares only the names of files.
func expectLibraries(t *testing.T, root string) {
	t.Helper()
	have, needs := map[string]bool{}, map[string][]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		have[d.Name()] = true
		f, err := elf.Open(path)
		if err != nil {
			return nil //nolint:nilerr // not an ELF file
		}
		defer f.Close()
		needs[path], err = f.ImportedLibraries()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for path, libraries := range needs {
		for _, library := range libraries {
			if !have[library] {
				t.Errorf("the image does not contain %s, which %s loads", library, strings.TrimPrefix(path, root))
			}
		}
	}
}
