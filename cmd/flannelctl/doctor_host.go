// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	rules "github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/status"
)

// finding is a problem of this host that affects the network.
type finding struct {
	Problem string `json:"problem"`
	Fix     string `json:"fix"` // a command or another remedy
	Serious bool   `json:"serious"`
}

// host is the host to examine. root is the root of its file system, which tests replace.
type host struct {
	root   string
	report *status.Report // nil if no daemon answers
	away   error          // why no daemon answers, or nil
	docker dockerFunc
}

// text returns the content of the file at path below root, without surrounding spaces. ok is false if
// the file cannot be read.
func (h host) text(path string) (text string, ok bool) {
	b, err := os.ReadFile(filepath.Join(h.root, path))
	return strings.TrimSpace(string(b)), err == nil
}

func (h host) exists(path string) bool {
	_, err := os.Stat(filepath.Join(h.root, path))
	return !errors.Is(err, fs.ErrNotExist)
}

func (h host) sysctl(key string) (int, bool) {
	text, ok := h.text("proc/sys/" + strings.ReplaceAll(key, ".", "/"))
	v, err := strconv.Atoi(text)
	return v, ok && err == nil
}

func (h host) kubernetes() bool { return h.report != nil && h.report.Datastore.Kind == "kubernetes" }

func (h host) backend() string {
	if h.report == nil {
		return ""
	}
	return h.report.Network.BackendType
}

func (h host) families() map[prefix.Family]bool {
	families := map[prefix.Family]bool{}
	if h.report != nil {
		for _, p := range h.report.Network.Prefixes {
			families[prefix.FamilyOf(p.Addr())] = true
		}
	}
	if len(families) == 0 {
		families[prefix.IPv4] = true
	}
	return families
}

// ports returns the UDP ports that peers send to, or nil if no daemon answers.
func (h host) ports() []int {
	if h.report == nil {
		return nil
	}
	return h.report.Network.Ports
}

func (h host) release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// dockerFunc returns which kinds of rules Docker has that keep packets of other hosts
// from the containers behind b: first those in iptables, then those in nftables.
type dockerFunc func(ctx context.Context, b rules.DockerBridge) (iptables, nftables rules.DockerCut)
