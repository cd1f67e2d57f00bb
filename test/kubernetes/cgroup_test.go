// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupMounts = "/sys/fs/cgroup"

// hierarchies returns the roots of all cgroup hierarchies: one of version 2, or those of
// version 1.
func hierarchies() ([]string, error) {
	if _, err := os.Stat(filepath.Join(cgroupMounts, "cgroup.controllers")); err == nil {
		return []string{cgroupMounts}, nil
	}
	entries, err := os.ReadDir(cgroupMounts)
	if err != nil {
		return nil, err
	}
	var roots []string
	for _, e := range entries {
		root := filepath.Join(cgroupMounts, e.Name())
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err == nil && e.IsDir() && e.Name() != "unified" {
			roots = append(roots, root)
		}
	}
	if len(roots) == 0 {
		return nil, fmt.Errorf("%s: no cgroups are mounted", cgroupMounts)
	}
	return roots, nil
}

// makeCgroups makes a cgroup for a node in every hierarchy, and returns their paths.
func makeCgroups(node string) (made []string, err error) {
	roots, err := hierarchies()
	if err != nil {
		return nil, err
	}
	for _, root := range roots {
		run := folderOf(root, os.Getpid())
		for _, dir := range []string{filepath.Dir(run), run, filepath.Join(run, node)} {
			if err := makeCgroup(dir); err != nil {
				return nil, err
			}
		}
		made = append(made, filepath.Join(run, node))
	}
	return made, nil
}

// makeCgroup makes a cgroup, and gives it all controllers, CPUs and memory nodes that
// its parent has.
func makeCgroup(dir string) error {
	parent := filepath.Dir(dir)
	if text, err := os.ReadFile(filepath.Join(parent, "cgroup.controllers")); err == nil {
		for c := range strings.FieldsSeq(string(text)) {
			if err := os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
				return err
			}
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} { // a cgroup of version 1 accepts no process while they are empty
		text, err := os.ReadFile(filepath.Join(parent, file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && strings.TrimSpace(string(text)) != "" {
			err = os.WriteFile(filepath.Join(dir, file), text, 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// removeCgroup removes a cgroup and all below it. It waits up to 20 seconds until their
// last process has ended.
func removeCgroup(dir string) error {
	const patience = 20 * time.Second
	var below []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			below = append(below, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for _, path := range slices.Backward(below) {
		for {
			err := unix.Rmdir(path)
			if err == nil || errors.Is(err, unix.ENOENT) {
				break
			}
			if !errors.Is(err, unix.EBUSY) {
				return fmt.Errorf("remove cgroup %s: %w", path, err)
			}
			select {
			case <-tick.C:
			case <-deadline.C:
				return fmt.Errorf("remove cgroup %s: %w", path, err)
			}
		}
	}
	return nil
}
