// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"archive/tar"
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"debug/elf"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
)

// commitTree returns a commit that contains the tree with all changes of tracked files, because a
// release is built only from a commit. It does not change a branch.
func commitTree(t *testing.T) (commit string) {
	t.Helper()
	commit = command(t, "git", "-C", "..", "-c", "user.name=test", "-c", "user.email=test@example.com", "stash", "create")
	if commit == "" { // no tracked file has changed
		commit = command(t, "git", "-C", "..", "rev-parse", "HEAD")
	}
	return commit
}

// cloneTree returns the folder of a new repository in which that commit is checked out.
func cloneTree(t *testing.T, commit string) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "tree")
	command(t, "git", "init", "--quiet", dir)
	command(t, "git", "-C", dir, "fetch", "--quiet", "--depth=1", "file://"+absolute(t, ".."), commit)
	command(t, "git", "-C", dir, "checkout", "--quiet", "FETCH_HEAD")
	return dir
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// command runs a command that must succeed, and returns its standard output without surrounding
// spaces.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v: %s%s", cmd, err, out, &stderr)
	}
	return strings.TrimSpace(string(out))
}

// newKey makes a pair of keys with make release-key in a new clone. It returns the files of both
// keys, and the public key itself.
func newKey(t *testing.T) (private, publicFile string, public ed25519.PublicKey) {
	t.Helper()
	dir := cloneTree(t, commitTree(t))
	command(t, "make", "-s", "-C", dir, "release-key")
	private, publicFile = filepath.Join(dir, "release.key"), filepath.Join(dir, "dist/release.pub")
	if info, err := os.Stat(private); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the private key has the mode %v (%v), want 0600", info.Mode(), err)
	}
	text, err := os.ReadFile(publicFile)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	key, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return private, publicFile, key.(ed25519.PublicKey)
}

// makeRelease runs make release in the clone tree, with variables like RELEASE_KEY=file. It returns
// the folder of the release and the output of make.
func makeRelease(t *testing.T, tree string, variables ...string) (dir, output string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "make", append([]string{"-s", "-C", tree, "release",
		"VERSION=" + releaseVersion, "COMMIT=0123abc", fmt.Sprint("SOURCE_DATE_EPOCH=", releaseTime)}, variables...)...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "MAKE") && !strings.HasPrefix(v, "MFLAGS") { // omit the variables of the make that runs this test
			cmd.Env = append(cmd.Env, v)
		}
	}
	out, err := cmd.CombinedOutput()
	return filepath.Join(tree, "dist/out"), string(out), err
}

