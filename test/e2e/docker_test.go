// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// dockerPort is the port that containers publish. Tests listen on other ports of containers.
const dockerPort = 80

// TestDocker checks the setups of docker.md with Docker's own code, which creates its bridge,
// its rules and a container on each of two hosts. With a complete setup containers must reach
// each other. With an incomplete one they do not, and flannelctl doctor must name the missing
// settings. Hosts outside the network may reach unpublished ports only in the setups for which
// docker.md says so.
//
//stages:rest it needs a component of Docker, which takes minutes to build
func TestDocker(t *testing.T) {
	t.Parallel()
	const (
		direct   = `{"allow-direct-routing": true}`
		nftables = `{"allow-direct-routing": true, "bridge-accept-fwmark": "0x10000/0x10000", "firewall-backend": "nftables"}`
		gateway  = "--opt=com.docker.network.bridge.gateway_mode_ipv4="
	)
	ownNetwork := []string{
		"--opt=com.docker.network.bridge.name=flannel-docker", "--opt=com.docker.network.driver.mtu=1450",
		"--opt=com.docker.network.bridge.enable_ip_masquerade=false",
	}
	for name, tt := range map[string]struct {
		backend  string
		families []prefix.Family
		setting  dockerSetting
		cut      []string // the settings that doctor must name; nil if containers reach each other
		outside  bool     // whether hosts outside the network reach ports that are not published
	}{
		"nothing set":                  {families: v4, cut: []string{"allow-direct-routing", "iptables -I DOCKER-USER -s "}},
		"nothing set, nftables":        {families: v4, setting: dockerSetting{config: `{"firewall-backend": "nftables"}`}, cut: []string{"allow-direct-routing", "bridge-accept-fwmark"}},
		"drop-in alone":                {families: v4, setting: dockerSetting{dropIn: true}, cut: []string{"allow-direct-routing"}},
		"direct routing alone":         {families: v4, setting: dockerSetting{config: direct}, cut: []string{"iptables -I DOCKER-USER -s "}},
		"drop-in":                      {families: v4, setting: dockerSetting{config: direct, dropIn: true}},
		"drop-in, host-gw":             {backend: "host-gw", families: v4, setting: dockerSetting{config: direct, dropIn: true}},
		"drop-in, both families":       {families: dual, setting: dockerSetting{config: direct, dropIn: true}},
		"mark, nftables":               {families: v4, setting: dockerSetting{config: nftables, dropIn: true, mark: true}},
		"network of its own":           {families: v4, setting: dockerSetting{args: append(slices.Clone(ownNetwork), gateway+"nat-unprotected")}, outside: true},
		"network of its own, nftables": {families: v4, setting: dockerSetting{config: `{"firewall-backend": "nftables"}`, args: append(slices.Clone(ownNetwork), gateway+"nat-unprotected")}, outside: true},
		"routed network":               {families: v4, setting: dockerSetting{args: append(slices.Clone(ownNetwork), gateway+"routed")}, cut: []string{"iptables -I DOCKER-USER -s "}},
		"routed network, drop-in":      {families: v4, setting: dockerSetting{args: append(slices.Clone(ownNetwork), gateway+"routed"), dropIn: true}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if tt.backend == "" {
				tt.backend = "vxlan"
			}
			l := newLab(t, lab.Config{Hosts: 2, Families: tt.families}, backendConfig(tt.backend))
			if err := l.StartFlanneld(testContext(t), lab.FlanneldOptions{Args: []string{"--ip-masq"}}); err != nil {
				t.Fatal(err)
			}
			for _, h := range l.Hosts() {
				startDocker(t, h, tt.setting)
			}
			host := l.Host(1)
			if tt.cut == nil {
				expectMatrix(t, l)
			} else {
				expectUnreachable(t, l.Host(2), l.Pods()[1], l.Pods()[0])
			}
			if fixes := dockerFixes(t, host); !slices.EqualFunc(fixes, tt.cut, strings.Contains) {
				t.Errorf("doctor wants %q, want %q", fixes, tt.cut)
			}
			if reached := reachableFromOutside(t, l, host, l.Pods()[0]); reached != tt.outside {
				t.Errorf("a host outside the network reaches a port that is not published: %v, want %v", reached, tt.outside)
			}
		})
	}
}

// dockerSetting is a configuration of Docker, as an operator may make it.
type dockerSetting struct {
	config string   // daemon.json
	dropIn bool     // whether the drop-in is complete; otherwise it has no commands for the chain DOCKER-USER
	mark   bool     // whether the drop-in contains the line that marks packets
	args   []string // arguments of docker network create; nil for the default bridge
}

