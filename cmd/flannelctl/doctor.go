// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/status"
)

func newDoctorCommand() *cobra.Command {
	var (
		network *string
		out     output
		socket  string
	)
	cmd := &cobra.Command{
		Use: "doctor", Short: "Find problems of this host that affect the network, and name a remedy", Args: cobra.NoArgs,
		Long: `Checks forwarding, bridge filtering, reverse-path filtering, other firewalls,
Docker's rules, MTUs, udev's MAC policy, ports, kernel modules, and public addresses
that several leases have. It changes nothing. The exit code is 1 if there is a serious problem.`,
		Example: "  flannelctl doctor\n  flannelctl doctor -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			h := host{root: "/", docker: dockerCuts}
			if r, err := fetchOne(cmd.Context(), status.Client(socket), *network); err == nil {
				h.report = &r
			} else {
				h.away = err
			}
			findings := h.examine(cmd.Context())
			err := out.print(cmd.OutOrStdout(), findings, func(w io.Writer) {
				if len(findings) == 0 {
					fmt.Fprintln(w, "nothing found")
				}
				for _, f := range findings {
					weight := "note"
					if f.Serious {
						weight = "PROBLEM"
					}
					fmt.Fprintf(w, "%s\t%s\n\tfix: %s\n", weight, f.Problem, f.Fix)
				}
			})
			if err == nil && slices.ContainsFunc(findings, func(f finding) bool { return f.Serious }) {
				err = errors.New("there are problems")
			}
			return err
		},
	}
	out.addTo(cmd)
	network = addNetworkTo(cmd)
	cmd.Flags().StringVar(&socket, "socket", status.SocketPath("/run/flannel/subnet.env"), "local socket of the daemon")
	return cmd
}

// examine returns all findings, serious ones first.
func (h host) examine(ctx context.Context) []finding {
	findings := []finding{}
	for _, check := range []func() []finding{
		h.daemon, h.sharedAddresses, h.forwarding, h.bridges, h.reversePath, h.firewalls, func() []finding { return h.dockers(ctx) }, h.mtus, h.udev, h.port, h.modules,
	} {
		findings = append(findings, check()...)
	}
	findings = slices.Compact(findings) // both families may have the same finding
	slices.SortStableFunc(findings, func(a, b finding) int {
		switch {
		case a.Serious == b.Serious:
			return 0
		case a.Serious:
			return -1
		default:
			return 1
		}
	})
	return findings
}

func (h host) daemon() []finding {
	switch {
	case errors.Is(h.away, fs.ErrPermission):
		return []finding{{"only root may use the local socket: " + cause(h.away), "sudo flannelctl doctor", true}}
	case h.report == nil:
		return []finding{{"no flanneld answers on the local socket: " + cause(h.away), "systemctl status flanneld; journalctl -u flanneld", true}}
	}
	var fs []finding
	for _, r := range h.report.Reasons {
		fs = append(fs, finding{"flanneld is not ready: " + r, "flannelctl status", true})
	}
	return fs
}

// sharedAddresses returns a finding for each public address that several leases have. Hosts behind one
// NAT may share an address. Without a NAT only one host has the address, and the other leases are left
// over from hosts that are gone.
func (h host) sharedAddresses() []finding {
	if h.report == nil {
		return nil
	}
	var found []finding
	for _, s := range h.report.SharedPublicIPs {
		problem := fmt.Sprintf("the leases %s have the public address %s: all are served, but a host that is gone may have left some of them", oneline.List(s.Leases, ", "), s.PublicIP)
		fix := "flannelctl revoke LEASE for those whose host is gone; hosts behind one NAT may share an address"
		if h.kubernetes() {
			fix = "kubectl delete node NODE for those that are gone; Nodes behind one NAT may share an address"
		}
		found = append(found, finding{problem, fix, false})
	}
	return found
}

// cause returns the text of an error, without the method and URL that the HTTP client adds.
func cause(err error) string {
	if e := (*url.Error)(nil); errors.As(err, &e) {
		err = e.Err
	}
	return err.Error()
}

