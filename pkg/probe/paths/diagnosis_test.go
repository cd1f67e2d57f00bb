// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/probe/ping"
)

// TestInterruptedDiagnosis ends ctx at each packet of a diagnosis. The verdict must not name a part as broken,
// because only the end of ctx has kept the answer away.
func TestInterruptedDiagnosis(t *testing.T) {
	const packets = 4 // to the host, to its end of the network, of the full MTU, and over TCP
	for last := range packets {
		t.Run(fmt.Sprint(last), func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			sent := 0
			send := func() error {
				if sent == last {
					cancel()
				}
				sent++
				return ctx.Err()
			}
			s := sender{
				ping: func(context.Context, netip.Addr, ping.Options) (time.Duration, error) {
					return time.Millisecond, send()
				},
				knock: func(context.Context, netip.Addr) error { return send() },
			}
			v := s.diagnose(ctx, path(1), Network{MTU: 1450, Devices: true})
			if v.OK || v.Broken != Unknown || v.Largest != 0 {
				t.Errorf("%+v, want an unknown part", v)
			}
		})
	}
}