// TestReleaseRefuses checks that a release which users cannot verify or reproduce is not built.
//
//stages:rest it checks packages
func TestReleaseRefuses(t *testing.T) {
	key, public, _ := newKey(t)
	_, other, _ := newKey(t)
	for name, tc := range map[string]struct {
		key, public string
		change      string // name of a file that is added to the tree, or empty
		want        string
	}{
		"no key":            {public: public, want: "release: RELEASE_KEY is missing: "},
		"no such key":       {key: key + ".none", public: public, want: "release: cannot read the private key "},
		"another key":       {key: key, public: other, want: "release: " + other + " is not the public key of " + key},
		"uncommitted files": {key: key, public: public, change: "new.txt", want: "release: the tree has uncommitted changes: "},
		// The first line, about the missing public key, is a warning. The second one is the reason
		// of the refusal.
		"no public key": {key: key, public: public + ".none", change: "new.txt", want: "release: " + public + ".none does not exist, so nothing checks that users have the public key of " + key +
			"\nrelease: the tree has uncommitted changes: "},
	} {
		t.Run(name, func(t *testing.T) {
			tree := cloneTree(t, commitTree(t))
			if tc.change != "" {
				if err := os.WriteFile(filepath.Join(tree, tc.change), []byte("new"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, out, err := makeRelease(t, tree, "RELEASE_KEY="+tc.key, "RELEASE_PUB="+tc.public)
			rest, found := strings.CutPrefix(out, tc.want)
			if err == nil || !found || strings.Count(rest, "\n") > 2 { // beside the wanted text there may be the last line, which make prints
				t.Errorf("make release: %v: %s; want the line %s", err, out, tc.want)
			}
		})
	}
}

// TestRelease makes one release twice, in different folders, and checks that both are equal, and
// what they contain. The packages come from Debian 12, which does not change any more: so its
// mirrors are always complete. Debian 12 does not have riscv64. With -short the release has two
// architectures.
//
//stages:rest it builds six architectures
func TestRelease(t *testing.T) {
	private, public, key := newKey(t)
	commit := commitTree(t)
	trees := []string{cloneTree(t, commit), cloneTree(t, commit)}
	for _, arch := range architectures() {
		compile(t, trees[0], arch)
	}

	dirs := make([]string, len(trees))
	var both errgroup.Group // build both at the same time, because much of a build uses only one CPU
	for i := range dirs {
		both.Go(func() error {
			dir, out, err := makeRelease(t, trees[i], "RELEASE_KEY="+private, "RELEASE_PUB="+public, "DEBIAN_SUITE=bookworm",
				"ARCHES="+strings.Join(architectures(), " "))
			if err != nil {
				return fmt.Errorf("make release: %w: %s", err, out)
			}
			if want := fmt.Sprintf("signature and %d subjects are correct", len(artifacts())+1); !strings.Contains(out, want) { // one more than the artifacts: the image in the archive
				return fmt.Errorf("make release printed %s, want %s", out, want)
			}
			dirs[i] = dir
			return nil
		})
	}
	if err := both.Wait(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sums(t, dirs[0]), sums(t, dirs[1])); diff != "" {
		t.Errorf("two builds of one commit differ (-first +second):\n%s", diff)
	}
	dir := dirs[0]
	t.Run("tarballs", func(t *testing.T) { releaseTarballs(t, filepath.Join(dir, "../.."), dir) })
	t.Run("files", func(t *testing.T) { releaseFiles(t, dir) })
	t.Run("statement", func(t *testing.T) { releaseStatement(t, dir, key) })
	t.Run("image", func(t *testing.T) { releaseImage(t, dir) })
	t.Run("verification", func(t *testing.T) { releaseVerification(t, dir, public) })
}

// compile compiles the packages of the programs for an architecture, which fills Go's cache. Otherwise two
// builds at the same time would both compile them. Nothing is linked.
func compile(t *testing.T, tree, arch string) {
	t.Helper()
	command(t, "env", "GOOS=linux", "GOARCH="+arch, "GOARM=7", "CGO_ENABLED=0", "go", "-C", tree, "list", "-export", "-deps", "-f", "",
		"./cmd/flanneld", "./cmd/flannelctl", "./cmd/flannel-cni", "./cmd/install-conf")
}

// sums returns the SHA-256 sums of the files in a folder, in hexadecimal, by name.
func sums(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]string{}
	for _, e := range entries {
		raw, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		sums[e.Name()] = fmt.Sprintf("%x", sha256.Sum256(raw))
	}
	return sums
}

// artifacts returns the sorted names of the files that the statement of provenance describes.
func artifacts() []string {
	names := []string{"flannel-0.1.0.tgz", "flanneld-" + releaseVersion + "-linux.oci.tar"}
	for _, arch := range architectures() {
		for _, pattern := range []string{"flannel-%s-linux-%s.tar.gz", "flannel-%s-linux-%s.deb", "flannel-%s-linux-%s.rpm", "flannel-%s-linux-%s.cdx.json"} {
			names = append(names, fmt.Sprintf(pattern, releaseVersion, arch))
		}
		names = append(names, fmt.Sprintf("flanneld-%s-linux-%s.cdx.json", releaseVersion, arch))
	}
	slices.Sort(names)
	return names
}

const statementName = "flanneld-" + releaseVersion + ".intoto.json"

// releaseFiles checks that the release has the expected files, and that SHA256SUMS has their sums.
func releaseFiles(t *testing.T, dir string) {
	have := sums(t, dir)
	want := append(artifacts(), statementName)
	slices.Sort(want)
	var lines []string
	for _, name := range want {
		lines = append(lines, have[name]+"  "+name)
	}
	text, err := os.ReadFile(filepath.Join(dir, "SHA256SUMS"))
	if diff := cmp.Diff(strings.Join(lines, "\n")+"\n", string(text)); err != nil || diff != "" {
		t.Errorf("%v, SHA256SUMS (-want +got):\n%s", err, diff)
	}
	delete(have, "SHA256SUMS")
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(have))); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// resource is a subject or a dependency in the statement of provenance.
type resource struct {
	Name, URI string
	Digest    map[string]string
}

// releaseStatement checks the signature and the contents of the statement of provenance. It uses no
// code of the program that wrote the statement.
func releaseStatement(t *testing.T, dir string, key ed25519.PublicKey) {
	var envelope struct {
		PayloadType string
		Payload     []byte
		Signatures  []struct{ Sig []byte }
	}
	decode(t, filepath.Join(dir, statementName), &envelope)
	signed := fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(envelope.PayloadType), envelope.PayloadType, len(envelope.Payload), envelope.Payload)
	if len(envelope.Signatures) != 1 || !ed25519.Verify(key, signed, envelope.Signatures[0].Sig) {
		t.Error("the signature does not match the public key")
	}
	var statement struct {
		Type          string `json:"_type"`
		PredicateType string
		Subject       []resource
		Predicate     struct {
			BuildDefinition struct {
				BuildType            string
				ExternalParameters   map[string]string
				ResolvedDependencies []resource
			}
			RunDetails struct {
				Builder struct {
					ID      string
					Version map[string]string
				}
			}
		}
	}
	if err := json.Unmarshal(envelope.Payload, &statement); err != nil {
		t.Fatal(err)
	}
	if statement.Type != "https://in-toto.io/Statement/v1" || statement.PredicateType != "https://slsa.dev/provenance/v1" {
		t.Errorf("the statement is of the type %s with the predicate %s", statement.Type, statement.PredicateType)
	}
	want := map[string]string{}
	have := sums(t, dir)
	for _, name := range artifacts() {
		want[name] = have[name]
	}
	var index ociIndex
	files := untar(t, bytes.NewReader(read(t, filepath.Join(dir, "flanneld-"+releaseVersion+"-linux.oci.tar"))))
	unmarshal(t, files["index.json"], &index)
	want["docker.io/library/flanneld:"+releaseVersion] = strings.TrimPrefix(index.Manifests[0].Digest, "sha256:")
	got := map[string]string{}
	for _, s := range statement.Subject {
		got[s.Name] = s.Digest["sha256"]
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("subjects (-want +got):\n%s", diff)
	}

	module := command(t, "go", "list", "-m")
	build, builder := statement.Predicate.BuildDefinition, statement.Predicate.RunDetails.Builder
	parameters := map[string]string{"repository": "git+https://" + module, "version": releaseVersion, "command": "make release DEBIAN_SUITE=bookworm"}
	if diff := cmp.Diff(parameters, build.ExternalParameters); diff != "" {
		t.Errorf("parameters of the build (-want +got):\n%s", diff)
	}
	page := "https://" + module + "/Documentation/releasing.md"
	if build.BuildType != page || builder.ID != page || !strings.HasPrefix(builder.Version["go"], "go1.") {
		t.Errorf("build type %s, builder %+v", build.BuildType, builder)
	}
	commit := command(t, "git", "-C", filepath.Join(dir, "../.."), "rev-parse", "HEAD")
	if source := build.ResolvedDependencies[0]; source.URI != "git+https://"+module || source.Digest["gitCommit"] != commit {
		t.Errorf("source is %+v, want commit %s of %s", source, commit, module)
	}
	packages := regexp.MustCompile(`^pkg:deb/debian/(iptables|libc6)@[^?]+\?arch=(amd64|arm64|armhf|ppc64el|s390x)$`)
	found := 0
	for _, d := range build.ResolvedDependencies {
		if packages.MatchString(d.URI) && len(d.Digest["sha256"]) == 64 {
			found++
		}
	}
	inDebian12 := slices.DeleteFunc(architectures(), func(arch string) bool { return arch == "riscv64" })
	if found != 2*len(inDebian12) {
		t.Errorf("the statement has %d packages iptables and libc6, want two for each of %v", found, inDebian12)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// gunzip decompresses data with the program gzip, because Go's own package takes nine times as long
// with the race detector as without.
func gunzip(t *testing.T, compressed []byte) []byte {
	t.Helper()
	out, err := os.CreateTemp(t.TempDir(), "gunzip")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.CommandContext(t.Context(), "gzip", "--decompress", "--stdout")
	cmd.Stdin, cmd.Stdout = bytes.NewReader(compressed), out
	if err := cmd.Run(); err != nil {
		t.Fatalf("gzip: %v", err)
	}
	return read(t, out.Name())
}

// content returns the content of the file with the header h. It allocates the whole buffer at once:
// with the race detector, a growing buffer would take most of the time of a test.
func content(t *testing.T, r *tar.Reader, h *tar.Header) []byte {
	t.Helper()
	raw := make([]byte, h.Size)
	if _, err := io.ReadFull(r, raw); err != nil {
		t.Fatalf("%s: %v", h.Name, err)
	}
	return raw
}

func decode(t *testing.T, path string, into any) {
	t.Helper()
	unmarshal(t, read(t, path), into)
}

func unmarshal(t *testing.T, raw []byte, into any) {
	t.Helper()
	if err := json.Unmarshal(raw, into); err != nil {
		t.Fatalf("%v: %s", err, raw)
	}
}

// ociIndex is an index or manifest of OCI images.
type ociIndex struct {
	MediaType string
	Manifests []struct {
		Digest      string
		Annotations map[string]string
		Platform    ociPlatform
	}
	Config struct{ Digest string }
	Layers []struct{ Digest string }
}

type ociPlatform struct{ OS, Architecture, Variant string }

// untar returns the files of a tar archive by name. The content of a symbolic link is its
// target. All files must belong to root, and only their owner may have the right to write.
func untar(t *testing.T, from io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.FileInfo().Mode().Perm()&0o022 != 0 && h.Typeflag != tar.TypeSymlink {
			t.Errorf("%s belongs to %d:%d and has the mode %v, want root and no right to write for others", h.Name, h.Uid, h.Gid, h.FileInfo().Mode())
		}
		if h.Typeflag == tar.TypeSymlink {
			files[h.Name] = []byte(h.Linkname)
		} else {
			files[h.Name] = content(t, r, h)
		}
	}
}

// releaseImage checks the archive of images: digests, platforms and configuration, and the programs
// and libraries in the image of each platform.
func releaseImage(t *testing.T, dir string) {
	files := untar(t, bytes.NewReader(read(t, filepath.Join(dir, "flanneld-"+releaseVersion+"-linux.oci.tar"))))
	blob := func(digest string) []byte {
		raw := files["blobs/"+strings.ReplaceAll(digest, ":", "/")]
		if sum := fmt.Sprintf("sha256:%x", sha256.Sum256(raw)); sum != digest {
			t.Errorf("the blob %s has the digest %s", digest, sum)
		}
		return raw
	}
	var archive, index ociIndex
	unmarshal(t, files["index.json"], &archive)
	if name := archive.Manifests[0].Annotations["org.opencontainers.image.ref.name"]; len(archive.Manifests) != 1 || name != "docker.io/library/flanneld:"+releaseVersion {
		t.Errorf("the archive has %d entries and the name %s", len(archive.Manifests), name)
	}
	unmarshal(t, blob(archive.Manifests[0].Digest), &index)
	var platforms []string
	for _, m := range index.Manifests {
		platforms = append(platforms, path.Join(m.Platform.OS, m.Platform.Architecture, m.Platform.Variant))
		var manifest ociIndex
		unmarshal(t, blob(m.Digest), &manifest)
		var config struct {
			ociPlatform
			Config struct{ Entrypoint []string }
			RootFS struct {
				DiffIDs []string `json:"diff_ids"`
			}
		}
		unmarshal(t, blob(manifest.Config.Digest), &config)
		if config.ociPlatform != m.Platform || !slices.Equal(config.Config.Entrypoint, []string{"/opt/bin/flanneld"}) {
			t.Errorf("%+v: the configuration is of %+v with the entry point %q", m.Platform, config.ociPlatform, config.Config.Entrypoint)
		}
		if len(manifest.Layers) != 1 {
			t.Fatalf("%+v: %d layers, want 1", m.Platform, len(manifest.Layers))
		}
		layer := gunzip(t, blob(manifest.Layers[0].Digest))
		if diffID := fmt.Sprintf("sha256:%x", sha256.Sum256(layer)); !slices.Equal(config.RootFS.DiffIDs, []string{diffID}) {
			t.Errorf("%+v: the layer is %s, want %s", m.Platform, diffID, config.RootFS.DiffIDs)
		}
		t.Run(m.Platform.Architecture, func(t *testing.T) {
			root := untar(t, bytes.NewReader(layer))
			sameAsTarball(t, dir, m.Platform.Architecture, root)
			complete(t, root, machines[m.Platform.Architecture], m.Platform.Architecture != "riscv64")
		})
	}
	var want []string
	for _, arch := range architectures() {
		if arch == "arm" {
			arch = "arm/v7"
		}
		want = append(want, "linux/"+arch)
	}
	if diff := cmp.Diff(want, platforms); diff != "" {
		t.Errorf("platforms (-want +got):\n%s", diff)
	}
}

// sameAsTarball checks that an image contains the same programs as the tarball of its architecture.
// root contains the files of the image.
func sameAsTarball(t *testing.T, dir, arch string, root map[string][]byte) {
	t.Helper()
	archive := read(t, filepath.Join(dir, fmt.Sprintf("flannel-%s-linux-%s.tar.gz", releaseVersion, arch)))
	files := untar(t, bytes.NewReader(gunzip(t, archive)))
	for _, name := range programs {
		if len(files[name]) == 0 || !bytes.Equal(files[name], root["opt/bin/"+name]) {
			t.Errorf("opt/bin/%s is not the program of the tarball", name)
		}
	}
}

// complete checks that all programs and libraries of an image are for that machine, and that the
// image contains all libraries and loaders that they name. debian tells whether the image must
// contain Debian's programs, because the release of Debian has the architecture.
func complete(t *testing.T, root map[string][]byte, machine elf.Machine, debian bool) {
	t.Helper()
	have := map[string]bool{}
	for name := range root {
		have[path.Base(name)] = true
	}
	for _, name := range []string{"usr/sbin/iptables-nft", "usr/sbin/ip6tables-legacy-restore", "bin/sh", "bin/busybox", "etc/ssl/certs/ca-certificates.crt"} {
		if (root[name] != nil) != debian {
			t.Errorf("the image contains %s: %v, want %v", name, root[name] != nil, debian)
		}
	}
	for name, raw := range root {
		f, err := elf.NewFile(bytes.NewReader(raw))
		if err != nil {
			continue // not a program or library
		}
		if f.Machine != machine {
			t.Errorf("%s is for %v, want %v", name, f.Machine, machine)
		}
		libraries, err := f.ImportedLibraries()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, library := range libraries {
			if !have[library] {
				t.Errorf("the image does not contain %s, which %s loads", library, name)
			}
		}
		for _, p := range f.Progs {
			if p.Type != elf.PT_INTERP {
				continue
			}
			loader, err := io.ReadAll(p.Open())
			if loader := strings.Trim(string(loader), "/\x00"); err != nil || root[loader] == nil {
				t.Errorf("the image does not contain %s, which loads %s: %v", loader, name, err)
			}
		}
	}
}

// releaseVerification runs the commands of the page on security. They must accept the release. They
// must refuse it with another public key, and with one changed byte in the statement or in a file
// of each kind.
func releaseVerification(t *testing.T, dir, public string) {
	page := string(read(t, "../Documentation/security.md"))
	_, section, _ := strings.Cut(page, "\n## Verify a download\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var script strings.Builder
	for line := range strings.Lines(section) {
		if command, found := strings.CutPrefix(line, "    "); found {
			script.WriteString(strings.ReplaceAll(command, "VERSION", releaseVersion))
		}
	}
	_, other, _ := newKey(t)
	verify := func(change string) error {
		t.Helper()
		folder := t.TempDir()
		command(t, "cp", "-rs", dir+"/.", folder) // the files are symbolic links
		if err := os.Symlink(public, filepath.Join(folder, "release.pub")); err != nil {
			t.Fatal(err)
		}
		if change != "" {
			file := filepath.Join(folder, change)
			raw := read(t, file)
			if change == "release.pub" {
				raw = read(t, other)
			} else {
				raw[len(raw)/2] ^= 1
			}
			if err := errors.Join(os.Remove(file), os.WriteFile(file, raw, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", script.String())
		cmd.Dir = folder
		out, err := cmd.CombinedOutput()
		if change == "" && err != nil {
			t.Errorf("%v: %s: %s", err, &script, out)
		}
		return err
	}
	if err := verify(""); err != nil {
		t.Fatal(err)
	}
	for _, change := range []string{
		"release.pub", statementName, "flannel-0.1.0.tgz", "flanneld-" + releaseVersion + "-linux.oci.tar", "flanneld-" + releaseVersion + "-linux-arm.cdx.json",
		"flannel-" + releaseVersion + "-linux-amd64.tar.gz", "flannel-" + releaseVersion + "-linux-arm.deb", "flannel-" + releaseVersion + "-linux-amd64.rpm",
	} {
		if verify(change) == nil {
			t.Errorf("the release is accepted with %s changed", change)
		}
	}
}