func (h host) forwarding() []finding {
	var fs []finding
	for f, key := range map[prefix.Family]string{prefix.IPv4: "net.ipv4.ip_forward", prefix.IPv6: "net.ipv6.conf.all.forwarding"} {
		if v, ok := h.sysctl(key); h.families()[f] && ok && v == 0 {
			fs = append(fs, finding{fmt.Sprintf("%s is not forwarded: pods can reach only this host", f), "sysctl -w " + key + "=1 (and a line in /etc/sysctl.d)", true})
		}
	}
	return fs
}

func (h host) bridges() []finding {
	var fs []finding
	for f, key := range map[prefix.Family]string{prefix.IPv4: "net.bridge.bridge-nf-call-iptables", prefix.IPv6: "net.bridge.bridge-nf-call-ip6tables"} {
		if !h.families()[f] {
			continue
		}
		switch v, ok := h.sysctl(key); {
		case !ok:
			fs = append(fs, finding{"br_netfilter is not loaded: " + withoutBridgeFilter, "modprobe br_netfilter (and a line in /etc/modules-load.d)", h.kubernetes()})
		case v == 0:
			fs = append(fs, finding{key + " is 0: " + withoutBridgeFilter, "sysctl -w " + key + "=1 (and a line in /etc/sysctl.d)", h.kubernetes()})
		}
	}
	return fs
}

// withoutBridgeFilter is the effect of a missing bridge filter, in every mode of kube-proxy. The
// answer of the pod stays on the bridge. So the kernel does not translate its source address back to
// the address of the Service, and the client does not recognize the answer.
const withoutBridgeFilter = "a pod gets no answer from a Service that a pod on the same bridge serves, and NetworkPolicies do not apply between them"

func (h host) reversePath() []finding {
	if h.report == nil {
		return nil
	}
	all, _ := h.sysctl("net.ipv4.conf.all.rp_filter")
	own, _ := h.sysctl("net.ipv4.conf." + h.report.Interface.Name + ".rp_filter")
	if max(all, own) != 1 {
		return nil
	}
	return []finding{{
		"rp_filter is strict on " + h.report.Interface.Name + ": packets of pods are dropped if they arrive on another interface than that of the route back, as with DirectRouting and several interfaces",
		"sysctl -w net.ipv4.conf.all.rp_filter=2 net.ipv4.conf." + h.report.Interface.Name + ".rp_filter=2", false,
	}}
}

func (h host) firewalls() []finding {
	var fs []finding
	if _, ok := h.text("run/firewalld.pid"); ok || h.exists("run/firewalld") {
		fs = append(fs, finding{"firewalld runs: it may drop packets of the network and its pods", h.firewalldFix(), false})
	}
	if conf, _ := h.text("etc/ufw/ufw.conf"); slices.Contains(strings.Fields(conf), "ENABLED=yes") {
		fix := []string{"ufw default allow routed"}
		for _, port := range h.ports() {
			fix = append(fix, fmt.Sprintf("ufw allow %d/udp", port))
		}
		fs = append(fs, finding{"ufw is enabled: it drops forwarded packets by default", strings.Join(fix, "; "), false})
	}
	return fs
}

// firewalldFix returns commands that make firewalld accept packets from pods, on any device, and
// packets to the backend's UDP ports. If no daemon answers, the commands contain a placeholder for the
// network.
func (h host) firewalldFix() string {
	sources := []string{"POD-NETWORK"}
	if h.report != nil && len(h.report.Network.Prefixes) > 0 {
		sources = strings.Split(list(h.report.Network.Prefixes), ",")
	}
	var fix []string
	for _, s := range sources {
		fix = append(fix, "firewall-cmd --permanent --zone=trusted --add-source="+s)
	}
	for _, port := range h.ports() {
		fix = append(fix, fmt.Sprintf("firewall-cmd --permanent --add-port=%d/udp", port))
	}
	return strings.Join(append(fix, "firewall-cmd --reload"), " && ")
}

