package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// containerSpec holds, in the environment of a child of the tests, what that
// child is to become: a program in an image's file system, confined as container
// runtimes do it.
const containerSpec = "FLANNEL_E2E_CONTAINER"

// container is one of a pod on the network of its host. Seccomp, cgroups and
// the image's user, which is root, are left out.
type container struct {
	Root         string // of the image, which stays as it is
	ReadOnlyRoot bool
	Privileged   bool
	Capabilities []string // without CAP_
	NoNewPrivs   bool
	Mounts       []bind
	Env, Command []string
}

// bind is a file or folder of the host that the container sees.
type bind struct {
	From, To string
	ReadOnly bool
}

// capabilities are those that runtimes give by default, and those that manifests
// of flannel ask for.
func capabilities() map[string]uintptr {
	return map[string]uintptr{
		"AUDIT_WRITE": unix.CAP_AUDIT_WRITE, "CHOWN": unix.CAP_CHOWN, "DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE, "FOWNER": unix.CAP_FOWNER,
		"FSETID": unix.CAP_FSETID, "KILL": unix.CAP_KILL, "MKNOD": unix.CAP_MKNOD, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
		"NET_RAW": unix.CAP_NET_RAW, "SETFCAP": unix.CAP_SETFCAP, "SETGID": unix.CAP_SETGID, "SETPCAP": unix.CAP_SETPCAP,
		"SETUID": unix.CAP_SETUID, "SYS_CHROOT": unix.CAP_SYS_CHROOT, "NET_ADMIN": unix.CAP_NET_ADMIN,
	}
}

// defaultCapabilities are what a container has that says nothing about them.
func defaultCapabilities() []string {
	var names []string
	for name := range capabilities() {
		if name != "NET_ADMIN" {
			names = append(names, name)
		}
	}
	return names
}

// becomeContainer does not return if the process is to be a container.
func becomeContainer() {
	text := os.Getenv(containerSpec)
	if text == "" {
		return
	}
	var c container
	err := json.Unmarshal([]byte(text), &c)
	if err == nil {
		err = c.exec()
	}
	fmt.Fprintln(os.Stderr, "container:", err)
	os.Exit(125)
}

// exec replaces the process.
func (c container) exec() error {
	runtime.LockOSThread()
	root, err := c.mount()
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Chroot(root), os.Chdir("/")); err != nil {
		return err
	}
	for _, v := range c.Env {
		if path, ok := strings.CutPrefix(v, "PATH="); ok {
			if err := os.Setenv("PATH", path); err != nil {
				return err
			}
		}
	}
	program, err := exec.LookPath(c.Command[0])
	if err != nil {
		return err
	}
	if err := c.confine(); err != nil {
		return err
	}
	return syscall.Exec(program, c.Command, c.Env)
}

// confine takes away what the program may not have.
func (c container) confine() error {
	if c.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("no new privileges: %w", err)
		}
	}
	if c.Privileged {
		return nil
	}
	var keep []uintptr
	for _, name := range c.Capabilities {
		number, ok := capabilities()[name]
		if !ok {
			return fmt.Errorf("capability %s is none that these tests know", name)
		}
		keep = append(keep, number)
	}
	for number := uintptr(0); number <= unix.CAP_LAST_CAP; number++ {
		if slices.Contains(keep, number) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, number, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) { // one that this kernel has not
			return fmt.Errorf("drop capability %d: %w", number, err)
		}
	}
	return nil
}

// mount makes the container's file system, in a namespace that is gone with the
// process.
func (c container) mount() (root string, err error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return "", fmt.Errorf("unshare mounts: %w", err)
	}
	dir, err := os.MkdirTemp("/run", "container-")
	if err != nil {
		return "", err
	}
	root = filepath.Join(dir, "root")
	options := "lowerdir=" + c.Root
	for _, name := range []string{"root", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			return "", err
		}
		if name != "root" {
			options += "," + name + "dir=" + filepath.Join(dir, name)
		}
	}
	if err := unix.Mount("image", root, "overlay", 0, options); err != nil {
		return "", fmt.Errorf("mount image: %w", err)
	}
	mounts := []bind{{From: "/proc", To: "/proc"}}
	if !c.Privileged {
		mounts = append(mounts, bind{From: "/proc/sys", To: "/proc/sys", ReadOnly: true})
	}
	for _, dev := range []string{"/dev/null", "/dev/zero", "/dev/urandom"} {
		mounts = append(mounts, bind{From: dev, To: dev})
	}
	for _, m := range append(mounts, c.Mounts...) {
		if err := bindMount(m.From, filepath.Join(root, m.To), m.ReadOnly); err != nil {
			return "", err
		}
	}
	if c.ReadOnlyRoot {
		return root, remountReadOnly(root)
	}
	return root, nil
}

// bindMount makes the mount point, too.
func bindMount(from, to string, readOnly bool) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(to, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(to), 0o755); err == nil {
		err = touch(to)
	}
	if err != nil {
		return fmt.Errorf("make %s: %w", to, err)
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s on %s: %w", from, to, err)
	}
	if readOnly {
		return remountReadOnly(to)
	}
	return nil
}

func touch(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

func remountReadOnly(path string) error {
	if err := unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", path, err)
	}
	return nil
}
