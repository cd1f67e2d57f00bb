// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"os"
	"reflect"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// restFactor is how much longer the rules of a family are left alone than reading them has taken of
// CPU time. The kernel's own iptables announces no change, so its rules have to be read again and
// again. Parsing them takes about as long as iptables-save, and there are two families, so all of that
// takes 0.3 % of a CPU at most.
const restFactor = 1500

// trusted is a table that was found in the kernel, and counts as unchanged for some time.
type trusted struct {
	wanted firewall.Table
	until  time.Time
}

func (t trusted) rests(wanted firewall.Table) bool {
	return time.Now().Before(t.until) && reflect.DeepEqual(t.wanted, wanted)
}

// legacyTables returns the tables of the kernel's own iptables in the network namespace of this thread.
func legacyTables(f prefix.Family) []string {
	file := map[prefix.Family]string{prefix.IPv4: "ip_tables_names", prefix.IPv6: "ip6_tables_names"}[f]
	names, _ := os.ReadFile("/proc/thread-self/net/" + file) // the file exists if the module is loaded
	return strings.Fields(string(names))
}
