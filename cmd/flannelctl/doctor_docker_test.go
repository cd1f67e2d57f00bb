// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	rules "github.com/flanneld/flanneld/pkg/firewall"
)

// TestDoctorDocker checks that the doctor asks only about bridges that have a subnet of this host, in
// either family, and names a fix for each kind of Docker rule that drops packets to them.
func TestDoctorDocker(t *testing.T) {
	hexadecimal := func(text string) string {
		a := netip.MustParseAddr(text).As4()
		return fmt.Sprintf("%08X", binary.NativeEndian.Uint32(a[:]))
	}
	route := func(dev, to, mask string) string {
		return fmt.Sprintf("%s\t%s\t00000000\t0001\t0\t0\t0\t%s\t0\t0\t0\n", dev, hexadecimal(to), hexadecimal(mask))
	}
	const (
		head   = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
		none   = "00000000000000000000000000000000"
		route6 = "fd000010000500490000000000000000 40 " + none + " 00 " + none + " 00000100 00000001 00000000 00000001  docker0\n"
	)
	docker0 := head + route("eth0", "10.6.0.0", "255.255.0.0") + route("docker0", "10.5.49.0", "255.255.255.0")
	direct, forward := rules.DockerCut{Direct: true}, rules.DockerCut{Forward: true}
	four, six := "10.5.49.0/24 behind docker0 of 10.5.0.0/16", "fd00:10:5:49::/64 behind docker0 of fd00:10:5::/48"
	for name, tt := range map[string]struct {
		files        map[string]string
		inIPTables   rules.DockerCut
		inNFTables   rules.DockerCut
		asked, fixes []string
	}{
		"no bridge":               {files: map[string]string{"proc/net/route": head + route("eth0", "10.5.49.0", "255.255.255.0")}, inIPTables: direct},
		"bridge of another":       {files: map[string]string{"proc/net/route": head + route("docker0", "172.17.0.0", "255.255.0.0")}, inIPTables: direct},
		"all accepted":            {files: map[string]string{"proc/net/route": docker0}, asked: []string{four}},
		"no direct routing":       {files: map[string]string{"proc/net/route": docker0}, inIPTables: direct, asked: []string{four}, fixes: []string{"allow-direct-routing"}},
		"the same in nftables":    {files: map[string]string{"proc/net/route": docker0}, inNFTables: direct, asked: []string{four}, fixes: []string{"allow-direct-routing"}},
		"published ports":         {files: map[string]string{"proc/net/route": docker0}, inIPTables: forward, asked: []string{four}, fixes: []string{"iptables -I DOCKER-USER -s 10.5.0.0/16 -d 10.5.49.0/24 -j ACCEPT"}},
		"published, in nftables":  {files: map[string]string{"proc/net/route": docker0}, inNFTables: forward, asked: []string{four}, fixes: []string{"bridge-accept-fwmark"}},
		"published ports of IPv6": {files: map[string]string{"proc/net/ipv6_route": route6}, inIPTables: forward, asked: []string{six}, fixes: []string{"ip6tables -I DOCKER-USER -s fd00:10:5::/48 -d fd00:10:5:49::/64 -j ACCEPT"}},
		"both families": {
			files: map[string]string{"proc/net/route": docker0, "proc/net/ipv6_route": route6}, inIPTables: rules.DockerCut{Direct: true, Forward: true},
			asked: []string{four, six}, fixes: []string{"allow-direct-routing", "iptables -I", "allow-direct-routing", "ip6tables -I"},
		},
		"garbage": {files: map[string]string{"proc/net/route": "docker0 x 0 0 0 0 0 y\ndocker0\n", "proc/net/ipv6_route": "zz 40 0 0 0 0 0 0 0 docker0\nfd 40 0 0 0 0 0 0 0 docker0\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			files := soundHost()
			maps.Copy(files, tt.files)
			files["sys/class/net/docker0/bridge/bridge_id"] = "x"
			h := newHost(t, files)
			var asked []string
			h.docker = func(_ context.Context, b rules.DockerBridge) (inIPTables, inNFTables rules.DockerCut) {
				asked = append(asked, fmt.Sprintf("%s behind %s of %s", b.Subnet, b.Name, b.Network))
				if !slices.Equal(b.From, []string{"flannel.1", "eth0"}) {
					t.Errorf("packets come in on %v", b.From)
				}
				return tt.inIPTables, tt.inNFTables
			}
			h.report.Network.Devices = []string{"flannel.1"}
			found := h.examine(t.Context())
			if diff := cmp.Diff(tt.asked, asked); diff != "" {
				t.Errorf("asked about (-want +got):\n%s", diff)
			}
			matches := func(f finding, fix string) bool { return f.Serious && strings.Contains(f.Fix, fix) }
			if !slices.EqualFunc(found, tt.fixes, matches) {
				t.Errorf("found %+v, want fixes %q", found, tt.fixes)
			}
		})
	}
}
