// SPDX-License-Identifier: Apache-2.0

// Package version describes the build: version, commit, Go release and platform.
package version

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
)

// The linker sets these with -ldflags, as the Makefile does: "-X <module>/pkg/base/version.Version=v0.1.0".
// Nothing else writes to them.
var (
	// Version is the release, or "dev" for a build without one.
	Version = "dev"
	// Commit is the short revision. If it is empty, String uses the revision that the Go
	// tool recorded.
	Commit = ""
)

// shortRevision is the number of characters to which a recorded revision is shortened.
const shortRevision = 7

// String returns the version, commit, Go release and platform on one line,
// the version first.
func String() string {
	info, _ := debug.ReadBuildInfo()
	return line(Version, cmp.Or(Commit, revision(info), "unknown"))
}

func line(version, commit string) string {
	return fmt.Sprintf("%s commit %s %s %s/%s", version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// revision returns the commit that the Go tool recorded, followed by "-dirty" if the
// working tree had changes. It returns "" if none was recorded, as in tests.
func revision(info *debug.BuildInfo) string {
	if info == nil {
		return ""
	}

	var rev, dirty string
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			rev = s.Value[:min(len(s.Value), shortRevision)]
		case "vcs.modified":
			if s.Value == "true" {
				dirty = "-dirty"
			}
		}
	}
	if rev == "" {
		return ""
	}
	return rev + dirty
}
