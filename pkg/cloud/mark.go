// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"net/netip"
	"strings"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// program begins the description of each route of flanneld, and clusterField the name of its cluster there.
const (
	program      = "flanneld"
	clusterField = "cluster="
)

// Describe returns the description of a route to dst, for clouds whose routes have one. It is the mark by which
// hosts of other clusters know the route. The network is for people.
func Describe(cluster string, networks []netip.Prefix, dst netip.Prefix) string {
	inside := dst
	for _, n := range networks {
		if prefix.Contains(n, dst) {
			inside = n
		}
	}
	return program + " " + clusterField + cluster + " network=" + inside.String()
}

// MarkedBy returns the cluster whose mark a description is. It is empty if that cluster has no name. ok is
// false if the description is no mark.
func MarkedBy(description string) (cluster string, ok bool) {
	fields := strings.Fields(description)
	if len(fields) == 0 || fields[0] != program {
		return "", false
	}
	for _, f := range fields[1:] {
		if cluster, ok = strings.CutPrefix(f, clusterField); ok {
			return cluster, true
		}
	}
	return "", false
}

// OfOther reports whether a description is the mark of another cluster, which has a name.
func OfOther(description, cluster string) bool {
	by, _ := MarkedBy(description)
	return by != "" && by != cluster
}
