// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
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
				wait: freely,
				ping: func(context.Context, netip.Addr, ping.Path, time.Duration) (time.Duration, error) {
					return time.Millisecond, send()
				},
				knock: func(context.Context, netip.Addr, int) error { return send() },
			}
			v := s.diagnose(ctx, path(1), Network{MTU: 1450, Devices: true})
			if v.OK || v.Broken != Unknown || v.Largest != 0 || !strings.HasPrefix(v.Advice, "the check was interrupted") {
				t.Errorf("%+v, want an unknown part of an interrupted check", v)
			}
		})
	}
}

// TestDiagnosisWithoutSockets expects no verdict about a peer if this host cannot open sockets.
func TestDiagnosisWithoutSockets(t *testing.T) {
	failed := fmt.Errorf("%w: too many open files", ping.ErrNoSocket)
	s := sender{
		wait:  freely,
		ping:  func(context.Context, netip.Addr, ping.Path, time.Duration) (time.Duration, error) { return 0, failed },
		knock: func(context.Context, netip.Addr, int) error { return failed },
	}
	v := s.diagnose(t.Context(), path(1), Network{MTU: 1450, Devices: true})
	if v.OK || v.Broken != Unknown || !strings.HasPrefix(v.Advice, "this host cannot send checks (") {
		t.Errorf("%+v, want an unknown part of a path that was not checked", v)
	}
}

