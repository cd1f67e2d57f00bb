// SPDX-License-Identifier: Apache-2.0

package subnetfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"syscall"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Limits, because the file may be damaged.
const (
	maxSize     = 64 << 10 // bytes
	maxWarnings = 10
	maxQuoted   = 80 // bytes of the file in one warning
)

// errTooLarge refuses a file that is too large to be a subnet file.
var errTooLarge = errors.New("larger than 64 KiB")

// Previous is the valid content of a subnet file that an earlier run wrote.
type Previous struct {
	// Entries has one entry for each family with at least one valid prefix, IPv4 first.
	// Prefixes are masked. A prefix that is missing or invalid is zero.
	Entries []Entry
	// Warnings has one line for each skipped part.
	Warnings []string
}

// Read returns the networks and subnets in the file at path. If the file or its folder
// does not exist, there are none, and that is no error. From a damaged file Read returns
// the valid part. It returns an error if it cannot read the file for any other reason.
func Read(path string) (Previous, error) {
	data, err := readBounded(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Previous{}, nil
	case err != nil:
		return Previous{}, fmt.Errorf("read subnet file %s: %w", path, err)
	}
	return parse(data), nil
}

// UpToDate reports whether the content of the file at path is exactly f. It returns false
// if the file is missing or cannot be read.
func UpToDate(path string, f File) bool {
	have, err := readBounded(path)
	return err == nil && bytes.Equal(have, f.Marshal())
}

// readBounded reads a regular file of at most maxSize bytes. O_NONBLOCK keeps it from
// waiting for a writer if the path is a FIFO.
func readBounded(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, cause(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, cause(err)
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}

	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return nil, cause(err)
	}
	if len(data) > maxSize {
		return nil, errTooLarge
	}
	return data, nil
}

// cause drops the operation and the path from err, because the caller adds them.
func cause(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

func parse(data []byte) Previous {
	var p Previous
	vars := p.variables(data)
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		k := keysOf[f]
		e := Entry{Network: p.prefix(vars, k.network, f), Subnet: p.prefix(vars, k.subnet, f)}
		if e != (Entry{}) {
			p.Entries = append(p.Entries, e)
		}
	}
	return p
}

// Variables parses another file in the format of the subnet file, such as an EnvironmentFile of systemd. It skips
// lines that are not valid.
func Variables(data []byte) map[string]string { return new(Previous).variables(data) }

// variables parses the dot-env format: assignments, optionally exported and quoted, and
// comments. If a variable is assigned twice, the last value counts.
func (p *Previous) variables(data []byte) map[string]string {
	vars := map[string]string{}
	for i, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, value, ok := assignment(line)
		if !ok {
			p.warn("line %d is skipped: expected KEY=VALUE, got %s", i+1, quote(line))
			continue
		}
		vars[key] = value
	}
	return vars
}

// assignment splits a line into the name of a shell variable and its unquoted value.
func assignment(line string) (key, value string, ok bool) {
	if rest, found := strings.CutPrefix(line, "export"); found && strings.TrimLeft(rest, " \t") != rest {
		line = rest
	}
	key, value, ok = strings.Cut(line, "=")
	key = strings.TrimSpace(key)
	if !ok || !isName(key) {
		return "", "", false
	}
	value, ok = unquote(strings.TrimSpace(value))
	return key, value, ok
}

func isName(s string) bool {
	for i, c := range s {
		letter := c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// unquote removes the quotes around a value and the comment after it. ok is false if a
// quote is not closed.
func unquote(s string) (value string, ok bool) {
	if s != "" && (s[0] == '"' || s[0] == '\'') {
		value, rest, ok := strings.Cut(s[1:], s[:1])
		rest = strings.TrimSpace(rest)
		return value, ok && (rest == "" || rest[0] == '#')
	}
	for i := range len(s) {
		if s[i] == '#' && (i == 0 || s[i-1] == ' ' || s[i-1] == '\t') {
			return strings.TrimSpace(s[:i]), true
		}
	}
	return s, true
}

// prefix returns the prefix in variable key. It returns zero if there is no valid prefix.
// It also returns zero for a list with several, which older daemons wrote if there were
// several cluster CIDRs.
func (p *Previous) prefix(vars map[string]string, key string, f prefix.Family) netip.Prefix {
	value := vars[key]
	if value == "" {
		return netip.Prefix{}
	}

	var found []netip.Prefix
	for text := range strings.SplitSeq(value, ",") {
		text = strings.TrimSpace(text)
		n, err := netip.ParsePrefix(text)
		if err != nil || prefix.FamilyOf(n.Addr()) != f || n.Addr().Is4In6() {
			p.warn("%s: %s is skipped: expected an %s prefix", key, quote(text), f)
			continue
		}
		found = append(found, n.Masked())
	}
	if len(found) > 1 {
		p.warn("%s is ignored: it has %d prefixes, expected one", key, len(found))
	}
	if len(found) != 1 {
		return netip.Prefix{}
	}
	return found[0]
}

// warn adds a warning. After maxWarnings it adds a last line that says that there is
// more.
func (p *Previous) warn(format string, args ...any) {
	switch {
	case len(p.Warnings) < maxWarnings:
		p.Warnings = append(p.Warnings, fmt.Sprintf(format, args...))
	case len(p.Warnings) == maxWarnings:
		p.Warnings = append(p.Warnings, "more lines are skipped")
	}
}

func quote(s string) string { return fmt.Sprintf("%.*q", maxQuoted, s) }

// Networks returns the networks that the file at path names, or nil if the file cannot be
// read.
func Networks(path string) []netip.Prefix {
	var named []netip.Prefix
	previous, _ := Read(path)
	for _, e := range previous.Entries {
		if e.Network.IsValid() {
			named = append(named, e.Network)
		}
	}
	return named
}
