// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"

	"golang.org/x/sys/unix"
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
func findKernel(ctx context.Context) (kernel, error) {
	if runtime.GOARCH != "amd64" {
		return kernel{}, fmt.Errorf("the guest is amd64 and runs programs of this machine, which is %s", runtime.GOARCH)
	}

	cache, err := os.UserCacheDir()
	if err != nil {
		return kernel{}, err
	}
	cache = filepath.Join(cache, "flanneld", "vm")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return kernel{}, err
	}
	lock, err := os.Create(filepath.Join(cache, "lock"))
	if err != nil {
		return kernel{}, err
	}
	defer lock.Close() // which unlocks it
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return kernel{}, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	k, err := fetchKernel(ctx, cache)
	if err == nil {
		return k, nil
	}
	if _, updateErr := output(ctx, "", "apt-get", "-q", "update"); updateErr != nil { // the lists are missing or out of date
		return kernel{}, errors.Join(err, updateErr)
	}
	return fetchKernel(ctx, cache)
}

var dependsOnImage = regexp.MustCompile(`(?m)^Depends: (linux-image-(\S+)) \(= (\S+)\)`)

func fetchKernel(ctx context.Context, cache string) (kernel, error) {
	about, err := output(ctx, "", "apt-cache", "show", "--no-all-versions", metaPackage)
	if err != nil {
		return kernel{}, err
	}
	m := dependsOnImage.FindStringSubmatch(about)
	if m == nil {
		return kernel{}, fmt.Errorf("%s depends on no kernel:\n%s", metaPackage, about)
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
	if _, err := os.Stat(dir); err == nil {
		return k, nil
	}
	tmp, err := os.MkdirTemp(cache, "new-")
	if err != nil {
		return kernel{}, err
	}
	defer os.RemoveAll(tmp)
	if _, err := output(ctx, tmp, "apt-get", "-q", "download", name+"="+debian); err != nil {
		return kernel{}, err
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(debs) != 1 {
		return kernel{}, fmt.Errorf("apt-get download %s brought %q (%w)", name, debs, err)
	}
	tree := filepath.Join(tmp, "tree")
	if _, err := output(ctx, "", "dpkg-deb", "-x", debs[0], tree); err != nil {
		return kernel{}, err
	}

	for _, path := range []string{tree + "/boot/vmlinuz-" + version, tree + "/lib/modules/" + version} {
		if _, err := os.Stat(path); err != nil {
			return kernel{}, fmt.Errorf("unpack %s: %w", name, err)
		}
	}
	return k, os.Rename(tree, dir)
}
