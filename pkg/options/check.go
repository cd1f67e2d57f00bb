// SPDX-License-Identifier: Apache-2.0

package options

import (
	"cmp"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

type given struct{ name, value string }

// check also sets AllowExtensionBackend if that was not given, and appends warnings.
func (o *Options) check() error {
	if _, given := o.sources[allowExtension]; !given {
		// By default the extension backend is allowed only with etcd, where a program that can
		// write the configuration is trusted with the whole network. In Kubernetes many
		// programs may write a node's annotations or a ConfigMap.
		o.AllowExtensionBackend = !o.KubeSubnetMgr
	}

	for _, pair := range [][2]given{
		{{"etcd-username", o.EtcdUsername}, {"etcd-password", o.EtcdPassword.Reveal()}},
		{{"etcd-keyfile", o.EtcdKeyFile}, {"etcd-certfile", o.EtcdCertFile}},
	} {
		for i, a := range pair {
			if b := pair[1-i]; a.value != "" && b.value == "" {
				return fmt.Errorf("%s is set and --%s is not: expected both or neither", o.Source(a.name), b.name)
			}
		}
	}

	files := []given{
		{"etcd-keyfile", o.EtcdKeyFile}, {"etcd-certfile", o.EtcdCertFile}, {"etcd-cafile", o.EtcdCAFile},
		{"kubeconfig-file", o.KubeconfigFile},
	}
	if o.KubeSubnetMgr {
		files = append(files, given{"net-config-path", o.NetConfigPath})
	}

	for _, f := range files {
		if err := o.readable(f); err != nil {
			return err
		}
	}

	if err := o.checkNetworks(); err != nil {
		return err
	}

	if slices.Contains(o.Iface, "node-ip") && !o.KubeSubnetMgr {
		return fmt.Errorf("%s node-ip needs %s: with etcd a host has no Node, expected a name or an address", o.Source("iface"), o.Source("kube-subnet-mgr"))
	}
	if o.LocationLabel != "" && o.Location != "" {
		return fmt.Errorf("%s and %s are both set: expected one", o.Source("location"), o.Source("location-label"))
	}
	if o.LocationLabel != "" && !o.KubeSubnetMgr {
		return fmt.Errorf("%s needs %s: with etcd, expected %s", o.Source("location-label"), o.Source("kube-subnet-mgr"), o.Source("location"))
	}

	files = []given{{"subnet-file", o.SubnetFile}, {"status-socket", o.StatusSocket}}
	if err := cmp.Or(o.expect(false, files...), o.expect(true, given{"state-dir", o.StateDir})); err != nil {
		return err
	}

	if o.LogFormat == logJSON && o.LogBacktraceAt != "" {
		return fmt.Errorf("%s works with text logs only: expected %s text",
			o.Source("log_backtrace_at"), o.Source("log-format"))
	}

	tls := o.EtcdCertFile != "" || o.EtcdCAFile != ""
	if tls && !o.KubeSubnetMgr && scheme(o.EtcdEndpoints[0]) == "http" {
		o.Warnings = append(o.Warnings, "the TLS files for etcd are not used: "+
			o.Source("etcd-endpoints")+" contains http endpoints")
	}
	return nil
}

func (o *Options) checkNetworks() error {
	if !o.Several() {
		return nil
	}

	flag := "watch-networks"
	if len(o.Networks) > 0 {
		flag = "networks"
	}

	if o.KubeSubnetMgr {
		return fmt.Errorf("%s needs etcd: in Kubernetes a Node has one podCIDR for each address family, so there is one network", o.Source(flag))
	}
	if o.ExitOnConfigChange {
		return fmt.Errorf("%s is for one network: with %s changes of networks are followed", o.Source("exit-on-config-change"), o.Source(flag))
	}
	if !o.FollowConfig {
		return fmt.Errorf("%s is for one network: with %s changes of networks are followed", o.Source("follow-config"), o.Source(flag))
	}
	return o.expect(true, given{"subnet-dir", o.SubnetDir})
}

// expect returns an error if one of these paths exists and is not a directory, or not a file.
func (o *Options) expect(directory bool, all ...given) error {
	for _, f := range all {
		info, err := os.Stat(f.value)
		switch {
		case err != nil, info.IsDir() == directory:
		case directory:
			return fmt.Errorf("%s %q is a file: expected a directory", o.Source(f.name), f.value)
		default:
			return fmt.Errorf("%s %q is a directory: expected a file", o.Source(f.name), f.value)
		}
	}
	return nil
}

// readable accepts a file that is not given.
func (o *Options) readable(f given) error {
	if f.value == "" {
		return nil
	}
	if err := o.expect(false, f); err != nil {
		return err
	}
	if err := unix.Access(f.value, unix.R_OK); err != nil { // opening a pipe may block
		return fmt.Errorf("%s %q cannot be read: %w", o.Source(f.name), f.value, err)
	}
	return nil
}
