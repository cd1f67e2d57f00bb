// Flannel-cni is the CNI plugin "flannel": it makes the configuration of
// another plugin, usually bridge, from the host's subnet file and leaves the
// rest to that.
package main

import (
	"github.com/containernetworking/cni/pkg/skel"
	cni "github.com/containernetworking/cni/pkg/version"

	"flanneld/pkg/version"
)

func main() {
	skel.PluginMainFuncs(skel.CNIFuncs{
		Add: add, Check: check, Del: del, GC: collect, Status: status,
	}, cni.All, "CNI plugin flannel "+version.String())
}
