// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
)

// member is the cloud as one host of a fleet sees it.
type member struct {
	*cloudtest.Memory
	self string
}

func (m member) Join(context.Context) (string, error) { return m.self, nil }

//stages:rest it takes a minute
func TestMonth(t *testing.T) {
	for name, renamed := range map[string]bool{"the same names": false, "new names, a full table": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &cloudtest.Memory{Hosts: map[string][]netip.Addr{}, Tabs: []cloud.Table{{ID: "table-1", Own: true}}}
			target := func(number int) string { return fmt.Sprintf("host-%d", number) }
			cloudtest.Live(t, cloudtest.Fleet{
				Start: func(_ *testing.T, _, number int, address netip.Addr) cloud.Cloud {
					m.Do(func() { m.Hosts[target(number)] = []netip.Addr{address} })
					return member{m, target(number)}
				},
				End:      func(number int) { m.Do(func() { delete(m.Hosts, target(number)) }) },
				SetQuota: func(n int) { m.Quota = n },
				Resync:   4 * resync,
				Routes: func() (n int) {
					m.Do(func() { n = len(m.Tabs[0].Routes) })
					return n
				},
			}, 30, renamed)
		})
	}
}
