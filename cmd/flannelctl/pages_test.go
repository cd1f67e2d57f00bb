// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/options"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestPagesNameExistingCommands checks that the commands and flags of flannelctl, and
// the flags and variables of flanneld, exist if a page names them.
func TestPagesNameExistingCommands(t *testing.T) {
	paths, err := filepath.Glob("../../Documentation/*.md")
	more, _ := filepath.Glob("../../Documentation/*/*.md")
	if err != nil || len(paths) < 10 {
		t.Fatalf("%v: %v", paths, err)
	}
	commands, flags := 0, 0
	for _, path := range append(append(paths, more...), "../../README.md") {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Base(path) == "lab.md" { // the test of flannel-lab reads it
			continue
		}
		for line := range strings.SplitSeq(string(raw), "\n") {
			c, f := inspect(t, path, line)
			commands, flags = commands+c, flags+f
		}
	}
	if commands < 15 || flags < 50 {
		t.Errorf("only %d commands and %d flags found on all pages", commands, flags)
	}
}

var (
	invoked  = regexp.MustCompile("(?:^|[ `/$#])flannelctl ((?:[a-z]+ ?)*)([^`|]*)")
	flagText = regexp.MustCompile(`(?:^|[ (])--([a-z][a-z0-9-]+)`)
	alone    = regexp.MustCompile("`--([a-z][a-z0-9-]+)[^`]*`")
	variable = regexp.MustCompile(`\b(?:FLANNELD_[A-Z0-9_]+)\b`)
)

// inspect checks that one line of a page or help text names only existing commands of
// flannelctl with existing flags. If it names no command, inspect checks the flags and
// variables that it names. inspect returns the numbers of commands and flags in the
// line. It accepts the misspelt variable that one page shows on purpose.
func inspect(t *testing.T, path, line string) (commands, flags int) {
	shown := strings.HasPrefix(line, "    ") || strings.Contains(line, "`")
	if m := invoked.FindStringSubmatch(line); m != nil && shown {
		words := strings.Fields(m[1])
		cmd, rest, err := newRoot(thisHost()).Find(words)
		if err != nil || len(words) > 0 && !cmd.HasParent() && words[0] != "completion" {
			t.Errorf("%s: no command %q: %s", path, m[1], line)
			return 0, 0
		}
		commands++
		if cmd.HasSubCommands() && cmd.HasParent() && len(rest) > 0 {
			t.Errorf("%s: no command %q: %s", path, m[1], line)
		}
		own, ofFlanneld, _ := strings.Cut(m[2], " -- ")
		for _, f := range flagText.FindAllStringSubmatch(ofFlanneld, -1) {
			flags++
			if !strings.Contains(options.Help(), "  --"+f[1]) {
				t.Errorf("%s: flanneld has no flag --%s: %s", path, f[1], line)
			}
		}
		for _, f := range flagText.FindAllStringSubmatch(own, -1) {
			flags++
			if f[1] != "help" && cmd.LocalFlags().Lookup(f[1]) == nil && cmd.InheritedFlags().Lookup(f[1]) == nil {
				t.Errorf("%s: %s has no flag --%s", path, cmd.CommandPath(), f[1])
			}
		}
		return commands, flags
	}
	for _, f := range alone.FindAllStringSubmatch(line, -1) {
		flags++
		if !known(f[1]) {
			t.Errorf("%s: neither flanneld nor flannelctl has a flag --%s: %s", path, f[1], line)
		}
	}
	for _, v := range variable.FindAllString(line, -1) {
		if v != "FLANNELD_IFACE_REGX" && !strings.HasSuffix(v, "_") && !strings.Contains(options.Help(), v) {
			t.Errorf("%s: there is no variable %s", path, v)
		}
	}
	return commands, flags
}

// foreign contains flags of other programs that the pages mention.
var foreign = []string{"bip", "mtu", "ip-masq", "help", "version", "lease", "cluster-cidr", "can-ip-forward", "quota-backend-bytes", "max-request-bytes", "auto-compaction-retention"}

func known(name string) bool {
	return slices.Contains(foreign, name) || strings.Contains(options.Help(), "--"+name) || hasFlag(newRoot(thisHost()), name)
}

func hasFlag(cmd *cobra.Command, name string) bool {
	found := cmd.PersistentFlags().Lookup(name) != nil
	cmd.Flags().VisitAll(func(f *pflag.Flag) { found = found || f.Name == name })
	for _, sub := range cmd.Commands() {
		found = found || hasFlag(sub, name)
	}
	return found
}
