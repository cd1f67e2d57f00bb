// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	releaseVersion = "v9.8.7"
	releaseTime    = 1700000000
)

// programs are the compiled files of every tarball. Except for the bill of materials, all
// other files come from the tree.
var programs = []string{"flannel", "flannelctl", "flanneld", "install-conf"}

// largest maps programs to their largest size for amd64 in bytes.
var largest = map[string]int{"flanneld": 26_000_000, "flannelctl": 22_000_000}

// machines maps architectures to the machine type in the header of their programs.
var machines = map[string]elf.Machine{
	"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64, "arm": elf.EM_ARM, "ppc64le": elf.EM_PPC64, "s390x": elf.EM_S390, "riscv64": elf.EM_RISCV,
}

// architectures returns the architectures for which the tests build a release. With
// -short these are only the architecture of most hosts and one with 32 bits, where Go's
// int is smaller.
func architectures() []string {
	if testing.Short() {
		return []string{"amd64", "arm"}
	}
	return []string{"amd64", "arm64", "arm", "ppc64le", "s390x", "riscv64"} // in the order of the Makefile
}

// releaseTarballs checks the tarballs in dir, and runs the programs for this machine's
// architecture. tree is the clone from which the release was built.
func releaseTarballs(t *testing.T, tree, dir string) {
	for _, arch := range architectures() {
		t.Run(arch, func(t *testing.T) {
			files := unpack(t, filepath.Join(dir, fmt.Sprintf("flannel-%s-linux-%s.tar.gz", releaseVersion, arch)))
			sameAsTree(t, tree, files)
			links(t, files)
			for _, name := range programs {
				static(t, tree, name, files[name], machines[arch])
			}
			materials(t, files["sbom.cdx.json"])
			if arch == runtime.GOARCH {
				runs(t, files)
			}
		})
	}
}

// unpack returns the files of a tarball by name. All must belong to root, have the time
// of the release, and have the usual mode.
func unpack(t *testing.T, path string) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(gunzip(t, read(t, path)))); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		want := fs.FileMode(0o644)
		if h.FileInfo().IsDir() || slices.Contains(programs, h.Name) || strings.HasSuffix(h.Name, ".sh") {
			want = 0o755
		}
		if got := h.FileInfo().Mode().Perm(); got != want || h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != releaseTime {
			t.Errorf("%s: mode %o, want %o; owner %d:%d, of %v", h.Name, got, want, h.Uid, h.Gid, h.ModTime)
		}
		if h.FileInfo().IsDir() {
			continue
		}
		files[h.Name] = content(t, r, h)
	}
}

