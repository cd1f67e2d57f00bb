// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/subnet"
)

// nameServer answers lookups in a test.
type nameServer struct {
	mu    sync.Mutex
	addrs map[string]string // addresses by name, separated by blanks; without any the lookup fails
	hangs bool
	asked []string
	at    time.Time // when the last lookup began
	busy  int       // lookups at this moment
	most  int       // largest busy
}

func (s *nameServer) lookup(ctx context.Context, host string) (addrs []netip.Addr, err error) {
	s.mu.Lock()
	s.asked, s.at, s.busy = append(s.asked, host), time.Now(), s.busy+1
	s.most = max(s.most, s.busy)
	text, hangs := s.addrs[host], s.hangs
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.busy--
		s.mu.Unlock()
	}()
	if hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for a := range strings.FieldsSeq(text) {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	if len(addrs) == 0 {
		return nil, errors.New("no such host")
	}
	return addrs, nil
}

func (s *nameServer) set(host, addrs string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addrs[host] = addrs
}

func (s *nameServer) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.asked)
}

// TestLookups checks that a lookup wants a pass only if it finds other addresses than the known ones, about
// once a second, and that each lookup is answered.
func TestLookups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &nameServer{addrs: map[string]string{"known": "203.0.113.9 203.0.113.1"}}
		n := backend.NewNotifier(t.Context())
		defer n.Close()
		l := newLookups(n, s.lookup)
		const hosts = 100
		l.start("known", []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.9")})
		l.start("gone", nil)
		<-time.After(time.Minute)
		synctest.Wait()
		if answers := l.take(); len(answers) != 2 || len(answers["known"]) != 2 || len(answers["gone"]) != 0 {
			t.Errorf("answers %v, want two addresses of one name and none of the other", answers)
		}
		select {
		case <-n.Changed():
			t.Error("a pass is wanted although nothing has changed")
		default:
		}

		for i := range hosts {
			s.set(fmt.Sprint("node", i), "203.0.113.1")
			l.start(fmt.Sprint("node", i), nil)
		}
		passes, answers := 0, 0
		for end := time.After(hosts*time.Second/lookupRate + 2*foundPause); end != nil; {
			select {
			case <-n.Changed():
				passes++
				answers += len(l.take())
			case <-end:
				end = nil
			}
		}
		if passes < 2 || passes > 12 || answers != hosts {
			t.Errorf("%d passes with %d answers for %d names, want a pass each second", passes, answers, hosts)
		}
	})
}

// TestManyNames checks that the number of lookups at the same time is limited, and that each
// lookup ends, if the server does not answer.
func TestManyNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &nameServer{hangs: true}
		n := backend.NewNotifier(t.Context())
		l := newLookups(n, s.lookup)
		begin := time.Now()
		const hosts = 100
		for i := range hosts {
			l.start(fmt.Sprint("node", i), nil)
		}
		<-time.After(10 * time.Minute)
		if s.count() != hosts || s.most != lookupsAtOnce || s.at.Sub(begin) > hosts/lookupsAtOnce*lookupTimeout {
			t.Errorf("%d lookups, at most %d at once, the last one after %s, want %d, %d and at most %s", s.count(), s.most, s.at.Sub(begin), hosts, lookupsAtOnce, hosts/lookupsAtOnce*lookupTimeout)
		}
		if n := len(l.take()); n != hosts {
			t.Errorf("%d answers, want %d", n, hosts)
		}
		l.start("node0", nil)
		n.Close()
	})
}

// withName returns the lease of host i, which listens on port 7, with name as its PublicEndpoint.
func withName(t *testing.T, i byte, name string) *subnet.Lease {
	t.Helper()
	l := host(t, i, int(i))
	for j := range l.Endpoints {
		l.Endpoints[j].Data = encodeData(leaseData{PublicKey: text(key(i)), Port: 7, PublicEndpoint: name})
	}
	return l
}