// mtus returns a finding for each bridge of pods whose MTU is larger than that of the network.
func (h host) mtus() []finding {
	if h.report == nil || h.report.Network.MTU == 0 {
		return nil
	}
	var found []finding
	for _, name := range []string{"cni0", "docker0", "cbr0"} {
		text, ok := h.text("sys/class/net/" + name + "/mtu")
		mtu, err := strconv.Atoi(text)
		if ok && err == nil && mtu > h.report.Network.MTU {
			found = append(found, finding{
				fmt.Sprintf("%s has MTU %d, the network carries %d: large packets are lost or slow", name, mtu, h.report.Network.MTU),
				fmt.Sprintf("ip link set %s mtu %d, and restart the pods", name, h.report.Network.MTU), true,
			})
		}
	}
	return found
}

// udev checks whether systemd-udevd may change the MAC address of a vxlan device. It assumes that a
// link file of the operator that mentions flannel prevents this.
func (h host) udev() []finding {
	if h.backend() != "vxlan" || !h.exists("usr/lib/systemd/network/99-default.link") && !h.exists("lib/systemd/network/99-default.link") {
		return nil
	}
	links, _ := filepath.Glob(filepath.Join(h.root, "etc/systemd/network/*.link"))
	for _, l := range links {
		if text, err := os.ReadFile(l); err == nil && strings.Contains(string(text), "flannel") {
			return nil
		}
	}
	return []finding{{
		"udev may change the MAC of new vxlan devices; flanneld restores it, after a short interruption",
		`printf '[Match]\nOriginalName=flannel*\n[Link]\nMACAddressPolicy=none\n' > /etc/systemd/network/50-flannel.link`, false,
	}}
}

// port checks whether a process uses a UDP port that vxlan needs. /proc/net/udp also lists the
// kernel's own vxlan socket. It causes no finding, because no process has it.
func (h host) port() []finding {
	if h.backend() != "vxlan" {
		return nil
	}
	for _, port := range h.ports() {
		if pid, ok := h.holder(port); ok {
			return []finding{{fmt.Sprintf("process %s uses UDP port %d, which vxlan needs", pid, port), fmt.Sprintf("ss -lunp 'sport = :%d'", port), true}}
		}
	}
	return nil
}

// holder returns the id of a process that has a socket on a UDP port. ok is false if there is none.
func (h host) holder(port int) (pid string, ok bool) {
	local := fmt.Sprintf(":%04X", port)
	for _, path := range []string{"proc/net/udp", "proc/net/udp6"} {
		f, err := os.Open(filepath.Join(h.root, path))
		if err != nil {
			continue
		}
		defer f.Close()
		for s := bufio.NewScanner(f); s.Scan(); {
			fields := strings.Fields(s.Text())
			if len(fields) > 9 && strings.HasSuffix(fields[1], local) {
				if pid, ok := h.owner(fields[9]); ok {
					return pid, true
				}
			}
		}
	}
	return "", false
}

// owner returns the id of the process that has the socket with that inode. ok is false if there is
// none.
func (h host) owner(inode string) (pid string, ok bool) {
	fds, _ := filepath.Glob(filepath.Join(h.root, "proc/[0-9]*/fd/*"))
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && to == "socket:["+inode+"]" {
			return filepath.Base(filepath.Dir(filepath.Dir(fd))), true
		}
	}
	return "", false
}

// modules checks whether the kernel has the module of the backend, loaded or not.
func (h host) modules() []finding {
	module, ok := map[string]string{"vxlan": "vxlan", "wireguard": "wireguard", "ipip": "ipip"}[h.backend()]
	if !ok || h.exists("sys/module/"+module) {
		return nil
	}
	release := h.release()
	for _, list := range []string{"modules.dep", "modules.builtin"} {
		if text, ok := h.text("lib/modules/" + release + "/" + list); ok && strings.Contains(text, "/"+module+".ko") {
			return nil
		}
	}
	if len(h.report.Peers) > 0 && h.report.Ready {
		return nil // the network works, so the module is part of the kernel although no list contains it
	}
	return []finding{{
		"kernel " + release + " has no module " + module,
		"install the package with the kernel's additional modules (Ubuntu: linux-modules-extra-" + release + ")", true,
	}}
}
