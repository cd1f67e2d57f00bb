// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/must"
)

// metaPackage is a Debian package that depends on the package of the newest kernel.
const metaPackage = "linux-image-cloud-amd64"

// kernel describes an unpacked kernel package.
type kernel struct {
	image   string // path of vmlinuz
	modules string // folder with the folder kernel and the file modules.builtin
	version string // as uname -r prints it
}

// findKernel returns the newest kernel that apt knows. If necessary it updates apt's
// lists. The unpacked package stays in a folder of the user's cache, so each version
// is downloaded only once. Commands that start guests at the same time wait for each
// other here, because apt does not update its lists twice at the same time.
func findKernel(ctx context.Context) kernel {
	if runtime.GOARCH != "amd64" {
		must.Fail("the guest is amd64 and runs programs of this machine, which is %s", runtime.GOARCH)
	}

	cache := must.Get(os.UserCacheDir())
	cache = filepath.Join(cache, "flanneld", "vm")
	must.Do(os.MkdirAll(cache, 0o755))
	lock := must.Get(os.Create(filepath.Join(cache, "lock")))
	defer lock.Close() // which unlocks it
	must.Do(unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	var k kernel
	if must.Catch(func() { k = fetchKernel(ctx, cache) }) != nil { // the lists are missing or out of date
		output(ctx, "", "apt-get", "-q", "update")
		k = fetchKernel(ctx, cache)
	}
	return k
}

var dependsOnImage = regexp.MustCompile(`(?m)^Depends: (linux-image-(\S+)) \(= (\S+)\)`)

func fetchKernel(ctx context.Context, cache string) kernel {
	about := output(ctx, "", "apt-cache", "show", "--no-all-versions", metaPackage)
	m := dependsOnImage.FindStringSubmatch(about)
	if m == nil {
		must.Fail("%s depends on no kernel:\n%s", metaPackage, about)
	}

	name := m[1]
	version := m[2]
	debian := m[3]
	dir := filepath.Join(cache, name+"_"+debian)
	k := kernel{
		image:   filepath.Join(dir, "boot", "vmlinuz-"+version),
		modules: filepath.Join(dir, "lib", "modules", version),
		version: version,
	}
	if exists(dir) {
		return k
	}
	tmp := must.Get(os.MkdirTemp(cache, "new-"))
	defer os.RemoveAll(tmp)
	output(ctx, tmp, "apt-get", "-q", "download", name+"="+debian)
	debs := must.Get(filepath.Glob(filepath.Join(tmp, "*.deb")))
	if len(debs) != 1 {
		must.Fail("apt-get download %s brought %q", name, debs)
	}
	tree := filepath.Join(tmp, "tree")
	output(ctx, "", "dpkg-deb", "-x", debs[0], tree)

	for _, path := range []string{tree + "/boot/vmlinuz-" + version, tree + "/lib/modules/" + version} {
		must.Get(os.Stat(path))
	}
	must.Do(os.Rename(tree, dir))
	return k
}
