// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// confDir is the folder on a host with the CNI configuration of its runtime.
const confDir = "/run/cni/net.d"

// podChecks is a lab with a pod on host b, where host a checks from a pod of its own.
type podChecks struct {
	t    *testing.T
	a, b *lab.Host
	args []string
}

// podLeg is one line of check --pod -o json.
type podLeg struct {
	From, To, Half, Broken, Advice string
	OK                             bool
	Largest                        int
}

func newPodChecks(t *testing.T, families []prefix.Family, backend string) podChecks {
	t.Helper()
	l := newLab(t, lab.Config{Hosts: 2, Families: families}, backend)
	if err := l.StartFlanneld(testContext(t), lab.FlanneldOptions{}); err != nil {
		t.Fatal(err)
	}
	f := podChecks{t: t, a: l.Host(1), b: l.Host(2), args: []string{"check", "--pod", "--cni-bin-dir=" + ownPlugins, "--cni-conf-dir=" + confDir}}
	runtime := newCNI(t, f.a, "1.1.0", manifestDelegate)
	if err := os.MkdirAll(f.a.Path(confDir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.a.Path(filepath.Join(confDir, "10-flannel.conflist")), runtime.list.Bytes, 0o600); err != nil {
		t.Fatal(err)
	}
	p := newCNI(t, f.b, "1.1.0", manifestDelegate).add("server")
	for _, a := range p.Addrs() {
		listener, err := p.Listen(testContext(t), "tcp", netip.AddrPortFrom(a, 80).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { listener.Close() })
		f.args = append(f.args, "--target="+a.String(), "--target="+netip.AddrPortFrom(a, 80).String())
	}
	return f
}

// check runs the check, which must end with the exit code and leave nothing of its pod.
func (f podChecks) check(code int) (legs []podLeg) {
	f.t.Helper()
	var out, why bytes.Buffer
	cmd := exec.Command(built("flannelctl"), append(f.args, "-o", "json")...)
	cmd.Stdout, cmd.Stderr = &out, &why
	if err := f.a.Start(cmd); err != nil {
		f.t.Fatal(err)
	}
	err := cmd.Wait()
	if failure := (*exec.ExitError)(nil); err != nil && !errors.As(err, &failure) || cmd.ProcessState.ExitCode() != code {
		f.t.Errorf("check --pod: %v, want exit code %d: %s\n%s", err, code, &why, &out)
	}
	if err := json.Unmarshal(out.Bytes(), &legs); err != nil {
		f.t.Fatalf("%v: %s%s", err, &out, &why)
	}
	f.expectNoPod()
	return legs
}

// left returns the notes and addresses of pods on host a.
func (f podChecks) left() (files []string) {
	for _, pattern := range []string{"/var/lib/cni/flannel/*", "/var/lib/cni/networks/cbr0/[0-9f]*", "/var/lib/cni/results/*"} {
		found, _ := filepath.Glob(f.a.Path(pattern))
		files = append(files, found...)
	}
	return files
}

func (f podChecks) expectNoPod() {
	f.t.Helper()
	if left := f.left(); len(left) > 0 {
		f.t.Errorf("the pod has left %v", left)
	}
	if out, err := f.a.Exec(testContext(f.t), "ip", "-o", "link", "show", "type", "veth"); err != nil || strings.Contains(string(out), "master "+lab.PodBridge) {
		f.t.Errorf("the pod has left %s (%v)", out, err)
	}
}

// expect checks that exactly these legs are broken: each as its half, what is broken and a part of the advice.
func (f podChecks) expect(legs []podLeg, want ...podLeg) {
	f.t.Helper()
	var broken []podLeg
	for _, l := range legs {
		if l.Broken != "" {
			broken = append(broken, l)
		}
	}
	if !slices.EqualFunc(broken, want, func(l, w podLeg) bool {
		return l.Half == w.Half && l.Broken == w.Broken && strings.Contains(l.Advice, w.Advice)
	}) {
		f.t.Errorf("the broken legs are %+v, want %+v", broken, want)
	}
}

// TestCheckFromPod breaks each half of the way of a pod. The check must name the half and the cause, and leave no pod.
//
//stages:rest it waits seconds for the missing answers of each fault
func TestCheckFromPod(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "host-gw"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			f := newPodChecks(t, dual, fmt.Sprintf(`{"Type":%q}`, backend))
			if backend == "vxlan" { // with the first pod, because the page shows its address
				nft(t, f.a.Namespace, "table inet fault { chain c { type filter hook forward priority -10; iifname cni0 meta nfproto ipv4 drop; } ; }")
				out, _ := flannelctl(t, f.a, f.args[:4]...)
				expectOnPage(t, "flannelctl.md", "flannelctl check --pod", out)
				nft(t, f.a.Namespace, "delete table inet fault")
			}
			legs := f.check(0)
			f.expect(legs)
			if n := len(legs); n != 8 { // in each family the gateway, the peer, its pod and the pod's port
				t.Errorf("%d legs, want 8: %+v", n, legs)
			}
			for _, l := range legs {
				if !l.OK || l.Advice != "" {
					t.Errorf("without a fault: %+v", l)
				}
			}
			f.breakEach()
		})
	}
}

