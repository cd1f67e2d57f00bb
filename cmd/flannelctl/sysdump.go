// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/report/doctor/linux"
	"github.com/flanneld/flanneld/pkg/report/status"
)

const (
	// partTimeout limits the time for one part of the archive.
	partTimeout = 30 * time.Second
	// maxPart limits the size of a part in bytes. The end counts, because the newest lines of a log are there.
	maxPart = 32 << 20
)

// part is one file of the archive. The file has the text that collect returns, even with an error.
type part struct {
	name    string
	collect func(ctx context.Context) ([]byte, error)
}

func newSysdumpCommand(h host) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use: "sysdump", Short: "Write an archive with everything about this host that helps to find a problem", Args: cobra.NoArgs,
		Long: `Writes a tar.gz with the reports of flannelctl about this host and its store, and with
links, addresses, routes of all tables, rules, neighbours, the FDB, tc, BPF programs at devices, the firewall,
sysctls, versions, metrics, goroutines and logs. Each part is a file. If a part cannot be collected,
its file says why, and the rest is collected all the same. Passwords, tokens and keys are taken out.
Names, addresses and what other programs have written in their rules stay: look at the archive before you publish it.`,
		Example: "  flannelctl sysdump\n  flannelctl sysdump --file=/tmp/host1.tar.gz\n  kubectl exec POD -- flannelctl sysdump --file=- >host1.tar.gz",
		RunE: func(cmd *cobra.Command, _ []string) error {
			hostname, _ := os.Hostname()
			incomplete, report, err := writeDump(cmd, file, cmp.Or(hostname, "host"), func(ctx context.Context, a *archive) ([]missing, error) {
				a.secrets = h.knownSecrets(ctx)
				return a.collect(ctx, partTimeout, h.parts(ctx))
			})
			if len(incomplete) > 0 {
				var names []string
				for _, m := range incomplete {
					names = append(names, m.name)
				}
				fmt.Fprintf(report, "incomplete: %s\n", strings.Join(names, ", "))
			}
			return err
		},
	}

	cmd.Flags().StringVar(&file, "file", "", "path of the archive, - for standard output (default flannel-sysdump-HOST-TIME.tar.gz)")
	cmd.Flags().StringVar(&h.socket, "socket", h.socket, "local socket of the daemon")
	cmd.AddCommand(newClusterDumpCommand(h))
	return cmd
}

// writeDump writes an archive of what is named, with what fill adds to it, to a file or, if that is -, to standard output.
// If file is empty, the name of the archive tells the time. report is where the caller can write what is missing.
func writeDump(cmd *cobra.Command, file, of string, fill func(context.Context, *archive) ([]missing, error)) (incomplete []missing, report io.Writer, err error) {
	folder := "flannel-sysdump-" + of + "-" + time.Now().UTC().Format("20060102T150405Z")
	path := cmp.Or(file, folder+".tar.gz")
	report = cmd.OutOrStdout()
	to := io.WriteCloser(nopCloser{report})
	if path == "-" {
		report = cmd.ErrOrStderr()
	} else if to, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, report, err
	}

	packed := gzip.NewWriter(to)
	a := &archive{tar: tar.NewWriter(packed), folder: folder}
	incomplete, err = fill(cmd.Context(), a)
	if err = errors.Join(err, a.tar.Close(), packed.Close(), to.Close()); err == nil && path != "-" {
		fmt.Fprintln(report, path)
	}
	return incomplete, report, err
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// archive is an archive that is being written, with all files in one folder. Its methods support concurrent use.
type archive struct {
	folder  string
	secrets *scrubber

	mu  sync.Mutex
	tar *tar.Writer
}

// missing is a part of an archive that is not complete, and why.
type missing struct {
	name string
	err  error
}

