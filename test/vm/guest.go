// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

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
func addTests(ctx context.Context, root string, o options) ([]job.Job, error) {
	list, err := output(ctx, "", "go", append([]string{"list", "-f", "{{.ImportPath}}\t{{.Dir}}\t{{.Module.Dir}}"}, o.packages...)...)
	if err != nil {
		return nil, err
	}
	var jobs []job.Job
	for i, line := range strings.Split(strings.TrimSpace(list), "\n") {
		var pkg, dir, module string
		if _, err := fmt.Sscanf(line, "%s\t%s\t%s", &pkg, &dir, &module); err != nil {
			return nil, fmt.Errorf("read go list: %q: %w", line, err)
		}
		rel, err := filepath.Rel(module, dir)
		if err != nil {
			return nil, err
		}
		j := job.Job{
			Package: pkg, Dir: filepath.Join(source, rel), Binary: fmt.Sprintf("/tests/%d.test", i),
			Args: []string{"-test.v=test2json", "-test.run=" + o.run, "-test.parallel=" + strconv.Itoa(o.cpus)},
			End:  testsEnd(o.timeout),
		}
		if err := addTest(ctx, root, dir, j); err != nil {
			return nil, err
		}
		if i == 0 {
			if err := addPrograms(root, module); err != nil {
				return nil, err
			}
		}
		jobs = append(jobs, j)
	}

	text, err := json.Marshal(jobs)
	if err != nil {
		return nil, err
	}
	return jobs, os.WriteFile(filepath.Join(root, job.File), text, 0o600)
}

// testsEnd returns the uptime of the guest at which all tests must have ended, if the
// guest may run for the time limit. The rest of that time is for the stack traces of
// tests that hang.
func testsEnd(limit time.Duration) time.Duration { return limit - limit/10 }

func addTest(ctx context.Context, root, dir string, j job.Job) error {
	if err := static(ctx, "test", "-c", "-o", filepath.Join(root, j.Binary), j.Package); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(root, j.Dir), 0o755); err != nil {
		return err
	}
	data := filepath.Join(dir, "testdata")
	if _, err := os.Stat(data); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return os.CopyFS(filepath.Join(root, j.Dir, "testdata"), os.DirFS(data))
}

// addPrograms copies the programs that tests run from bin to the same relative path in the
// guest, if make build has built them.
func addPrograms(root, module string) error {
	for _, name := range []string{"flanneld", "flannelctl", "flannel-lab"} {
		from := filepath.Join(module, "bin", name)
		if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
			continue // tests that need the program report that it is missing
		}
		if err := add(root, from, filepath.Join(source, "bin", name)); err != nil {
			return err
		}
	}
	return nil
}

// static runs the go command with args, so that the programs that it builds are static.
func static(ctx context.Context, args ...string) error {
	cmd := command(ctx, "", "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("run %s: %w:\n%s", cmd, err, out)
	}
	return nil
}

// addSystem copies everything that the guest needs, except the tests, below root: init,
// tools, iptables and kernel modules.
func addSystem(ctx context.Context, root string, k kernel) error {
	for _, dir := range []string{"usr/sbin", "usr/lib", "usr/lib64", "dev", "proc", "sys", "run", "tmp", "etc", "root", "var/lib"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}

	// All programs are in one folder, which has the names that scripts expect, such as /bin and /usr/bin.
	for dir, to := range map[string]string{
		"bin": "usr/sbin", "sbin": "usr/sbin", "usr/bin": "sbin", "lib": "usr/lib", "lib64": "usr/lib64", "var/run": "../run",
	} {
		if err := os.Symlink(to, filepath.Join(root, dir)); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(root, "etc/hosts"), []byte("127.0.0.1 localhost\n::1 localhost\n"), 0o600); err != nil {
		return err
	}
	if err := static(ctx, "build", "-o", filepath.Join(root, "init"), "./test/vm/init"); err != nil {
		return err
	}
	if err := static(ctx, "build", "-o", filepath.Join(root, job.Test2JSON), "cmd/test2json"); err != nil {
		return err
	}

	for _, t := range tools {
		if _, err := addTool(ctx, root, t); err != nil {
			return err
		}
	}
	if err := addIPTables(ctx, root); err != nil {
		return err
	}
	return addModules(ctx, root, k)
}

// addIPTables copies both variants of iptables. The names without a suffix, such as
// iptables, are those of the nft variant.
func addIPTables(ctx context.Context, root string) error {
	extensions := ""
	for variant, name := range multi {
		libraries, err := addTool(ctx, root, name)
		if err != nil {
			return err
		}

		for _, lib := range libraries {
			if strings.HasPrefix(filepath.Base(lib), xtablesLibrary) {
				extensions = filepath.Join(filepath.Dir(lib), xtablesFolder)
			}
		}

		for _, family := range []string{"iptables", "ip6tables"} {
			for _, verb := range []string{"", "-save", "-restore"} {
				if err := os.Symlink(name, filepath.Join(root, "usr/sbin", family+variant+verb)); err != nil {
					return err
				}
			}
		}
	}
	if extensions == "" {
		return fmt.Errorf("iptables has no %s", xtablesLibrary)
	}
	return os.CopyFS(filepath.Join(root, extensions), os.DirFS(extensions))
}

var libraryPath = regexp.MustCompile(`/\S+`)

// addTool copies a program of this machine and its libraries, and returns the paths of
// the libraries.
func addTool(ctx context.Context, root, name string) (libraries []string, err error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, err
	}
	if err := add(root, path, "/usr/sbin/"+name); err != nil {
		return nil, err
	}
	out, err := output(ctx, "", "ldd", path)
	if err != nil {
		return nil, err
	}
	libraries = libraryPath.FindAllString(out, -1)
	for _, lib := range libraries {
		if err := add(root, lib, lib); err != nil {
			return nil, err
		}
	}
	return libraries, nil
}

// addModules copies kernel modules of k to the guest, whose files are below root. The variable modules
// lists the folders to copy. Then addModules runs depmod, which writes the dependencies between the
// copied modules, because modprobe in the guest needs them.
func addModules(ctx context.Context, root string, k kernel) error {
	to := filepath.Join(root, "usr/lib/modules", k.version)
	for _, dir := range modules {
		from := filepath.Join(k.modules, "kernel", dir)
		if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.CopyFS(filepath.Join(to, "kernel", dir), os.DirFS(from)); err != nil {
			return err
		}
	}

	for _, file := range []string{"modules.builtin", "modules.order"} {
		if err := add(root, filepath.Join(k.modules, file), filepath.Join("/usr/lib/modules", k.version, file)); err != nil {
			return err
		}
	}
	_, err := output(ctx, "", "depmod", "-b", root, k.version)
	return err
}

// add copies a file of this machine to a path in the guest, unless that path exists
// already.
func add(root, from, to string) error {
	to = filepath.Join(root, to)
	if _, err := os.Stat(to); err == nil {
		return nil
	}
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o755)
}

// pack writes the files below root to image as an initrd, which is the guest's only
// file system.
func pack(ctx context.Context, root, image string) error {
	_, err := output(ctx, root, "sh", "-c", `find . -print0 | cpio --null -o -H newc --quiet >"$0"`, image)
	return err
}