func (f podChecks) breakEach() {
	own := netip.PrefixFrom(statusOf(f.t, f.a).Lease.Subnets[0].Addr().Next(), 24).String()
	const drop = "add table inet fault; add chain inet fault c { type filter hook %s; }; add rule inet fault c %s drop"
	both := func(l podLeg) []podLeg { return []podLeg{l, l} }
	for _, fault := range []struct {
		name, cause, cure string
		want              []podLeg
	}{
		{
			"packets to the gateway are dropped", "nft '" + fmt.Sprintf(drop, "prerouting priority -310", "iifname cni0") + "'", "nft delete table inet fault",
			both(podLeg{Half: "gateway", Broken: "firewall"}),
		},
		{
			"the gateway answers nothing, but forwards", "nft '" + fmt.Sprintf(drop, "input priority -10", "iifname cni0 meta l4proto { tcp, icmp }") + "'", "nft delete table inet fault",
			nil,
		},
		{
			"a rule drops packets of pods and of the gateway", "ip rule add from " + own + " blackhole pref 5272", "ip rule del pref 5272",
			both(podLeg{Half: "gateway", Broken: "rule", Advice: "5272"})[:1],
		},
		{
			"the gateway drops large packets", "nft '" + fmt.Sprintf(drop, "input priority -10", "iifname cni0 meta length > 1400") + "'", "nft delete table inet fault",
			both(podLeg{Half: "gateway", Broken: "mtu", Advice: "packets of up to 1400 bytes pass"}),
		},
		{
			"forwarded packets are dropped", "nft '" + fmt.Sprintf(drop, "forward priority -10", "iifname cni0 meta nfproto ipv4") + "'", "nft delete table inet fault",
			append(both(podLeg{Half: "outside", Broken: "firewall"})[:1], both(podLeg{Half: "target", Broken: "firewall"})...),
		},
		{
			"a rule drops forwarded packets", "ip rule add from " + own + " iif cni0 to 10.5.0.0/16 blackhole pref 5272", "ip rule del pref 5272",
			append(both(podLeg{Half: "outside", Broken: "rule", Advice: "5272"})[:1], both(podLeg{Half: "target", Broken: "rule"})...),
		},
	} {
		f.t.Run(fault.name, func(t *testing.T) {
			f := f
			f.t = t
			shell(t, f.a.Namespace, fault.cause)
			code := 0
			if fault.want != nil {
				code = 1
			}
			f.expect(f.check(code), fault.want...)
			shell(t, f.a.Namespace, fault.cure)
			f.expect(f.check(0))
		})
	}
}

// TestCheckFromPodEnds checks the exit codes, and that the pod is removed after an error and after signals.
func TestCheckFromPodEnds(t *testing.T) {
	t.Parallel()
	f := newPodChecks(t, v4, `{"Type":"vxlan"}`)
	expectFlannelctlExits(t, f.a, 2, append(f.args, "--cni-conf-dir=/run/none"), "/run/none has no CNI configuration")
	expectFlannelctlExits(t, f.a, 2, append(f.args, "--socket=/run/none"), "no such file")

	out, err := flannelctl(t, f.a, append(f.args, "--cni-bin-dir=/run/none")...)
	if err == nil || strings.Count(out, "\n") != 1 || !strings.Contains(out, "gives a pod no network") || !strings.Contains(out, "remove the pod") {
		t.Errorf("check --pod without plugins: %v, want both errors in one line:\n%s", err, out)
	}

	nft(t, f.b.Namespace, "table inet fault { chain c { type filter hook input priority 0; udp dport 8472 drop; } ; }")
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		cmd := exec.Command(built("flannelctl"), f.args...)
		if err := f.a.Start(cmd); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a pod is added", func() error {
			if len(f.left()) < 3 {
				return errors.New("no pod")
			}
			return nil
		})
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 2 {
			t.Errorf("after %s: %v, want exit code 2", sig, err)
		}
		f.expectNoPod()
	}
	f.expect(f.check(1), podLeg{Half: "outside", Broken: "network", Advice: "UDP 8472"}, podLeg{Half: "target", Broken: "network"}, podLeg{Half: "target", Broken: "network"})
	nft(t, f.b.Namespace, "delete table inet fault")

	shell(t, f.a.Namespace, "ip addr flush dev cni0; ip addr add 10.5.250.1/24 dev cni0")
	expectFlannelctlFails(t, f.a, f.args, "the CNI configuration cbr0 gives a pod no network", "cni0 has the address 10.5.250.1/24")
	f.expectNoPod()
}
