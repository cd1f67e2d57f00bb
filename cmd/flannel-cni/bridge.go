// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
)

const defaultBridge = "cni0"

func (c config) enableIPv6(d object) error {
	if t, _ := d.text("type", ""); t != defaultDelegate {
		return nil
	}

	host, err := subnetfile.Load(c.SubnetFile)
	isIPv6 := func(e subnetfile.Entry) bool { return prefix.FamilyOf(e.Subnet.Addr()) == prefix.IPv6 }
	if err != nil || !slices.ContainsFunc(host.Entries, isIPv6) {
		return err
	}
	name, err := d.text("bridge", defaultBridge)
	if err != nil {
		return err
	}

	// With net.ipv6.conf.default.disable_ipv6=1, which hardening guides recommend, new devices
	// get no IPv6 addresses, and the plugin bridge fails to add its own. It creates the bridge
	// and adds the address in one call, so the bridge is created here.
	sysctl := func(dev string) string { return filepath.Join("/proc/sys/net/ipv6/conf", dev, "disable_ipv6") }
	off, err := os.ReadFile(sysctl(name))
	if errors.Is(err, fs.ErrNotExist) {
		off, err = os.ReadFile(sysctl("default"))
	}
	if err != nil || string(off) != "1\n" {
		return nil //nolint:nilerr // a kernel without IPv6, which the delegate reports
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add bridge %s: %w", name, err)
	}

	if err := os.WriteFile(sysctl(name), []byte("0"), 0); err != nil {
		return fmt.Errorf("enable IPv6 on %s: %w", name, err)
	}
	return nil
}
