// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"os"
	"regexp"
	"strconv"

	"golang.org/x/sys/unix"
)

// unchanged matches mappings of a file that are not writable and have no changed page, in
// the format of proc_pid_smaps(5). Inode 0 means that there is no file.
var unchanged = regexp.MustCompile(`(?m)^([0-9a-f]+)-([0-9a-f]+) r-[x-]. \S+ \S+ [1-9].*\n(?:[A-Z].*\n)*?Anonymous: +0 kB$`)

// unmapProgram removes the pages of the program from this process. Only the start needed
// most of them. A page that is needed again comes from the page cache, with a minor
// fault.
func unmapProgram() error {
	mappings, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return fmt.Errorf("list mappings: %w", err)
	}
	for _, m := range unchanged.FindAllSubmatch(mappings, -1) {
		start, _ := strconv.ParseUint(string(m[1]), 16, strconv.IntSize)
		end, _ := strconv.ParseUint(string(m[2]), 16, strconv.IntSize)
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, uintptr(start), uintptr(end-start), unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("release the mapping at %s: %w", m[1], errno)
		}
	}
	return nil
}
