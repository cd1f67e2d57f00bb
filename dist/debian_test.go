// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// pack builds the Debian package of the programs in dir, and returns its path.
func pack(t *testing.T, dir, version string) string {
	t.Helper()
	pkg := filepath.Join(t.TempDir(), "flanneld.deb")
	cmd := exec.CommandContext(t.Context(), "debian/build.sh", dir, runtime.GOARCH, version, pkg)
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000", "DEB_LEVEL=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build.sh: %v: %s", err, out)
	}
	return pkg
}

// stubs returns a directory with tiny scripts in place of the programs, because these are
// quick to pack.
func stubs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"flanneld", "flannelctl", "flannel"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"), 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	return dir
}

// pluginsOfOld builds a package of CNI plugins as in Debian 11 and Ubuntu 22.04, which
// contains a plugin called flannel, and returns its path.
func pluginsOfOld(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"DEBIAN/control":      "Package: containernetworking-plugins\nVersion: 0.9.1+ds1-1\nArchitecture: all\nMaintainer: nobody\nDescription: plugins\n",
		"usr/lib/cni/flannel": "", "usr/lib/cni/bridge": "",
	} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil { //nolint:gosec // a root file system
			t.Fatal(err)
		}
	}
	pkg := filepath.Join(t.TempDir(), "plugins.deb")
	if out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--build", dir, pkg).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	return pkg
}

// TestDebianPackageIsReproducible checks that two packages of the same programs are equal,
// although they are built on different file systems. The size of a directory depends on the
// file system.
//
//stages:rest it builds packages
func TestDebianPackageIsReproducible(t *testing.T) {
	var packages []string
	for _, tmp := range []string{t.TempDir(), "/dev/shm"} {
		t.Setenv("TMPDIR", tmp)
		raw, err := os.ReadFile(pack(t, stubs(t), "v1.2.3"))
		if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, string(raw))
	}
	if packages[0] != packages[1] {
		t.Error("two packages of the same programs differ")
	}
}

// TestDebianVersions checks that dpkg sorts the versions of packages as the releases were
// made: a pre-release before its release, and a commit after the release that it follows.
//
//stages:rest it builds packages
func TestDebianVersions(t *testing.T) {
	programs, before := stubs(t), ""
	for _, version := range []string{
		"0123abc", "v1.0.0-alpha.2", "v1.0.0-beta1", "v1.0.0-rc1", "v1.0.0-rc1-5-g0123abc", "v1.0.0-rc2", "v1.0.0", "v1.0.0-5-g0123abc", "v1.0.1",
	} {
		out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--field", pack(t, programs, version), "Version").Output()
		if err != nil {
			t.Fatal(err)
		}
		has := strings.TrimSpace(string(out))
		if err := exec.CommandContext(t.Context(), "dpkg", "--compare-versions", before, "lt", has).Run(); err != nil {
			t.Errorf("%s becomes %s, which is not after %s: %v", version, has, before, err)
		}
		before = has
	}
}

