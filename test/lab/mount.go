// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

func enterNetNS(n *Namespace) (err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare network: %w", err)
	}
	n.net, err = os.Open("/proc/thread-self/ns/net")
	return err
}

// enterHostNamespaces moves the calling thread into new network and mount namespaces. There /run and
// /var/lib are empty tmpfs mounts, which disappear with the mount namespace.
func enterHostNamespaces(n *Namespace) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare mounts: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}

	for _, dir := range []string{"/run", "/var/lib"} {
		if err := unix.Mount("lab", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
			return fmt.Errorf("mount tmpfs on %s: %w", dir, err)
		}
	}
	if err := shareMachineID(); err != nil {
		return err
	}

	var err error
	if n.mnt, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
		return err
	}
	return enterNetNS(n)
}

// shareMachineID gives every host the same machine-id, as hosts have that are cloned from one image.
// So a test fails if flanneld derives an identity from it.
func shareMachineID() error {
	const id, target, file = "1ab1ab1ab1ab1ab1ab1ab1ab1ab1ab1a\n", "/etc/machine-id", "/run/machine-id"
	if err := os.WriteFile(file, []byte(id), 0o444); err != nil {
		return err
	}

	err := unix.Mount(file, target, "", unix.MS_BIND, "")
	if err != nil && !errors.Is(err, unix.ENOENT) { // if the machine has no machine-id, the hosts have none either
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return os.Remove(file)
}

// Path returns the path by which a process outside of the namespace reaches a file
// inside it. The path is valid in all processes while the lab is open.
func (n *Namespace) Path(file string) string {
	if n.mnt == nil {
		return file
	}
	return fmt.Sprintf("/proc/%d/task/%d/root%s", os.Getpid(), n.tid, file)
}
