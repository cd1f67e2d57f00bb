// SPDX-License-Identifier: Apache-2.0

// Package doctor finds the problems of a host that keep its pods from others.
//
// Facts are gathered by pkg/report/doctor/linux. Examine only judges them:
//   - doctor.go judges the settings of the host, other firewalls and the report of the daemon.
//   - ways.go judges how the kernel carries the packets of pods.
//   - ipsec.go judges the policies of IPsec.
//   - rules.go judges the rules of Docker and of other firewalls.
//   - attached.go judges filters and programs at devices.
//   - before.go judges a host on which no daemon has run yet.
package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// Facts are what is known of a host. An empty list means that there is nothing of its kind.
type Facts struct {
	Report  status.Report // empty if no daemon answers
	Away    error         // why no daemon answers, or nil
	Unread  error         // which facts could not be read, or nil
	Files   fs.FS         // the file system of the host, from its root
	Bridges []Bridge
	Ways    []Way
	Rules   []Rule // in the order in which the kernel applies them
	// Refusals are the routes that refuse packets. They may be missing unless a Way is refused.
	Refusals []Refusal
	Policies []Policy // of IPsec, in the order in which the kernel looks them up
	Docker   []Docker
	Blocks   []firewall.Block // rules that drop packets of the network
	Attached []Attached
	Twins    []Twin
	Silent   []netip.Prefix // subnets of peers whose hosts answer, and whose ends of the network do not
	Before   *Before        // the facts of a host without a daemon; otherwise nil
}

// Finding is a problem of a host that affects the network.
type Finding struct {
	Problem string `json:"problem"`
	Fix     string `json:"fix"`     // a command or another remedy
	Serious bool   `json:"serious"` // false for notes: pods may reach each other
	// Word names the cause if pods of this host do not reach those of other hosts, or not with large
	// packets. Otherwise it is empty.
	Word string `json:"word,omitempty"`
	// Subnets are those of the peers that pods do not reach. If there are none, Word is about all peers.
	Subnets []netip.Prefix `json:"subnets,omitempty"`
}

// Concerns reports whether the finding is the reason why pods do not reach a subnet.
func (f Finding) Concerns(subnet netip.Prefix) bool {
	return f.Word != "" && (len(f.Subnets) == 0 || slices.Contains(f.Subnets, subnet))
}

func note(problem, fix string) Finding    { return Finding{Problem: problem, Fix: fix} }
func serious(problem, fix string) Finding { return Finding{Problem: problem, Fix: fix, Serious: true} }

// cut returns a finding about pods that do not reach these subnets, or any other host if there are none.
func cut(word, problem, fix string, subnets ...netip.Prefix) Finding {
	return Finding{problem, fix, true, word, subnets}
}

// finder takes the findings of a check.
type finder func(Finding)