// collect adds all parts. It collects some at a time: each may wait until its time is over, if the daemon, the store or
// a host hangs. It returns those that are not complete, in their order.
func (a *archive) collect(ctx context.Context, timeout time.Duration, all []part) (incomplete []missing, err error) {
	incomplete = make([]missing, len(all))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for i, p := range all {
		group.Go(func() error {
			within, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			text, failed := p.collect(within)
			if ctx.Err() == nil && within.Err() != nil {
				failed = fmt.Errorf("no answer within %s", timeout)
			}
			if failed == nil && len(text) > maxPart {
				failed = fmt.Errorf("the first %d bytes are left out", len(text)-maxPart)
			}
			incomplete[i] = missing{p.name, failed}
			return errors.Join(ctx.Err(), a.add(p.name, text, failed))
		})
	}
	err = group.Wait()
	return slices.DeleteFunc(incomplete, func(m missing) bool { return m.err == nil }), err
}

// add writes a file without its secrets, and at its end why it is not complete.
func (a *archive) add(name string, text []byte, failed error) error {
	text = text[max(0, len(text)-maxPart):]
	if failed != nil {
		text = fmt.Appendf(text, "\nincomplete: %v\n", failed)
	}
	text = []byte(a.secrets.scrub(string(text)))

	a.mu.Lock()
	defer a.mu.Unlock()
	header := &tar.Header{Name: a.folder + "/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: time.Now()}
	if err := a.tar.WriteHeader(header); err != nil {
		return err
	}
	_, err := a.tar.Write(text)
	return err
}

// knownSecrets returns a scrubber that knows the secrets of this host: those in the settings and the environment of the
// daemon, in the network configuration, and in its files.
func (h host) knownSecrets(ctx context.Context) *scrubber {
	s := &scrubber{known: map[string]bool{}}
	p, _ := h.fromDaemon()
	unit, _ := os.ReadFile(h.settings)
	config, _ := h.self(ctx, "config", "get")
	for _, text := range slices.Concat([]string{string(unit), string(config)}, p.variables(), p.env, os.Environ()) {
		s.learn(text)
	}

	// WireGuard's keys, and the tokens of pods, have no name before them.
	keys, _ := filepath.Glob(filepath.Join(cmp.Or(p.given["state-dir"], "/var/lib/flannel"), "wgkey*"))
	for _, path := range append(keys, value(p.env, "WIREGUARD_KEY_FILE"), filepath.Join(h.serviceAccount, "token"), filepath.Join(p.serviceAccount, "token")) {
		if text, err := os.ReadFile(path); err == nil {
			s.add(string(text))
		}
	}
	return s
}

// parts returns all parts in the order in which they are collected.
func (h host) parts(ctx context.Context) []part {
	client := status.Client(h.socket)
	own := func(name string, args ...string) part {
		return part{"flannelctl/" + name + ".txt", func(ctx context.Context) ([]byte, error) { return h.self(ctx, args...) }}
	}
	get := func(name, path string) part {
		return part{name, func(ctx context.Context) ([]byte, error) { return fetchText(ctx, client, path) }}
	}

	all := []part{own("version", "version"), own("doctor", "doctor")}
	networks := []status.NetworkSummary{{}}
	if r, err := fetch(ctx, client, socketURL, ""); err == nil && len(r.Networks) > 0 {
		all = append(all, own("networks", "networks"))
		networks = r.Networks
	}

	for _, n := range networks {
		suffix := ""
		network := "--network=" + n.Name
		if n.Name != "" {
			suffix = "-" + n.Name
		}
		all = append(all,
			own("status"+suffix, "status", "--peers", network), own("check"+suffix, "check", network), own("interface"+suffix, "interface", network),
			own("config"+suffix, "config", "get", network), own("leases"+suffix, "leases", network), get("daemon/statusz"+suffix+".json", "statusz.json?network="+n.Name))
	}

	all = append(all,
		own("interface-without-daemon", "interface", "--no-daemon"),
		get("daemon/metrics.txt", "metrics"), get("daemon/readyz.txt", "readyz"), get("daemon/goroutines.txt", "debug/goroutines"), part{"daemon/settings.txt", h.flags})
	dumps := linux.Dumps()
	for _, name := range slices.Sorted(maps.Keys(dumps)) {
		all = append(all, part{"kernel/" + name + ".txt", func(context.Context) ([]byte, error) {
			lines, err := dumps[name]()
			return []byte(strings.Join(lines, "\n") + "\n"), err
		}})
	}
	all = append(all,
		part{"kernel/sysctl.txt", sysctls},
		part{"kernel/links-details.txt", program("ip", "-details", "-statistics", "link")},
		part{"firewall/nft.txt", program("nft", "list", "ruleset")},
		part{"logs/flanneld.txt", program("journalctl", "--unit=flanneld", "--no-pager", "--lines=20000")},
		part{"logs/kernel.txt", program("dmesg")})

	var saved []string
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		for _, v := range iptables.Present(f) {
			saved = append(saved, v.Program(f))
			all = append(all, part{"firewall/" + v.Program(f) + "-save.txt", program(v.Program(f)+"-save", "-c")})
		}
	}

	all = append(all, part{"firewall/iptables.txt", func(context.Context) ([]byte, error) {
		return []byte("These variants of iptables are installed and have tables: " + strings.Join(saved, ", ") + "\n"), nil
	}})
	for _, pattern := range []string{
		"/etc/os-release", "/proc/version", "/proc/modules", "/proc/net/snmp", "/proc/net/snmp6", "/proc/net/netstat", "/proc/net/softnet_stat", "/proc/net/xfrm_stat", "/proc/net/udp", "/proc/net/udp6",
		h.settings, "/run/flannel/subnet.env", "/run/flannel/networks/*.env", "/etc/cni/net.d/*.conf*", "/var/log/pods/*flannel*/*/*.log",
	} {
		paths, _ := filepath.Glob(pattern)
		for _, path := range paths {
			all = append(all, part{"files" + path, func(context.Context) ([]byte, error) { return os.ReadFile(path) }})
		}
	}
	return all
}

