// SPDX-License-Identifier: Apache-2.0

// Install-conf copies a file atomically: a reader of the destination sees either the old
// or the new content. Manifests use it to install the CNI configuration, which a
// container runtime reads as soon as it appears.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/google/renameio/v2"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stderr))
}

func run(args []string, stderr io.Writer) int {
	if len(args) != 2 {
		fmt.Fprintln(stderr, "usage: install-conf SOURCE DESTINATION")
		return 1
	}
	if err := install(args[0], args[1]); err != nil {
		fmt.Fprintln(stderr, "install-conf:", err)
		return 1
	}
	return 0
}

// install replaces dst by a copy of src that has the same mode. It does so atomically. It refuses an empty file, and a CNI
// configuration that is not JSON.
func install(src, dst string) (err error) {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", src)
	}
	content, err := io.ReadAll(in)
	switch {
	case err != nil:
		return err
	case len(content) == 0:
		return fmt.Errorf("%s is empty", src)
	case slices.Contains([]string{".conflist", ".conf", ".json"}, filepath.Ext(dst)) && !json.Valid(content):
		return fmt.Errorf("%s is not JSON", src)
	}

	// The temporary file is beside dst, because a file that is moved from a shared /tmp
	// keeps the security label of /tmp.
	out, err := renameio.NewPendingFile(dst, renameio.WithTempDir(filepath.Dir(dst)),
		renameio.WithPermissions(info.Mode().Perm()), renameio.IgnoreUmask())
	if err != nil {
		return err
	}
	defer func() { _ = out.Cleanup() }() // removes the temporary file after an error, and does nothing after the rename
	if _, err := out.Write(content); err != nil {
		return fmt.Errorf("copy %s: %w", src, err)
	}
	return out.CloseAtomicallyReplace()
}
