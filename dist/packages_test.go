// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// pack builds the packages of the programs in dir, and returns their paths.
func pack(t *testing.T, dir, version string) (deb, rpm string) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "flanneld")
	cmd := exec.CommandContext(t.Context(), "packages/build.sh", dir, runtime.GOARCH, version, name)
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build.sh: %v: %s", err, out)
	}
	return name + ".deb", name + ".rpm"
}

// stubs returns a directory with tiny scripts in place of the programs and their bill of materials,
// because these are quick to pack.
func stubs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"flanneld", "flannelctl", "flannel", "sbom.cdx.json"} {
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

// TestPackagesAreReproducible checks that two builds of packages from the same programs are equal,
// although they are made on different file systems and with different numbers of threads.
//
//stages:rest it builds packages
func TestPackagesAreReproducible(t *testing.T) {
	var packages []string
	for tmp, threads := range map[string]string{t.TempDir(): "1", "/dev/shm": "4"} {
		t.Setenv("TMPDIR", tmp)
		t.Setenv("GOMAXPROCS", threads)
		deb, rpm := pack(t, stubs(t), "v1.2.3")
		packages = append(packages, string(read(t, deb))+string(read(t, rpm)))
	}
	if packages[0] != packages[1] {
		t.Error("two packages of the same programs differ")
	}
}

// TestPackageVersions checks that dpkg and rpm sort the versions of packages as the releases were
// made: a pre-release before its release, and a commit after the release that it follows.
//
//stages:rest it builds packages
func TestPackageVersions(t *testing.T) {
	programs, before, beforeRPM := stubs(t), "0~0", "0~0"
	for _, version := range []string{
		"0123abc", "v1.0.0-alpha.2", "v1.0.0-beta1", "v1.0.0-rc1", "v1.0.0-rc1-5-g0123abc", "v1.0.0-rc2", "v1.0.0", "v1.0.0-5-g0123abc", "v1.0.1",
	} {
		deb, rpm := pack(t, programs, version)
		has := command(t, "dpkg-deb", "--field", deb, "Version")
		if err := exec.CommandContext(t.Context(), "dpkg", "--compare-versions", before, "lt", has).Run(); err != nil {
			t.Errorf("%s becomes %s, which is not after %s: %v", version, has, before, err)
		}
		hasRPM := command(t, "rpm", "-qp", "--queryformat=%{VERSION}", rpm)
		if order := command(t, "rpm", "--eval", fmt.Sprintf("%%{lua:print(rpm.vercmp(%q, %q))}", beforeRPM, hasRPM)); order != "-1" {
			t.Errorf("%s becomes %s, which is not after %s for rpm: %s", version, hasRPM, beforeRPM, order)
		}
		before, beforeRPM = has, hasRPM
	}
}

// TestManPages checks that the manual pages have the sections of others, and nothing of the form of
// the pages that they are made from.
//
//stages:rest it builds a package
func TestManPages(t *testing.T) {
	deb, _ := pack(t, stubs(t), "v1.2.3")
	root := t.TempDir()
	command(t, "dpkg-deb", "--extract", deb, root)
	for name, wants := range map[string][]string{
		"man1/flannelctl.1.gz": {`.TH "FLANNELCTL" "1" "2023-11-14" "flanneld v1.2.3"`, ".TP\n\\fBmigrate plan\\fR, \\fBstart\\fR, ", "Exit code 2\n\\fBstatus\\fR: no daemon answers, or wrong flags; ", ".TP\n\\fBstatus --wait\\fR\nwait until it is ready"},
		"man8/flanneld.8.gz":   {`.TH "FLANNELD" "8" "2023-11-14" "flanneld v1.2.3"`, ".SS Files\n", ".TP\n\\fB--iface=NAME|IP\\fR, \\fBFLANNELD_IFACE\\fR\nInterface "},
	} {
		text := string(gunzip(t, read(t, filepath.Join(root, "usr/share/man", name))))
		for _, want := range append(wants, ".SH NAME\n", ".SH SYNOPSIS\n", ".SH DESCRIPTION\n") {
			if !strings.Contains(text, want) {
				t.Errorf("%s does not contain %q", name, want)
			}
		}
		for _, unwanted := range []string{".md", "](", "```", "After this page", "\n.TS", "\\[la]"} {
			if strings.Contains(text, unwanted) {
				t.Errorf("%s contains %q", name, unwanted)
			}
		}
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
	first, _ := pack(t, programs, "v1.2.3")
	next, _ := pack(t, stubs(t), "0123abc")

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

// unitOfAdmin takes precedence over the unit of a package.
const unitOfAdmin = "/etc/systemd/system/flanneld.service"

// TestPackageNamesConflictingFiles checks what the scripts of the package print: the name of
// an administrator's file that conflicts with the step, and nothing if there is none.
//
//stages:rest only packages run these scripts
func TestPackageNamesConflictingFiles(t *testing.T) {
	for _, tc := range []struct{ script, file, wants string }{
		{"postinst configure", unitOfAdmin, unitOfAdmin},
		{"postinst configure 1.0", unitOfAdmin, unitOfAdmin},
		{"postinst configure", dockerDropIn, ""},
		{"prerm remove", dockerDropIn, dockerDropIn},
		{"prerm upgrade 1.0", dockerDropIn, ""},
		{"prerm remove", unitOfAdmin, ""},
		{"postinst 1", unitOfAdmin, unitOfAdmin}, // of rpm, like those below
		{"postinst 2", unitOfAdmin, unitOfAdmin},
		{"prerm 0", dockerDropIn, dockerDropIn},
		{"prerm 1", dockerDropIn, ""},
	} {
		t.Run(tc.script+" with "+filepath.Base(tc.file), func(t *testing.T) {
			root := t.TempDir()
			path := filepath.Join(root, tc.file)
			const text = "# of an administrator\n"
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
			script, args, _ := strings.Cut(tc.script, " ")
			cmd := exec.CommandContext(t.Context(), "packages/"+script, strings.Fields(args)...)
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
	for args, want := range map[string]string{
		"configure 1.0": "daemon-reload\n--no-block try-restart flanneld.service\n",
		"2":             "daemon-reload\n--no-block try-restart flanneld.service\n",
		"1":             "daemon-reload\n",
	} {
		dir := t.TempDir()
		stub := "#!/bin/sh\necho \"$@\" >> " + filepath.Join(dir, "calls") + "\n"
		if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte(stub), 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-ec",
			"mount -t tmpfs run /run && mkdir -p /run/systemd/system && packages/postinst "+args)
		cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if diff := cmp.Diff(want, string(read(t, filepath.Join(dir, "calls")))); diff != "" {
			t.Errorf("calls of systemctl after postinst %s (-want +got):\n%s", args, diff)
		}
	}
}

// TestRPM checks what an RPM package contains. Then it installs, upgrades and removes one in a root
// directory of its own, with its scripts.
//
//stages:rest it builds and installs a package
func TestRPM(t *testing.T) {
	_, first := pack(t, stubs(t), "0123abc")
	_, next := pack(t, stubs(t), "v1.2.3")
	const query = "%{NAME} %{VERSION}-%{RELEASE} %{LICENSE} %{BUILDHOST}\n[%{FILEMODES:perms} %{FILEUSERNAME}:%{FILEGROUPNAME} %{FILENAMES} %{FILEFLAGS:fflags}\n]" +
		"[requires %{REQUIRENAME}\n]%|POSTIN?{post}| %|PREUN?{preun}| %|POSTUN?{postun}|%|OBSOLETENAME?{ obsoletes}|"
	want := `flanneld 1.2.3-1 Apache-2.0 localhost
drwxr-xr-x root:root /etc/flannel
-rw------- root:root /etc/flannel/flanneld.env cn
-rw-r--r-- root:root /etc/iproute2/rt_protos.d/flannel.conf cn
-rwxr-xr-x root:root /usr/bin/flannelctl
-rwxr-xr-x root:root /usr/bin/flanneld
drwxr-xr-x root:root /usr/lib/flannel
-rwxr-xr-x root:root /usr/lib/flannel/mk-docker-opts.sh
-rw-r--r-- root:root /usr/lib/systemd/system/flanneld.service
-rwxr-xr-x root:root /usr/libexec/cni/flannel
-rw-r--r-- root:root /usr/share/bash-completion/completions/flannelctl
drwxr-xr-x root:root /usr/share/doc/flanneld
-rw-r--r-- root:root /usr/share/doc/flanneld/changelog.gz d
drwxr-xr-x root:root /usr/share/doc/flanneld/examples
-rw-r--r-- root:root /usr/share/doc/flanneld/examples/docker-flannel.conf d
-rw-r--r-- root:root /usr/share/doc/flanneld/examples/flanneld-udp.conf d
-rw-r--r-- root:root /usr/share/doc/flanneld/examples/flanneld-wireguard.conf d
-rw-r--r-- root:root /usr/share/doc/flanneld/sbom.cdx.json d
-rw-r--r-- root:root /usr/share/fish/vendor_completions.d/flannelctl.fish
drwxr-xr-x root:root /usr/share/licenses/flanneld
-rw-r--r-- root:root /usr/share/licenses/flanneld/LICENSE l
-rw-r--r-- root:root /usr/share/man/man1/flannelctl.1.gz d
-rw-r--r-- root:root /usr/share/man/man8/flanneld.8.gz d
-rw-r--r-- root:root /usr/share/zsh/site-functions/_flannelctl
requires /bin/sh
post preun postun`
	got := strings.ReplaceAll(command(t, "rpm", "-qp", "--queryformat="+query, next), " \n", "\n") // after a file without flags
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("contents of the package (-want +got):\n%s", diff)
	}

	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	command(t, "install", "-D", "/bin/busybox", at("bin/sh"))
	for _, name := range []string{unitOfAdmin, dockerDropIn} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(at(name)), 0o755), os.WriteFile(at(name), nil, 0o600)); err != nil { //nolint:gosec // a root file system
			t.Fatal(err)
		}
	}
	rpm := func(wants string, args ...string) {
		t.Helper()
		// Debian's rpm stores its database in the home directory of the user.
		out, err := exec.CommandContext(t.Context(), "rpm", append([]string{"--root=" + root, "--dbpath=/var/lib/rpm", "--nodeps"}, args...)...).CombinedOutput()
		messages := strings.Count(string(out), "\nflanneld: ") + strings.Count(string(out), "error")
		if err != nil || !strings.Contains(string(out), wants) || messages > 0 != (wants != "") {
			t.Errorf("rpm %s: %v: %s, want %q", args, err, out, wants)
		}
	}
	rpm(unitOfAdmin, "--install", first)
	const own = "FLANNELD_ETCD_ENDPOINTS=http://192.0.2.1:2379\n"
	if err := os.WriteFile(at("etc/flannel/flanneld.env"), []byte(own), 0o600); err != nil {
		t.Fatal(err)
	}
	rpm(unitOfAdmin, "--upgrade", next)
	if diff := cmp.Diff(own, string(read(t, at("etc/flannel/flanneld.env")))); diff != "" {
		t.Errorf("settings after an upgrade (-want +got):\n%s", diff)
	}
	rpm(dockerDropIn, "--erase", "flanneld")
	if diff := cmp.Diff(own, string(read(t, at("etc/flannel/flanneld.env.rpmsave")))); diff != "" {
		t.Errorf("settings after the removal (-want +got):\n%s", diff)
	}
	for _, left := range []string{"usr/bin/flanneld", "usr/lib/flannel", "usr/share/doc/flanneld", "usr/share/licenses/flanneld"} {
		if _, err := os.Stat(at(left)); !os.IsNotExist(err) {
			t.Errorf("%s after the removal: %v", left, err)
		}
	}
}
