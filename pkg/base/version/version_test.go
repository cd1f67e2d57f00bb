// SPDX-License-Identifier: Apache-2.0

package version

import (
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
)

func TestLine(t *testing.T) {
	want := "v0.1.0 commit abc1234 " + runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH
	if got := line("v0.1.0", "abc1234"); got != want {
		t.Errorf("line() = %q, want %q", got, want)
	}
}

func TestStringIsOneLineVersionFirst(t *testing.T) {
	got := String()
	if !strings.HasPrefix(got, Version+" commit ") || strings.ContainsAny(got, "\n") {
		t.Errorf("String() = %q, want one line that starts with %q", got, Version+" commit ")
	}
}

func TestRevision(t *testing.T) {
	setting := func(kv ...string) *debug.BuildInfo {
		info := &debug.BuildInfo{}
		for i := 0; i < len(kv); i += 2 {
			info.Settings = append(info.Settings, debug.BuildSetting{Key: kv[i], Value: kv[i+1]})
		}
		return info
	}
	tests := map[string]struct {
		info *debug.BuildInfo
		want string
	}{
		"no build info":  {nil, ""},
		"not from a VCS": {setting("GOOS", "linux", "vcs.modified", "true"), ""},
		"clean":          {setting("vcs.revision", "0123456789abcdef", "vcs.modified", "false"), "0123456"},
		"changed":        {setting("vcs.modified", "true", "vcs.revision", "0123456789abcdef"), "0123456-dirty"},
		"short":          {setting("vcs.revision", "42"), "42"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := revision(tt.info); got != tt.want {
				t.Errorf("revision() = %q, want %q", got, tt.want)
			}
		})
	}
}
