// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/test/must"
	"github.com/flanneld/flanneld/test/vm/job"
)

// tools are programs of this machine that the tests or the tested code run. modprobe is
// also run by the kernel.
var tools = []string{
	"bash", "bridge", "cat", "env", "ethtool", "grep", "ip", "mkdir", "modprobe", "mount", "nft", "nsenter", "sed", "sh", "sleep", "sysctl",
	"tc", "umount", "unshare", "wg",
}

// multi contains the program of iptables for each suffix of the program's name. The
// program is called through links whose names select its function. It loads extensions
// from the folder xtables beside its library.
var multi = map[string]string{"": "xtables-nft-multi", "-nft": "xtables-nft-multi", "-legacy": "xtables-legacy-multi"}

const (
	xtablesLibrary = "libxtables.so"
	xtablesFolder  = "xtables"
)

// modules are the folders of the kernel's modules that are copied to the guest.
var modules = []string{"arch", "crypto", "drivers/net", "lib", "net"}

// source is the folder of this Go module in the guest, so that the relative paths in
// tests stay valid.
const source = "/src"

// addTests compiles the tests, copies them below root, the guest's file system, and
// returns the jobs that run them. It also copies the list of jobs, and the programs of
// bin.
func addTests(ctx context.Context, root string, o options) []job.Job {
	list := output(ctx, "", "go", append([]string{"list", "-f", "{{.ImportPath}}\t{{.Dir}}\t{{.Module.Dir}}"}, o.packages...)...)
	var jobs []job.Job
	for i, line := range strings.Split(strings.TrimSpace(list), "\n") {
		var pkg, dir, module string
		must.Get(fmt.Sscanf(line, "%s\t%s\t%s", &pkg, &dir, &module))
		rel := must.Get(filepath.Rel(module, dir))
		j := job.Job{
			Package: pkg, Dir: filepath.Join(source, rel), Binary: fmt.Sprintf("/tests/%d.test", i),
			Args: []string{"-test.v=test2json", "-test.run=" + o.run, "-test.parallel=" + strconv.Itoa(o.cpus), fmt.Sprintf("-test.short=%v", o.short)},
			End:  testsEnd(o.timeout),
		}
		addTest(ctx, root, dir, j)
		if i == 0 {
			addPrograms(root, module)
		}
		jobs = append(jobs, j)
	}

	text := must.Get(json.Marshal(jobs))
	must.Do(os.WriteFile(filepath.Join(root, job.File), text, 0o600))
	return jobs
}

// testsEnd returns the uptime of the guest at which all tests must have ended, if the
// guest may run for the time limit. The rest of that time is for the stack traces of
// tests that hang.
func testsEnd(limit time.Duration) time.Duration { return limit - limit/10 }

func addTest(ctx context.Context, root, dir string, j job.Job) {
	static(ctx, "test", "-c", "-o", filepath.Join(root, j.Binary), j.Package)
	must.Do(os.MkdirAll(filepath.Join(root, j.Dir), 0o755))
	data := filepath.Join(dir, "testdata")
	if exists(data) {
		must.Do(os.CopyFS(filepath.Join(root, j.Dir, "testdata"), os.DirFS(data)))
	}
}

func addPrograms(root, module string) {
	for _, name := range []string{"flanneld", "flannelctl", "flannel-lab"} {
		if from := filepath.Join(module, "bin", name); exists(from) { // tests that need the program report that it is missing
			add(root, from, filepath.Join(source, "bin", name))
		}
	}
	must.Do(os.CopyFS(filepath.Join(root, source, "Documentation"), os.DirFS(filepath.Join(module, "Documentation")))) // some pages show what a test prints
}

func static(ctx context.Context, args ...string) {
	cmd := command(ctx, "", "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		must.Fail("run %s: %w:\n%s", cmd, err, out)
	}
}

func addSystem(ctx context.Context, root string, k kernel) {
	for _, dir := range []string{"usr/sbin", "usr/lib", "usr/lib64", "dev", "proc", "sys", "run", "tmp", "etc", "root", "var/lib"} {
		must.Do(os.MkdirAll(filepath.Join(root, dir), 0o755))
	}

	// All programs are in one folder, which has the names that scripts expect, such as /bin and /usr/bin.
	for dir, to := range map[string]string{
		"bin": "usr/sbin", "sbin": "usr/sbin", "usr/bin": "sbin", "lib": "usr/lib", "lib64": "usr/lib64", "var/run": "../run",
	} {
		must.Do(os.Symlink(to, filepath.Join(root, dir)))
	}
	must.Do(os.WriteFile(filepath.Join(root, "etc/hosts"), []byte("127.0.0.1 localhost\n::1 localhost\n"), 0o600))
	static(ctx, "build", "-o", filepath.Join(root, "init"), "./test/vm/init")
	static(ctx, "build", "-o", filepath.Join(root, job.Test2JSON), "cmd/test2json")

	for _, t := range tools {
		addTool(ctx, root, t)
	}
	addIPTables(ctx, root)
	addModules(ctx, root, k)
}

// addIPTables copies both variants of iptables. The names without a suffix, such as
// iptables, are those of the nft variant.
func addIPTables(ctx context.Context, root string) {
	extensions := ""
	for variant, name := range multi {
		for _, lib := range addTool(ctx, root, name) {
			if strings.HasPrefix(filepath.Base(lib), xtablesLibrary) {
				extensions = filepath.Join(filepath.Dir(lib), xtablesFolder)
			}
		}

		for _, family := range []string{"iptables", "ip6tables"} {
			for _, verb := range []string{"", "-save", "-restore"} {
				must.Do(os.Symlink(name, filepath.Join(root, "usr/sbin", family+variant+verb)))
			}
		}
	}
	if extensions == "" {
		must.Fail("iptables has no %s", xtablesLibrary)
	}
	must.Do(os.CopyFS(filepath.Join(root, extensions), os.DirFS(extensions)))
}

var libraryPath = regexp.MustCompile(`/\S+`)

func addTool(ctx context.Context, root, name string) (libraries []string) {
	path := must.Get(exec.LookPath(name))
	add(root, path, "/usr/sbin/"+name)
	libraries = libraryPath.FindAllString(output(ctx, "", "ldd", path), -1)
	for _, lib := range libraries {
		add(root, lib, lib)
	}
	return libraries
}

// addModules copies kernel modules of k to the guest, whose files are below root. The variable modules
// lists the folders to copy. Then addModules runs depmod, which writes the dependencies between the
// copied modules, because modprobe in the guest needs them.
func addModules(ctx context.Context, root string, k kernel) {
	to := filepath.Join(root, "usr/lib/modules", k.version)
	for _, dir := range modules {
		if from := filepath.Join(k.modules, "kernel", dir); exists(from) {
			must.Do(os.CopyFS(filepath.Join(to, "kernel", dir), os.DirFS(from)))
		}
	}

	for _, file := range []string{"modules.builtin", "modules.order"} {
		add(root, filepath.Join(k.modules, file), filepath.Join("/usr/lib/modules", k.version, file))
	}
	output(ctx, "", "depmod", "-b", root, k.version)
}

func add(root, from, to string) {
	to = filepath.Join(root, to)
	if exists(to) {
		return
	}
	must.Do(os.MkdirAll(filepath.Dir(to), 0o755))
	must.Do(os.WriteFile(to, must.Get(os.ReadFile(from)), 0o755))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func pack(ctx context.Context, root, image string) {
	output(ctx, root, "sh", "-c", `find . -print0 | cpio --null -o -H newc --quiet >"$0"`, image)
}
