// Install-conf copies a file in one step: whoever reads the destination sees the
// old content or the new, never a part. Manifests call it to install the CNI
// configuration, which a container runtime reads the moment it appears.
package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

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

// install replaces dst by a copy of src with the same mode.
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
	// What is moved out of a shared /tmp would keep the security label of there.
	out, err := renameio.NewPendingFile(dst, renameio.WithTempDir(filepath.Dir(dst)),
		renameio.WithPermissions(info.Mode().Perm()), renameio.IgnoreUmask())
	if err != nil {
		return err
	}
	defer func() { _ = out.Cleanup() }() // does nothing once it has its name
	if _, err := io.Copy(out, in); err != nil {
		return fmt.Errorf("copy %s: %w", src, err)
	}
	return out.CloseAtomicallyReplace()
}
