// SPDX-License-Identifier: Apache-2.0

package kube

import "github.com/flanneld/flanneld/subnet"

// Config says where the API server is and how to use it.
type Config struct {
	// APIURL and Kubeconfig, which is a path, say how to reach the API server. If both are empty,
	// the manager uses the service account of the pod.
	APIURL, Kubeconfig string
	// Context is the context in the kubeconfig, and ServiceAccount the folder with the token and the CA of
	// another pod, with its APIURL. Both are for the functions in admin.go and daemons.go only, and may be
	// empty. If all four are empty, these functions look for a kubeconfig like kubectl.
	Context, ServiceAccount string
	// NodeName is the name of this host's Node. If it is empty, the manager reads it from the pod that
	// PodName and PodNamespace name.
	NodeName, PodName, PodNamespace string
	// NetConfig is the path of the file with the network configuration.
	NetConfig string
	// AnnotationPrefix is the argument of annotation.Prefix. Empty means
	// annotation.DefaultPrefix.
	AnnotationPrefix string
	// LocationLabel is the key of the label of this host's Node whose value is its location. If it is
	// empty, Location must not be called.
	LocationLabel string
	// Own and Known are the last known state. If the store is the same and still has the revision
	// of that state, the manager does not list the Nodes at the start, but reads only the changes
	// since then. Otherwise it first lists only the metadata of the Nodes, because it knows most
	// podCIDRs. Both may be zero.
	Own   subnet.Lease
	Known subnet.LedgerState
	// Ready is closed by the caller when the node's network works. The manager then sets the
	// condition NetworkUnavailable to False, and keeps it so. If Ready is nil, it does not set the
	// condition.
	Ready <-chan struct{}
	// OnRepaired is called if the audit finds that Known was wrong, with the number of Nodes whose
	// leases were different in the store. It must not block, and must not call the manager. It may
	// be nil, like OnStatus.
	OnRepaired func(leases int)
	// OnStatus is called with nil at the first success and when the API becomes usable again. It is
	// called with the reason when the API becomes unusable, and for each new kind of failure after
	// that. It must not block, and must not call the manager.
	OnStatus func(error)

	operator bool // see operatorConfig
}
