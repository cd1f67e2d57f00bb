// Package version says which build this is.
package version

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
)

// The linker sets these: -ldflags "-X flanneld/pkg/version.Version=v0.1.0
// -X flanneld/pkg/version.Commit=abc1234". Nothing else writes to them.
var (
	// Version is the release, "dev" for a build without one.
	Version = "dev"
	// Commit is the short revision; empty means what the Go tool recorded.
	Commit = ""
)

// shortRevision is how many characters of a recorded revision are shown.
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

// revision is the commit that the Go tool recorded, marked if the tree held
// changes; empty if there is none, as in tests.
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
