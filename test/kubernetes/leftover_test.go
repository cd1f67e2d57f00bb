// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// folderOf returns the folder below root in which a run creates its files or cgroups.
// root is the folder of temporary files, or the root of a cgroup hierarchy. run is the
// process id of the run.
func folderOf(root string, run int) string {
	return filepath.Join(root, "flanneld-test", strconv.Itoa(run))
}

// filesOf returns the folder of a run's temporary files.
func filesOf(run int) string { return folderOf(os.TempDir(), run) }

// sweep removes the cgroups and temporary files of runs whose process does not exist any
// more.
func sweep() error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range roots {
		if err := sweepBelow(root, removeCgroup); err != nil {
			return err
		}
	}
	return sweepBelow(os.TempDir(), os.RemoveAll)
}

func sweepBelow(root string, remove func(string) error) error {
	runs, err := os.ReadDir(filepath.Dir(folderOf(root, 0)))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, run := range runs {
		pid, err := strconv.Atoi(run.Name())
		if err != nil || !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			continue
		}
		if err := remove(folderOf(root, pid)); err != nil {
			return err
		}
	}
	return nil
}

// removeRun removes the cgroups of this run, and the folder that contains those of all
// runs unless another run uses it.
func removeRun() error {
	roots, err := hierarchies()
	for _, root := range roots {
		run := folderOf(root, os.Getpid())
		err = errors.Join(err, removeCgroup(run))
		_ = unix.Rmdir(filepath.Dir(run)) // fails while other runs use it
	}
	return err
}
