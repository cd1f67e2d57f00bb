// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// Attached is something at a device that may drop packets by rules that are not read.
type Attached struct{ Dev, What string }

// attached returns what may be the reason why peers do not answer, if none of others is. Hosts that work, such as those
// with Cilium, also have filters and programs at their devices, so these alone are no problem.
func (h Facts) attached(others []Finding) (found []Finding) {
	silent := slices.DeleteFunc(slices.Clone(h.Silent), func(s netip.Prefix) bool {
		return slices.ContainsFunc(others, func(f Finding) bool { return f.Concerns(s) })
	})
	if len(silent) == 0 {
		return nil
	}

	for _, a := range h.Attached {
		found = append(found, Finding{
			Problem: fmt.Sprintf("%s at %s may drop packets: no answer from %s", a.What, a.Dev, oneline.List(oneline.Strings(silent), ", ")),
			Fix:     fmt.Sprintf("tc -s qdisc show dev %[1]s; tc filter show dev %[1]s ingress; tc filter show dev %[1]s egress; bpftool net show dev %[1]s", a.Dev),
			Serious: true, Subnets: silent,
		})
	}
	return found
}
