// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestVMCgroups checks that a node can enable controllers for a group below the root of its cgroup
// namespace, as kubelet does. The guest has cgroups of version 2. There the kernel refuses this if
// the root contains processes.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMCgroups(t *testing.T) {
	cgroups, err := makeCgroups("node")
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "node.sh")
	const kubelet = `set -eu
mount --make-rprivate /
umount /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir /sys/fs/cgroup/kubepods
for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
	echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done
grep -w memory /sys/fs/cgroup/kubepods/cgroup.controllers
echo $$ >/sys/fs/cgroup/kubepods/cgroup.procs
`
	if err := os.WriteFile(script, []byte(kubelet), 0o600); err != nil {
		t.Fatal(err)
	}
	node := exec.CommandContext(background(t), "bash", "-euc", enterCgroups, "bash", strings.Join(cgroups, " "), script)
	if out, err := node.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if err := removeRun(); err != nil {
		t.Error(err)
	}
	if left, err := cgroupsOf(os.Getpid()); err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
	if _, err := os.Stat(cgroups[0]); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v, want that it is gone", cgroups[0], err)
	}
}
