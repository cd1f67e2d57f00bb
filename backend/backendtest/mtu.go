// SPDX-License-Identifier: Apache-2.0

package backendtest

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// MTU describes how the MTU of a network depends on the MTU of the link between hosts.
type MTU struct {
	New backend.Factory
	// Overhead is the number of bytes that the tunnel adds to a packet of a family.
	Overhead map[prefix.Family]int
	// Key is set if the Backend object may have the key MTU, which replaces a larger MTU of the link.
	Key bool
}

// Run checks the MTU for each combination of families: with common links, with the
// smallest link that can carry the families, and with a smaller one, which the backend
// must refuse. If Key is set, Run also checks values of the key MTU that are larger than the
// MTU of the link, smaller, and too small.
func (m MTU) Run(t *testing.T) {
	const large = 9000
	for _, families := range [][]prefix.Family{{prefix.IPv4}, {prefix.IPv6}, {prefix.IPv4, prefix.IPv6}} {
		overhead := 0
		smallest := 0
		for _, f := range families {
			overhead, smallest = max(overhead, m.Overhead[f]), max(smallest, m.Overhead[f]+f.MinMTU())
		}

		cases := []struct {
			link, key int // MTU of the link, and the value of the key MTU; 0 if it is not in the configuration
			fits      int // the smaller one of link and key, or 0 if the backend must refuse it
		}{
			{link: 1500, fits: 1500}, {link: large, fits: large}, {link: smallest, fits: smallest}, {link: smallest - 1},
		}
		if m.Key {
			cases = append(cases, []struct{ link, key, fits int }{
				{1500, large, 1500}, {large, 1400, 1400}, {large, smallest, smallest}, {large, smallest - 1, 0},
			}...)
		}

		for _, tc := range cases {
			raw := `{}`
			name := fmt.Sprintf("%v on a link with MTU %d", families, tc.link)
			if tc.key != 0 {
				raw, name = fmt.Sprintf(`{"MTU":%d}`, tc.key), name+fmt.Sprintf(", configured %d", tc.key)
			}

			b, _, err := m.New(json.RawMessage(raw), Env(tc.link, families...))
			least := families[len(families)-1].MinMTU()
			switch {
			case tc.fits == 0 && (err == nil || !strings.Contains(err.Error(), fmt.Sprintf("leaves %d bytes", least-1)) || !strings.Contains(err.Error(), fmt.Sprint(least))):
				t.Errorf("%s: error %v, want one that says how many bytes are left and needed", name, err)
			case tc.fits != 0 && err != nil:
				t.Errorf("%s: error %v, want none", name, err)
			case tc.fits != 0 && b.Describe().MTU != tc.fits-overhead:
				t.Errorf("%s: MTU %d, want %d", name, b.Describe().MTU, tc.fits-overhead)
			}
		}
	}
}