// TestTryTheNameOfAPeer collects the endpoints that a host tries for a peer without a session.
// Besides the endpoint of the lease, these must be the usable IPv4 addresses of the peer's name,
// and no others. Then a session begins on each device: the endpoint must stay, and no
// lookup may follow after the pass that notices the session.
func TestTryTheNameOfAPeer(t *testing.T) {
	for name, want := range map[string][]string{
		"node2.example.org":      {"203.0.113.2:7", "203.0.113.3:7"},
		"node2.example.org:4500": {"203.0.113.2:4500", "203.0.113.3:4500"},
		"192.0.2.2:4500":         {"192.0.2.2:4500"},
		"inside.example.org":     nil,
		"gone.example.org":       nil,
		"not a name":             nil,
		"":                       nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newNATHost(t, host(t, 1, 1))
				s := &nameServer{addrs: map[string]string{
					"node2.example.org": "203.0.113.2 203.0.113.3 2001:db8::2", "192.0.2.2": "192.0.2.2", "inside.example.org": "10.5.2.2 127.0.0.1 192.168.77.1",
				}}
				h.lookups.lookup = s.lookup
				l := withName(t, 2, name)
				tried := map[string]bool{}
				for range 40 {
					h.sync(t, 10*time.Second, l)
					synctest.Wait()
					<-time.After(10 * time.Second) // lookups have the clock of the process
					h.session(9, "192.0.2.9:9")
					tried[h.endpoint(2)] = true
				}
				delete(tried, "192.168.77.2:7")
				if got := slices.Sorted(maps.Keys(tried)); !slices.Equal(got, want) {
					t.Errorf("tried %v besides the endpoint of the lease, want %v", got, want)
				}
				asked := 0
				for i := range 40 {
					h.session(2, "203.0.113.77:7")
					h.sessionOn("flannel-wg-v6", 2, "[2001:db8::77]:7")
					h.sync(t, 10*time.Second, l)
					<-time.After(10 * time.Second)
					if i == 0 { // the pass that notices the session may still resolve the name
						asked = s.count()
					}
				}
				if got := h.endpoint(2); got != "203.0.113.77:7" || s.count() != asked {
					t.Errorf("with a session the endpoint is %s, and there were %d lookups after the pass that noticed it, want none", got, s.count()-asked)
				}
			})
		})
	}
}

// TestNamesOfNewPeers checks that the name of a peer is resolved when the peer is added, and not
// when only the port of its PublicEndpoint changes.
func TestNamesOfNewPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newNATHost(t, host(t, 1, 1))
		s := &nameServer{}
		h.lookups.lookup = s.lookup
		two, three := withName(t, 2, "node2"), withName(t, 3, "node3")
		moved := withName(t, 3, "node3:9")
		for _, set := range []backend.Set{set(nil, two), set([]string{"host3"}, two, three), set([]string{"host3"}, two, moved)} {
			if _, err := h.Sync(t.Context(), set); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		if want := []string{"node2", "node3"}; !slices.Equal(s.asked, want) {
			t.Errorf("resolved %q, want %q", s.asked, want)
		}
	})
}

// TestPublishTheNameOfThisHost checks that the claim of a host with a name contains that name,
// in each family.
func TestPublishTheNameOfThisHost(t *testing.T) {
	b := backendFor(t, `{}`)
	b.env.PublicEndpoint = endpoint.Named{Host: "node1.example.org"}
	b.env.StateDir = t.TempDir()
	claim, err := b.Claim(t.Context(), subnet.Claim{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range claim.Endpoints {
		var d leaseData
		if err := json.Unmarshal(e.Data, &d); err != nil || d.PublicEndpoint != "node1.example.org" || d.PublicKey == "" {
			t.Errorf("data %s, %v, want the name and the key", e.Data, err)
		}
	}
}

// TestCheckPublicEndpoint checks that a name with a port is refused if the network has two
// devices, because each device has a port of its own.
func TestCheckPublicEndpoint(t *testing.T) {
	for _, tt := range []struct{ raw, name, err string }{
		{`{}`, "node1", ""},
		{`{}`, "node1:7", `it has a port, but the network has a device with a port of its own for each family: expected a name alone, or another Backend.Mode than "separate"`},
		{`{"Mode":"auto"}`, "node1:7", ""},
	} {
		e, err := endpoint.Parse(tt.name)
		if err != nil {
			t.Fatal(err)
		}
		err = backend.CheckPublicEndpoint(backendFor(t, tt.raw), Type, e)
		if got := fmt.Sprint(err); got != tt.err && (err != nil || tt.err != "") {
			t.Errorf("%s with %s: error %q, want %q", tt.name, tt.raw, got, tt.err)
		}
	}
}