// sameAsTree checks that the tarball contains the expected files, and that those from the
// tree have the same content there.
func sameAsTree(t *testing.T, tree string, files map[string][]byte) {
	t.Helper()
	want := map[string]string{"mk-docker-opts.sh": filepath.Join(tree, "dist/mk-docker-opts.sh")}
	for _, name := range []string{"README.md", "LICENSE", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"} {
		want[name] = filepath.Join(tree, name)
	}
	for _, from := range []string{"Documentation", "systemd", "rt_protos.d", "prometheus", "grafana", "kubernetes/base", "kubernetes/chart"} {
		base := filepath.Join(tree, "dist")
		if from == "Documentation" {
			base = tree
		}
		err := filepath.WalkDir(filepath.Join(base, from), func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && filepath.Ext(path) != ".go" {
				want[strings.TrimPrefix(path, base+"/")] = path
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	names := append(slices.Collect(maps.Keys(want)), append(programs, "sbom.cdx.json")...)
	slices.Sort(names)
	if diff := cmp.Diff(names, slices.Sorted(maps.Keys(files))); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	for name, path := range want {
		raw, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(raw, files[name]) {
			t.Errorf("%s is not %s as it is in the tree: %v", name, path, err)
		}
	}
}

var linkText = regexp.MustCompile(`\]\(([^():#\s]+)(?:#[^()\s]*)?\)`)

// links checks that links from one page to another lead to files in the tarball.
func links(t *testing.T, files map[string][]byte) {
	t.Helper()
	n := 0
	for name, text := range files {
		if filepath.Ext(name) != ".md" {
			continue
		}
		for _, m := range linkText.FindAllSubmatch(text, -1) {
			n++
			if to := filepath.Join(filepath.Dir(name), string(m[1])); files[to] == nil {
				t.Errorf("%s links to %s, which does not exist", name, m[1])
			}
		}
	}
	if n < 50 {
		t.Errorf("only %d links found", n)
	}
}

// static checks that a program is for that machine, is linked statically, and does not
// contain the path of its build.
func static(t *testing.T, tree, name string, raw []byte, machine elf.Machine) {
	t.Helper()
	f, err := elf.NewFile(bytes.NewReader(raw))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			t.Errorf("%s is not static", name)
		}
	}
	if f.Machine != machine {
		t.Errorf("%s is for %v, want %v", name, f.Machine, machine)
	}
	if bytes.Contains(raw, []byte(tree+"/")) {
		t.Errorf("%s contains the path of its build", name)
	}

	// It calls methods by names that the linker does not know. So the linker keeps the exported methods
	// of all types, which makes flanneld larger by 6 MB and flannelctl by 9 MB.
	if bytes.Contains(raw, []byte("text/template.(*state).evalField")) {
		t.Errorf("%s contains text/template", name)
	}
	if limit := largest[name]; machine == elf.EM_X86_64 && limit > 0 && len(raw) > limit {
		t.Errorf("%s has %d bytes, want at most %d", name, len(raw), limit)
	}
}

// materials checks that the bill of materials of a tarball names the release, all its
// programs and some of their modules.
func materials(t *testing.T, raw []byte) {
	t.Helper()
	var bill struct {
		BOMFormat string
		Metadata  struct {
			Component struct{ Name, Version string }
		}
		Components []struct{ Type, Name, Version string }
	}
	if err := json.Unmarshal(raw, &bill); err != nil {
		t.Fatal(err)
	}
	if c := bill.Metadata.Component; bill.BOMFormat != "CycloneDX" || c.Name != "flanneld" || c.Version != releaseVersion {
		t.Errorf("bill of materials in format %s for %+v", bill.BOMFormat, c)
	}
	found := map[string]bool{}
	for _, c := range bill.Components {
		found[c.Type+" "+c.Name] = c.Version != ""
	}
	want := []string{"library std", "library github.com/vishvananda/netlink", "library go.etcd.io/etcd/client/v3", "library k8s.io/client-go"}
	for _, p := range programs {
		want = append(want, "application "+p)
	}
	for _, name := range want {
		if !found[name] {
			t.Errorf("the bill of materials has no %s", name)
		}
	}
}

// runs runs the programs of a tarball in a directory that contains only them, and checks
// what each prints.
func runs(t *testing.T, files map[string][]byte) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range programs {
		if err := os.WriteFile(filepath.Join(dir, name), files[name], 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	for _, tc := range []struct{ args, env, want string }{
		{args: "flanneld --version", want: releaseVersion + " commit 0123abc go"},
		{args: "flannelctl version", want: releaseVersion + " commit 0123abc go"},
		{args: "flannel", env: "CNI_COMMAND=VERSION", want: `"supportedVersions"`},
		{args: "install-conf", want: "usage"},
	} {
		name, args, _ := strings.Cut(tc.args, " ")
		cmd := exec.CommandContext(t.Context(), filepath.Join(dir, name), strings.Fields(args)...)
		cmd.Env, cmd.Dir, cmd.Stdin = []string{tc.env}, dir, strings.NewReader(`{"cniVersion":"1.0.0"}`)
		out, err := cmd.CombinedOutput()
		if !strings.Contains(string(out), tc.want) {
			t.Errorf("%s: %v, %s, want %q", tc.args, err, out, tc.want)
		}
	}
}