// Examine returns all findings about a host, serious ones first. It needs the facts about each network of the
// host.
func Examine(networks ...Facts) []Finding {
	findings := []Finding{} // not nil, so that JSON contains [] if there is none
	found := func(f Finding) {
		// Both families, and several networks, may have the same finding.
		if !slices.ContainsFunc(findings, func(other Finding) bool { return other.Problem == f.Problem && other.Fix == f.Fix }) {
			findings = append(findings, f)
		}
	}

	for _, h := range networks {
		for _, check := range []func(finder){
			h.daemon, h.peers, h.sharedAddresses, h.twins, h.forwarding, h.connections, h.ways, h.partly, h.ipsec,
			h.bridges, h.bridgeFilter, h.reversePath, h.firewalls, h.blocks, h.dockers, h.udev, h.port, h.modules,
			h.next, h.before,
		} {
			check(found)
		}
		findings = append(findings, h.attached(findings)...)
	}

	rank := func(f Finding) int {
		if f.Serious {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(findings, func(a, b Finding) int { return rank(a) - rank(b) })
	return findings
}

// Part is the part of a network that is not ready while CutOff has findings.
const Part = "pods"

// CutOff returns the reasons why the kernel does not carry packets of pods, although the objects of flanneld
// are in place. It is for the daemon, which looks often, and also while it starts.
func CutOff(h Facts) (findings []Finding) {
	if len(h.Ways) == 0 { // there are no pods
		return nil
	}
	inPlace := map[netip.Prefix]bool{}
	for _, p := range h.Report.Peers {
		for _, s := range p.Subnets {
			inPlace[s] = len(p.Objects) > 0 && p.State != status.Missing
		}
	}
	// flanneld puts its own routes back, but cannot help if they are in place and the kernel does not use them.
	lasts := func(w Way) bool {
		return inPlace[w.Subnet] && (w.Route.Table == tableLocal || w.Route.Err != nil && !w.Back)
	}
	found := func(f Finding) {
		remains := f.Word != "route" || slices.ContainsFunc(h.Ways, func(w Way) bool { return lasts(w) && slices.Contains(f.Subnets, w.Subnet) })
		if f.Serious && remains {
			findings = append(findings, f)
		}
	}
	h.forwarding(found)
	h.ways(found)
	return findings
}

// text returns the content of a file without surrounding spaces. ok is false if the file cannot be read.
func (h Facts) text(name string) (text string, ok bool) {
	b, err := fs.ReadFile(h.Files, name)
	return strings.TrimSpace(string(b)), err == nil
}

func (h Facts) exists(name string) bool {
	_, err := fs.Stat(h.Files, name)
	return !errors.Is(err, fs.ErrNotExist)
}

// sysctl returns the value of a key, whose parts are separated by slashes because names of devices contain dots.
func (h Facts) sysctl(key string) (int, bool) {
	text, ok := h.text("proc/sys/" + key)
	v, err := strconv.Atoi(text)
	return v, ok && err == nil
}

// release returns that of the kernel.
func (h Facts) release() string {
	text, _ := h.text("proc/sys/kernel/osrelease")
	return cmp.Or(text, "unknown")
}

func (h Facts) kubernetes() bool { return h.Report.Datastore.Kind == "kubernetes" }

// migrates reports whether the network changes to another backend. It has the devices and ports of both then.
func (h Facts) migrates() bool { return h.Report.Network.NextBackendType != "" }

// families returns the address families of the network, or IPv4 if no daemon answers.
func (h Facts) families() (families []prefix.Family) {
	for _, p := range h.Report.Network.Prefixes {
		families = append(families, prefix.FamilyOf(p.Addr()))
	}
	if len(families) == 0 {
		return []prefix.Family{prefix.IPv4}
	}
	return families
}

// networkOf returns the prefix of the network that contains an address, or else the address alone.
func (h Facts) networkOf(a netip.Addr) netip.Prefix {
	for _, n := range h.Report.Network.Prefixes {
		if n.Contains(a) {
			return n
		}
	}
	return prefix.Host(a)
}

func (h Facts) daemon(found finder) {
	switch {
	case errors.Is(h.Away, fs.ErrPermission):
		found(note("only root may use the local socket: "+h.Away.Error(), "sudo flannelctl doctor"))
	case h.Away != nil:
		found(serious("no flanneld answers on the local socket: "+h.Away.Error(), "systemctl status flanneld; journalctl -u flanneld"))
	}
	if h.Unread != nil {
		found(note("not everything could be examined: "+h.Unread.Error(), "run flannelctl as root"))
	}

	for _, r := range h.Report.Reasons {
		if !strings.HasPrefix(r, Part+": ") { // that is a finding of CutOff
			found(serious("flanneld is not ready: "+r, "flannelctl status"))
		}
	}
	if d := h.Report.Datastore; !d.Connected && !d.Since.IsZero() {
		found(note(fmt.Sprintf("%s is away since %s: %s; pods keep their network", d.Kind, d.Since.UTC().Format(time.RFC3339), d.Error), "flannelctl status; see etcd.md"))
	}
}

// peers checks whether this host serves all peers, and whether the kernel has their objects.
func (h Facts) peers(found finder) {
	remove := "flannelctl revoke LEASE"
	if h.kubernetes() {
		remove = "kubectl delete node NODE"
	}
	h.peersIn(found, status.Refused, "this host refuses %s: its pods do not reach them",
		"flannelctl status has all reasons; if the host of a lease is gone: "+remove)
	h.peersIn(found, status.Missing, "the kernel lacks objects for %s", "flannelctl status names the objects; journalctl -u flanneld")

	if reserved, subnets := h.in(status.Reserved); len(reserved) > 0 {
		f := note("reserved, and not taken yet, unless by a host with udp or a cloud: "+oneline.List(reserved, ", "),
			"start flanneld on the host; if it is gone: flannelctl unreserve SUBNET")
		f.Subnets = subnets
		found(f)
	}
}

// in returns the names of all peers with a state, with their errors, and their subnets.
func (h Facts) in(state status.State) (names []string, subnets []netip.Prefix) {
	for _, p := range h.Report.Peers {
		if p.State != state {
			continue
		}
		name := p.Key
		if p.Error != "" {
			name += " (" + p.Error + ")"
		}
		names = append(names, name)
		subnets = append(subnets, p.Subnets...)
	}
	return names, subnets
}

// peersIn finds all peers with a state together.
func (h Facts) peersIn(found finder, state status.State, problem, fix string) {
	names, subnets := h.in(state)
	switch len(names) {
	case 0:
	case 1:
		found(cut(string(state), fmt.Sprintf(problem, "the peer "+names[0]), fix, subnets...))
	default:
		found(cut(string(state), fmt.Sprintf(problem, fmt.Sprintf("%d peers, %s", len(names), oneline.List(names, ", "))), fix, subnets...))
	}
}

// sharedAddresses finds each public address that several leases have. Hosts behind one
// NAT may share an address. Without a NAT only one host has the address, and the other leases are left
// over from hosts that are gone.
func (h Facts) sharedAddresses(found finder) {
	fix := "flannelctl revoke LEASE for those whose host is gone; hosts behind one NAT may share an address"
	if h.kubernetes() {
		fix = "kubectl delete node NODE for those that are gone; Nodes behind one NAT may share an address"
	}
	for _, s := range h.Report.SharedPublicIPs {
		f := note(fmt.Sprintf("the leases %s have the public address %s: "+
			"all are served, but a host that is gone may have left some of them", oneline.List(s.Leases, ", "), s.PublicIP), fix)
		for _, p := range h.Report.Peers {
			if slices.Contains(s.Leases, p.Key) {
				f.Subnets = append(f.Subnets, p.Subnets...)
			}
		}
		found(f)
	}
}

// Twin is another host with an address of this one.
type Twin struct {
	Dev  string
	Addr netip.Addr
	MAC  string
}

// Duplicate is the word for an address of this host that another one has too.
const Duplicate = "duplicate"

// twins finds other hosts with the address of this one. Whether packets reach this host is a matter of chance then.
func (h Facts) twins(found finder) {
	for _, t := range h.Twins {
		found(cut(Duplicate, fmt.Sprintf("another host on %s, with the MAC address %s, has the address %s of this one: "+
			"packets to this host may go there", t.Dev, t.MAC, t.Addr),
			"give one of both hosts another address; "+
				"the table of MAC addresses of the switch, or ip neigh, helps to find the other"))
	}
}

// forwarding checks whether the kernel forwards at all, and IPv4 packets that arrive on the devices of pods and
// of the network. The settings of devices have no meaning for packets of IPv6.
func (h Facts) forwarding(found finder) {
	for _, f := range h.families() {
		key := map[prefix.Family]string{prefix.IPv4: "net/ipv4/ip_forward", prefix.IPv6: "net/ipv6/conf/all/forwarding"}[f]
		if v, ok := h.sysctl(key); ok && v == 0 {
			found(cut("forwarding", fmt.Sprintf("%s is not forwarded: pods can reach only this host", f),
				"sysctl -w "+strings.ReplaceAll(key, "/", ".")+"=1 (and a line in /etc/sysctl.d)", h.subnetsOf(f)...))
			continue
		}
		if f == prefix.IPv6 {
			continue
		}

		for _, dev := range h.incoming() {
			key := "net/ipv4/conf/" + dev + "/forwarding"
			if v, ok := h.sysctl(key); ok && v == 0 {
				found(cut("forwarding", fmt.Sprintf("%s does not forward IPv4: packets of pods that arrive there are dropped", dev),
					"sysctl -w net/ipv4/conf/default/forwarding=1 "+key+"=1 (and lines in /etc/sysctl.d)", h.subnetsOf(f)...))
			}
		}
	}
}

// connections checks whether the kernel has room for new connections. It drops their first packets if not.
func (h Facts) connections(found finder) {
	have, ok := h.sysctl("net/netfilter/nf_conntrack_count")
	most, known := h.sysctl("net/netfilter/nf_conntrack_max")
	if !ok || !known || most == 0 || have < most/10*9 {
		return
	}

	problem := fmt.Sprintf("%d of %d connections are tracked: when all are used, new ones are dropped", have, most)
	fix := fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d (and a line in /etc/sysctl.d)", 2*most)
	if have < most {
		found(note(problem, fix))
	} else {
		found(cut("conntrack", problem, fix))
	}
}

// incoming returns the devices on which packets of pods arrive, each once.
func (h Facts) incoming() []string {
	var devices []string
	for _, w := range h.Ways {
		if w.In != "" && !slices.Contains(devices, w.In) {
			devices = append(devices, w.In)
		}
	}
	return devices
}

// subnetsOf returns the subnets of all peers that have this family.
func (h Facts) subnetsOf(f prefix.Family) (subnets []netip.Prefix) {
	for _, p := range h.Report.Peers {
		for _, s := range p.Subnets {
			if prefix.FamilyOf(s.Addr()) == f {
				subnets = append(subnets, s)
			}
		}
	}
	return subnets
}

func (h Facts) bridgeFilter(found finder) {
	for _, f := range h.families() {
		key := map[prefix.Family]string{prefix.IPv4: "net/bridge/bridge-nf-call-iptables", prefix.IPv6: "net/bridge/bridge-nf-call-ip6tables"}[f]
		name := strings.ReplaceAll(key, "/", ".")
		switch v, ok := h.sysctl(key); {
		case !ok:
			found(Finding{Problem: "br_netfilter is not loaded: " + withoutBridgeFilter, Fix: "modprobe br_netfilter (and a line in /etc/modules-load.d)", Serious: h.kubernetes()})
		case v == 0:
			found(Finding{Problem: name + " is 0: " + withoutBridgeFilter, Fix: "sysctl -w " + name + "=1 (and a line in /etc/sysctl.d)", Serious: h.kubernetes()})
		}
	}
}

// withoutBridgeFilter is the effect of a missing bridge filter, in every mode of kube-proxy. The
// answer of the pod stays on the bridge. So the kernel does not translate its source address back to
// the address of the Service, and the client does not recognize the answer.
const withoutBridgeFilter = "a pod gets no answer from a Service that a pod on the same bridge serves, and NetworkPolicies do not apply between them"

// reversePath checks the filter of the external interface. A filter that drops packets for certain is a
// finding of ways.
func (h Facts) reversePath(found finder) {
	if name := h.Report.Interface.Name; name != "" && h.strict(name) {
		found(note(
			"rp_filter is strict on "+name+": packets of pods are dropped if they arrive on another interface than that of the route back, as with DirectRouting and several interfaces",
			"sysctl -w net/ipv4/conf/all/rp_filter=2 net/ipv4/conf/"+name+"/rp_filter=2", // the name may contain a dot
		))
	}
}

// strict reports whether the reverse-path filter of a device is strict. The kernel applies the greater one of
// its setting and that of all devices.
func (h Facts) strict(dev string) bool {
	all, _ := h.sysctl("net/ipv4/conf/all/rp_filter")
	own, _ := h.sysctl("net/ipv4/conf/" + dev + "/rp_filter")
	return max(all, own) == 1
}

// trust returns commands with which firewalld accepts packets from pods, on any device, and packets to the
// backend's UDP ports.
func (h Facts) trust() string {
	var trusted []string
	for _, p := range h.Report.Network.Prefixes {
		trusted = append(trusted, "firewall-cmd --permanent --zone=trusted --add-source="+p.String())
	}
	if len(trusted) == 0 { // no daemon tells the network
		trusted = []string{"firewall-cmd --permanent --zone=trusted --add-source=POD-NETWORK"}
	}
	for _, port := range h.Report.Network.Ports {
		trusted = append(trusted, fmt.Sprintf("firewall-cmd --permanent --add-port=%d/udp", port))
	}
	return strings.Join(append(trusted, "firewall-cmd --reload"), " && ")
}

// firewalls checks whether programs run that may drop packets. Their remedies accept packets from pods, on
// any device, and packets to the backend's UDP ports.
func (h Facts) firewalls(found finder) {
	allowed := []string{"ufw default allow routed"}
	for _, port := range h.Report.Network.Ports {
		allowed = append(allowed, fmt.Sprintf("ufw allow %d/udp", port))
	}

	if _, ok := h.text("run/firewalld.pid"); ok || h.exists("run/firewalld") {
		found(note("firewalld runs: it may drop packets of the network and its pods", h.trust()))
	}
	if conf, _ := h.text("etc/ufw/ufw.conf"); slices.Contains(strings.Fields(conf), "ENABLED=yes") {
		found(note("ufw is enabled: it drops forwarded packets by default", strings.Join(allowed, "; ")))
	}
}

// udev checks whether systemd-udevd runs and may change the MAC address of a vxlan device. It assumes that a
// link file of the operator that mentions flannel prevents this.
func (h Facts) udev(found finder) {
	if h.Report.Network.BackendType != "vxlan" || !h.exists("run/udev/control") || !h.exists("usr/lib/systemd/network/99-default.link") && !h.exists("lib/systemd/network/99-default.link") {
		return
	}

	links, _ := fs.Glob(h.Files, "etc/systemd/network/*.link")
	for _, l := range links {
		if text, _ := h.text(l); strings.Contains(text, "flannel") {
			return
		}
	}
	found(note(
		"udev may change the MAC of new vxlan devices; flanneld restores it, after a short interruption",
		`printf '[Match]\nOriginalName=flannel*\n[Link]\nMACAddressPolicy=none\n' > /etc/systemd/network/50-flannel.link`,
	))
}

// port checks whether a process uses a UDP port that vxlan needs. /proc/net/udp also lists the
// kernel's own vxlan socket. It causes no finding, because no process has it.
func (h Facts) port(found finder) {
	// Other backends that receive UDP do not become ready without their port, so a running daemon says it.
	backend := h.Report.Network.BackendType
	if h.Before == nil && (backend != "vxlan" || h.migrates()) {
		return
	}
	for _, port := range h.Report.Network.Ports {
		if pid, ok := h.holder(port); ok {
			found(serious(fmt.Sprintf("process %s uses UDP port %d, which %s needs", pid, port, backend), fmt.Sprintf("ss -lunp 'sport = :%d'", port)))
			return
		}
	}
}

// holder returns the id of a process that has a socket on a UDP port. ok is false if there is none.
func (h Facts) holder(port int) (pid string, ok bool) {
	local := fmt.Sprintf(":%04X", port)
	for _, name := range []string{"proc/net/udp", "proc/net/udp6"} {
		text, _ := h.text(name)
		for line := range strings.Lines(text) {
			fields := strings.Fields(line)
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
func (h Facts) owner(inode string) (pid string, ok bool) {
	fds, _ := fs.Glob(h.Files, "proc/[0-9]*/fd/*")
	for _, fd := range fds {
		if to, err := fs.ReadLink(h.Files, fd); err == nil && to == "socket:["+inode+"]" {
			return path.Base(path.Dir(path.Dir(fd))), true
		}
	}
	return "", false
}

// next reports that the next backend of a migration does not start. Pods keep their network by the present one.
func (h Facts) next(found finder) {
	n := h.Report.Network
	if n.NextError == "" {
		return
	}
	fix := "mend what the error names"
	if module, ok := map[string]string{"vxlan": "vxlan", "wireguard": "wireguard", "ipip": "ipip", "udp": "tun"}[n.NextBackendType]; ok {
		fix += " (a missing module: modprobe " + module + ")"
	}
	found(note(fmt.Sprintf("the next backend does not start: packets go on by the present one (%s: %s)", n.NextBackendType, n.NextError), fix+"; flanneld tries again within a minute"))
}

// modules checks whether the kernel has the module of the backend, which has the same name, loaded or not.
func (h Facts) modules(found finder) {
	module := h.Report.Network.BackendType
	if !slices.Contains([]string{"vxlan", "wireguard", "ipip"}, module) || h.exists("sys/module/"+module) {
		return
	}

	for _, list := range []string{"modules.dep", "modules.builtin"} {
		if text, ok := h.text("lib/modules/" + h.release() + "/" + list); ok && strings.Contains(text, "/"+module+".ko") {
			return
		}
	}
	if len(h.Report.Peers) > 0 && h.Report.Ready {
		return // the network works, so the module is part of the kernel although no list contains it
	}
	found(serious(
		"kernel "+h.release()+" has no module "+module,
		"install the package with the kernel's additional modules (Ubuntu: linux-modules-extra-"+h.release()+")",
	))
}