// self runs a command of flannelctl, and returns what it prints.
func (h host) self(ctx context.Context, args ...string) ([]byte, error) {
	var out bytes.Buffer
	root := newRoot(h) //nolint:contextcheck // the commands get ctx from ExecuteContext
	root.SetArgs(args)
	root.SetOut(&out)
	root.SetErr(&out)
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintf(&out, "flannelctl: %v (exit code %d)\n", err, exitCode(err))
	}
	return out.Bytes(), nil // an error is an answer too
}

// program returns a function that runs a program and returns what it prints.
func program(name string, args ...string) func(context.Context) ([]byte, error) {
	return func(ctx context.Context) ([]byte, error) {
		cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // all callers pass names of programs of the system
		cmd.WaitDelay = time.Second
		return cmd.CombinedOutput()
	}
}

func fetchText(ctx context.Context, client *http.Client, path string) ([]byte, error) {
	resp, err := request(ctx, client, socketURL+"/"+path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxReport))
	if err == nil && resp.StatusCode == http.StatusNotFound {
		err = errors.New("this flanneld does not serve it")
	}
	return text, err
}

// flags returns the flags of the daemon, also those from variables.
func (h host) flags(context.Context) ([]byte, error) {
	p, err := h.fromDaemon()
	var out bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(p.given)) {
		fmt.Fprintf(&out, "%s=%s\n", name, p.given[name])
	}
	return out.Bytes(), err
}

func sysctls(context.Context) ([]byte, error) {
	var out bytes.Buffer
	const root = "/proc/sys"
	err := fs.WalkDir(os.DirFS(root), "net", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if text, err := os.ReadFile(filepath.Join(root, path)); err == nil { // some can only be written
			fmt.Fprintf(&out, "%s = %s\n", path, strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", "; "))
		}
		return nil
	})
	return out.Bytes(), err
}
