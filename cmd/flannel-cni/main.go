// SPDX-License-Identifier: Apache-2.0

// Flannel-cni is the CNI plugin "flannel". It generates the configuration of another
// plugin, usually bridge, from the host's subnet file, and calls that plugin.
package main

import (
	"github.com/containernetworking/cni/pkg/skel"
	cni "github.com/containernetworking/cni/pkg/version"

	"github.com/flanneld/flanneld/pkg/base/version"
)

func main() {
	skel.PluginMainFuncs(skel.CNIFuncs{
		Add: command(add), Check: command(check), Del: command(del), GC: command(collect), Status: command(status),
	}, cni.All, "CNI plugin flannel "+version.String())
}