// TestDiagnosis tells from the packets that pass which part of a path is broken.
func TestDiagnosis(t *testing.T) {
	silence := errors.New("no answer")
	none := netip.Addr{}
	to := path(1)
	devices := Network{BackendType: "vxlan", MTU: 1450, Devices: true, Ports: []int{8472}}
	narrow, wide := devices, devices
	narrow.PathMTU = func(netip.Prefix) int { return 1300 }
	wide.PathMTU = func(netip.Prefix) int { return 9000 }
	type passes struct {
		host  bool  // pings to the host
		most  int   // size of the largest ping in the network
		tcp   error // of a TCP connection in the network
		first bool  // the first packet to an address is answered
		// forwards is the host that tells of packets that it cannot forward; invalid if none does.
		forwards netip.Addr
	}
	for _, tt := range []struct {
		name    string
		network Network
		passes  passes
		broken  Part // empty if the path works
		largest int
		advice  string // part of it
	}{
		{"all", devices, passes{true, 1450, syscall.ECONNREFUSED, true, none}, "", 0, ""},
		{"all, and a TCP connection opens", devices, passes{true, 1450, nil, true, none}, "", 0, ""},
		{"all but the first packets", devices, passes{true, 1450, syscall.ECONNREFUSED, false, none}, "", 0, ""},
		{"all but pings to the host", devices, passes{false, 1450, syscall.ECONNREFUSED, true, none}, "", 0, ""},
		{"nothing", devices, passes{false, 0, silence, true, none}, Underlay, 0, "192.168.0.1 does not answer either"},
		{"nothing, without devices", Network{MTU: 1500}, passes{false, 0, silence, true, none}, Underlay, 0, "192.168.0.1 does not answer either"},
		{"only pings to the host", devices, passes{true, 0, silence, true, none}, Tunnel, 0, "a firewall drops the packets of the backend (vxlan: UDP 8472)"},
		{"only pings to the host, without devices", Network{MTU: 1500}, passes{true, 0, silence, true, none}, Unknown, 0, "the host answers, 10.0.1.1 does not"},
		{"a router answers TCP", devices, passes{true, 0, syscall.EHOSTUNREACH, true, none}, Tunnel, 0, "its end of the network does not"},
		{"TCP but no pings", devices, passes{true, 0, syscall.ECONNREFUSED, true, none}, "", 0, "10.0.1.0 answers TCP but no pings"},
		{"small packets", devices, passes{true, 1300, syscall.ECONNREFUSED, true, none}, MTU, 1300, "packets of up to 1300 bytes pass, those of 1450 bytes do not"},
		{"small packets, without devices", Network{MTU: 1450}, passes{true, 1300, syscall.ECONNREFUSED, true, none}, MTU, 1300, "packets of up to 1300 bytes pass"},
		{"a TCP connection but no pings", devices, passes{true, 0, nil, true, none}, "", 0, "10.0.1.0 answers TCP but no pings"},
		{"small packets, on a path known for it", narrow, passes{true, 1300, syscall.ECONNREFUSED, true, none}, "", 0, ""},
		{"less than the path is known for", wide, passes{true, 1300, syscall.ECONNREFUSED, true, none}, MTU, 1300, "those of 1450 bytes do not"},
		{"pings but no TCP", devices, passes{true, 1450, silence, true, none}, Checksum, 0, "pings pass, TCP does not"},
		{"pings, and a rule of this host drops TCP", devices, passes{true, 1450, syscall.EINVAL, true, none}, Tunnel, 0, "this host itself drops packets to 10.0.1.0"},
		{"only pings to the host, which forwards", devices, passes{true, 0, silence, true, to.Subnet.Addr()}, Unknown, 0, "10.0.1.0 does not answer, but its host gets packets"},
		{"only pings to the host, which forwards, without devices", Network{MTU: 1500}, passes{true, 0, silence, true, to.PublicIP}, Unknown, 0, "10.0.1.1 does not answer, but its host gets packets"},
		{"only pings to the host, and a router in between", devices, passes{true, 0, silence, true, netip.MustParseAddr("192.0.2.99")}, Tunnel, 0, "its end of the network does not"},
		{"pings but no TCP to the host, which forwards", devices, passes{true, 1450, silence, true, to.Subnet.Addr()}, Unknown, 0, "10.0.1.0 does not answer, but its host gets packets"},
		{"pings, and a firewall refuses TCP", devices, passes{true, 1450, syscall.EACCES, true, none}, "", 0, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tried := map[netip.Addr]bool{}
			s := sender{
				wait: freely,
				ping: func(_ context.Context, dst netip.Addr, way ping.Path, _ time.Duration) (time.Duration, error) {
					if way.Hops == 1 && tt.passes.forwards.IsValid() {
						return 0, ping.ExpiredError{At: tt.passes.forwards}
					}
					again := tried[dst]
					tried[dst] = true
					if dst == to.PublicIP && !tt.passes.host || dst != to.PublicIP && way.Size > tt.passes.most || !again && !tt.passes.first {
						return 0, silence
					}
					return time.Millisecond, nil
				},
				knock: func(_ context.Context, _ netip.Addr, hops int) error {
					if hops == 1 && tt.passes.forwards.IsValid() {
						return syscall.EHOSTUNREACH
					}
					return tt.passes.tcp
				},
			}
			v := s.diagnose(t.Context(), to, tt.network)
			if v.OK != (tt.broken == "") || v.Broken != tt.broken || v.Largest != tt.largest || !strings.Contains(v.Advice, tt.advice) || tt.advice == "" && v.Advice != "" {
				t.Errorf("%+v, want broken part %q, largest packet %d, advice with %q", v, tt.broken, tt.largest, tt.advice)
			}
			if answered := tt.passes.most > 0; (v.RTT > 0) != answered {
				t.Errorf("round trip %v ms, although it is %v that a ping was answered", v.RTT, answered)
			}
		})
	}
}

// TestRejectedOnTheWay checks that a firewall on the way, which rejects pings and TCP, does not look like the answer of a
// host that only rejects pings.
func TestRejectedOnTheWay(t *testing.T) {
	dst := netip.MustParseAddr("10.5.7.1")
	for at, ok := range map[string]bool{"10.5.7.1": true, "10.5.49.1": false} {
		s := sender{
			wait: freely,
			ping: func(context.Context, netip.Addr, ping.Path, time.Duration) (time.Duration, error) {
				return 0, ping.UnreachableError{At: netip.MustParseAddr(at), Code: 3}
			},
			knock: func(context.Context, netip.Addr, int) error { return syscall.ECONNREFUSED },
		}
		v, err := s.reach(t.Context(), dst, 1450)
		if v.OK != ok || ok != (err == nil) || !ok && v.Broken != Tunnel {
			t.Errorf("%s rejects pings: %+v, %v, want ok %v", at, v, err, ok)
		}
	}
}

func TestLocal(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1": true, "192.0.2.1": false} {
		if got := isLocal(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s is local: %v, want %v", addr, got, want)
		}
	}
}
