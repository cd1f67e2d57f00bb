// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// program is the first word of the description of each route of flanneld. clusterField precedes the name of the
// cluster in it.
const (
	program      = "flanneld"
	clusterField = "cluster="
)

// Describe returns the description of a route to dst, for clouds whose routes have descriptions. By this mark,
// hosts of other clusters see that the route is not theirs. The description also names the network, for operators.
func Describe(cluster string, networks []netip.Prefix, dst netip.Prefix) string {
	inside := dst
	for _, n := range networks {
		if prefix.Contains(n, dst) {
			inside = n
		}
	}
	return program + " " + clusterField + cluster + " network=" + inside.String()
}

// MarkedBy returns the cluster of a description that Describe has made. The cluster is empty if it has no name. ok
// is false if the description is not a mark of flanneld.
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

// ForeignMark returns the value of Route.Foreign for a route with a description. It is empty if OfOther is false.
func ForeignMark(description, cluster string) string {
	if !OfOther(description, cluster) {
		return ""
	}
	return fmt.Sprintf("which belongs to another cluster by its description %q", oneline.Collapse(description))
}

// OfOther reports whether a description is the mark of another cluster. The mark of a cluster without a name does
// not count.
func OfOther(description, cluster string) bool {
	by, _ := MarkedBy(description)
	return by != "" && by != cluster
}
