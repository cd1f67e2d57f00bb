package lab

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// bare enters a network namespace and nothing else.
func bare(n *Namespace) (err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare network: %w", err)
	}
	n.net, err = os.Open("/proc/thread-self/ns/net")
	return err
}

// machine enters a network and a mount namespace, with /run and /var/lib that
// are empty, private and gone with the namespace.
func machine(n *Namespace) error {
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
	mnt, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return err
	}
	n.mnt = mnt
	return bare(n)
}

// shareMachineID gives every host the same machine-id, as hosts that were
// cloned from one image have: nothing may be derived from it.
func shareMachineID() error {
	const id, target, file = "1ab1ab1ab1ab1ab1ab1ab1ab1ab1ab1a\n", "/etc/machine-id", "/run/machine-id"
	if err := os.WriteFile(file, []byte(id), 0o444); err != nil {
		return err
	}
	err := unix.Mount(file, target, "", unix.MS_BIND, "")
	if err != nil && !errors.Is(err, unix.ENOENT) { // a machine without one: then the hosts share that
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return os.Remove(file)
}

// Path returns where a file of the namespace is found from outside it, in this
// process and others. It is good while the lab is open.
func (n *Namespace) Path(file string) string {
	if n.mnt == nil {
		return file
	}
	return fmt.Sprintf("/proc/%d/task/%d/root%s", os.Getpid(), n.tid, file)
}