// TestDebianPackage installs, upgrades, removes and purges a package in a root directory
// of its own, and checks the files after each step.
//
//stages:rest it builds and installs a package
func TestDebianPackage(t *testing.T) {
	programs := stubs(t)
	if err := os.Remove(filepath.Join(programs, "flanneld")); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-s -w", "-o", programs+"/", "../cmd/flanneld")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	first, next := pack(t, programs, "v1.2.3"), pack(t, stubs(t), "0123abc")

	root := t.TempDir()
	for _, dir := range []string{"var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/flannel"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil { //nolint:gosec // a root file system
			t.Fatal(err)
		}
	}
	dpkg := func(args ...string) string {
		t.Helper()
		args = append([]string{"--root=" + root, "--force-script-chrootless", "--log=/dev/null"}, args...)
		cmd := exec.CommandContext(t.Context(), "dpkg", args...)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH") + ":/usr/sbin:/sbin", "DEBIAN_FRONTEND=noninteractive"}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("dpkg %s: %v: %s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	at := func(name string) string { return filepath.Join(root, name) }

	dpkg("--install", pluginsOfOld(t))
	dpkg("--install", next) // the version of a commit without a tag is lower than that of all releases, so the next step is an upgrade
	dpkg("--install", first)
	if out := dpkg("--status", "flanneld"); !strings.Contains(out, "Status: install ok installed") || !strings.Contains(out, "Version: 1.2.3\n") {
		t.Errorf("after the installation:\n%s", out)
	}
	if out, err := exec.CommandContext(t.Context(), at("usr/bin/flanneld"), "--version").CombinedOutput(); err != nil {
		t.Errorf("flanneld --version: %v: %s", err, out)
	}
	if out := dpkg("--search", "/usr/lib/cni/flannel"); !strings.HasPrefix(out, "flanneld:") {
		t.Errorf("owner of the CNI plugin: %s", out)
	}
	unit, err := os.ReadFile(at("usr/lib/systemd/system/flanneld.service"))
	if err != nil {
		t.Fatal(err)
	}
	start := regexp.MustCompile(`(?m)^ExecStart=(\S+)$`).FindSubmatch(unit)
	if start == nil {
		t.Fatalf("no ExecStart in the unit:\n%s", unit)
	}
	if _, err := os.Stat(at(string(start[1]))); err != nil {
		t.Errorf("the program of the unit is not in the package: %v", err)
	}
	for _, name := range dropIns(t) {
		if _, err := os.Stat(at("usr/share/doc/flanneld/examples/" + filepath.Base(name))); err != nil {
			t.Errorf("a drop-in is not in the package: %v", err)
		}
	}
	settings := at("etc/flannel/flanneld.env")
	if info, err := os.Stat(settings); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("settings, which may hold a password: mode %v, %v, want 0600", info.Mode(), err)
	}

	const own = "FLANNELD_ETCD_ENDPOINTS=http://192.0.2.1:2379\n"
	if err := os.WriteFile(settings, []byte(own), 0o600); err != nil {
		t.Fatal(err)
	}
	dpkg("--install", first)
	dpkg("--remove", "flanneld")
	kept, _ := os.ReadFile(settings)
	if diff := cmp.Diff(own, string(kept)); diff != "" {
		t.Errorf("settings after upgrade and removal (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(at("usr/bin/flanneld")); !os.IsNotExist(err) {
		t.Errorf("flanneld after the removal: %v", err)
	}
	dpkg("--purge", "flanneld")
	for _, left := range []string{"etc/flannel", "var/lib/flannel", "usr/lib/flannel"} {
		if _, err := os.Stat(at(left)); !os.IsNotExist(err) {
			t.Errorf("%s after the purge: %v", left, err)
		}
	}
}

// TestPackageNamesConflictingFiles checks what the scripts of the package print: the name of
// an administrator's file that conflicts with the step, and nothing if there is none.
//
//stages:rest only packages run these scripts
func TestPackageNamesConflictingFiles(t *testing.T) {
	const unit = "/etc/systemd/system/flanneld.service"
	for _, tc := range []struct{ script, file, wants string }{
		{"postinst configure", unit, unit},
		{"postinst configure 1.0", unit, unit},
		{"postinst configure", dockerDropIn, ""},
		{"prerm remove", dockerDropIn, dockerDropIn},
		{"prerm upgrade 1.0", dockerDropIn, ""},
		{"prerm remove", unit, ""},
	} {
		t.Run(tc.script+" with "+filepath.Base(tc.file), func(t *testing.T) {
			root := t.TempDir()
			path := filepath.Join(root, tc.file)
			const text = "# of an administrator\n"
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
			script, args, _ := strings.Cut(tc.script, " ")
			cmd := exec.CommandContext(t.Context(), "debian/"+script, strings.Fields(args)...)
			cmd.Env = append(os.Environ(), "DPKG_ROOT="+root)
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), tc.wants) || (len(out) > 0) != (tc.wants != "") {
				t.Errorf("%v: %q, want a line about %q", err, out, tc.wants)
			}
			if left, err := os.ReadFile(path); err != nil || string(left) != text {
				t.Errorf("the file contains %q (%v) afterwards, want %q", left, err, text)
			}
		})
	}
}

// TestUpgradeDoesNotWait checks that the script of an upgrade requests a restart without
// waiting until the daemon is ready. The store may be unavailable, and meanwhile the package
// manager's lock would block all other installations on the host.
//
//stages:rest only packages run this script
func TestUpgradeDoesNotWait(t *testing.T) {
	dir := t.TempDir()
	stub := "#!/bin/sh\necho \"$@\" >> " + filepath.Join(dir, "calls") + "\n"
	if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte(stub), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-ec",
		"mount -t tmpfs run /run && mkdir -p /run/systemd/system && debian/postinst configure 1.0")
	cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("daemon-reload\n--no-block try-restart flanneld.service\n", string(calls)); diff != "" {
		t.Errorf("calls of systemctl (-want +got):\n%s", diff)
	}
}