// startDocker runs the commands of the drop-in on h as systemd would. Then it creates a
// network of Docker with one container, which becomes a pod of h.
func startDocker(t *testing.T, h *lab.Host, s dockerSetting) {
	t.Helper()
	m := newMachine(t, h)
	m.write("/etc/docker/daemon.json", dockerConfig(t, m, s))
	m.run("install -m 0755 dist/mk-docker-opts.sh /usr/local/bin/")
	raw, err := os.ReadFile("../../dist/systemd/docker-flannel.conf")
	if err != nil {
		t.Fatal(err)
	}
	text := string(raw)
	if s.mark {
		text += pageBlock(t, "docker.md", "ExecStartPre=")
	}
	for _, command := range regexp.MustCompile(`(?m)^ExecStartPre=-?(.+)$`).FindAllStringSubmatch(text, -1) {
		if s.dropIn || !strings.Contains(command[1], "DOCKER-USER") {
			m.run("set -a; . /run/flannel/subnet.env; set +a\n" + strings.ReplaceAll(command[1], "$$", "$"))
		}
	}
	pod, err := h.AddEmptyPod(testContext(t), "container")
	if err != nil {
		t.Fatal(err)
	}
	script := `. /run/docker_opts.env; exec ` + machineTree + `/bin/tools/docker-network $DOCKER_OPTS "$@"`
	args := append([]string{machineRoot, "sh", "-ec", script, "sh", "--container=" + pod.NetNS(), fmt.Sprintf("--publish=%d", dockerPort)}, s.args...)
	cmd := exec.Command("chroot", args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v: %s", err, stderr.String())
		}
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		t.Fatalf("Docker's network prints %q (%v), want ready: %s", line, err, stderr.String())
	}
	if err := pod.Adopt(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

// dockerConfig returns the content of daemon.json: the keys of s.config, and the host's IPv6
// subnet if it has one.
func dockerConfig(t *testing.T, m *machine, s dockerSetting) string {
	t.Helper()
	config := map[string]any{}
	if s.config != "" {
		if err := json.Unmarshal([]byte(s.config), &config); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range statusOf(t, m.Host).Lease.Subnets {
		if p.Addr().Is6() {
			config["ipv6"], config["fixed-cidr-v6"] = true, p.String()
		}
	}
	text, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// expectUnreachable checks that one pod cannot connect to an unpublished port of another one
// within two seconds. The parameter from is the first pod, host is its host, and to is the
// other pod. Before that the function waits until host reaches the bridge of the other pod, so
// that a missing route is not the cause. The address of this bridge is the one before the
// address of the pod.
func expectUnreachable(t *testing.T, host *lab.Host, from, to *lab.Pod) {
	t.Helper()
	eventually(t, "the host reaches the bridge", func() error {
		_, err := host.Ping(testContext(t), to.Addr(prefix.IPv4).Prev(), lab.Echo{})
		return err
	})
	ctx, cancel := context.WithTimeout(testContext(t), 2*time.Second)
	defer cancel()
	if _, err := from.Connect(ctx, to, prefix.IPv4); err == nil {
		t.Errorf("%s reaches %s, want no connection", from.Name(), to.Name())
	}
}

// dockerFixes returns the fixes that flannelctl doctor advises for Docker.
func dockerFixes(t *testing.T, h *lab.Host) (fixes []string) {
	t.Helper()
	shell(t, h.Namespace, "mount -t sysfs none /sys")                             // sysfs shows the interfaces of the namespace that mounts it
	out, _ := h.Exec(testContext(t), built("flannelctl"), "doctor", "-o", "json") // doctor fails if it finds a problem
	var found []struct{ Problem, Fix string }
	if err := json.NewDecoder(strings.NewReader(string(out))).Decode(&found); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, f := range found {
		if strings.HasPrefix(f.Problem, "Docker ") {
			fixes = append(fixes, f.Fix)
		}
	}
	return fixes
}

// reachableFromOutside reports whether a port of a container can be reached through h from the
// router of the underlay, which is not a host of the network. It waits two seconds for the
// connection.
func reachableFromOutside(t *testing.T, l *lab.Lab, h *lab.Host, container *lab.Pod) bool {
	t.Helper()
	to := container.Addr(prefix.IPv4)
	shell(t, l.Underlay(), fmt.Sprintf("ip route add %s via %s", to, h.Addr(prefix.IPv4)))
	listener, err := container.Listen(testContext(t), "tcp", netip.AddrPortFrom(to, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	ctx, cancel := context.WithTimeout(testContext(t), 2*time.Second)
	defer cancel()
	conn, err := l.Underlay().Dial(ctx, "tcp", listener.Addr().String())
	if err == nil {
		_ = conn.Close()
	} else if !errors.Is(err, context.DeadlineExceeded) && !os.IsTimeout(err) {
		t.Errorf("dial %s: %v", to, err)
	}
	return err == nil
}
