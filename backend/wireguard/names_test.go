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
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/endpoint"
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

// TestResolver checks the known addresses of a name and the number of lookups, mainly while the
// caller asks for the name all the time.
func TestResolver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &nameServer{addrs: map[string]string{"node": "203.0.113.9 203.0.113.1 2001:db8::1 203.0.113.9"}}
		var found atomic.Int32
		r := newResolver(s.lookup, func() { found.Add(1) })
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { r.run(ctx) })
		defer running.Wait()
		defer cancel()
		expect := func(wantFound int32, want ...string) {
			t.Helper()
			synctest.Wait()
			var got []string
			for _, a := range r.addrs("node") {
				got = append(got, a.String())
			}
			if !slices.Equal(got, want) || found.Load() != wantFound {
				t.Errorf("addresses %v after %d changes, want %v after %d", got, found.Load(), want, wantFound)
			}
		}
		wait := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); {
				r.addrs("node")
				<-time.After(time.Second)
			}
		}

		expect(0) // addrs does not wait for the answer
		expect(1, "203.0.113.1", "203.0.113.9", "2001:db8::1")
		s.set("node", "203.0.113.9 2001:db8::1 203.0.113.1") // the same in another order
		wait(2 * leastLookupPause)
		expect(1, "203.0.113.1", "203.0.113.9", "2001:db8::1")
		s.set("node", "203.0.113.2")
		wait(5 * time.Minute)
		expect(2, "203.0.113.2")
		s.set("node", "") // the last good answer stays
		before := s.count()
		wait(time.Hour)
		expect(2, "203.0.113.2")
		if n := s.count() - before; n < 5 || n > 9 {
			t.Errorf("%d lookups of a name in an hour, want one in about 10 minutes", n)
		}

		// If the name was not asked for for a long time, as during a session, the next request resolves it
		// at once, and requests after leastLookupPause resolve it again.
		s.set("node", "203.0.113.3")
		<-time.After(time.Hour)
		r.addrs("node")
		expect(3, "203.0.113.3")
		s.set("node", "203.0.113.4")
		wait(leastLookupPause * 3 / 2)
		expect(4, "203.0.113.4")

		// Many addresses of one family leave room for the other.
		s.set("node", "10.0.0.5 10.0.0.4 10.0.0.3 10.0.0.2 10.0.0.1 2001:db8::5 2001:db8::4 2001:db8::3 2001:db8::2 2001:db8::1")
		<-time.After(time.Hour)
		r.addrs("node")
		expect(5, "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8::4")

		r.retain(func(string) bool { return false })
		if len(r.names) != 0 {
			t.Errorf("names %v remain, want none", slices.Collect(maps.Keys(r.names)))
		}
	})
}

// TestFoundTogether checks that found is called about once a second while the addresses of many
// names are found one after the other. Each call makes the network read its devices.
func TestFoundTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &nameServer{addrs: map[string]string{}}
		var found atomic.Int32
		r := newResolver(s.lookup, func() { found.Add(1) })
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		for i := range 100 {
			s.set(fmt.Sprint("node", i), "203.0.113.1")
			r.addrs(fmt.Sprint("node", i))
		}
		running.Go(func() { r.run(ctx) })
		<-time.After(100*time.Second/lookupRate + foundPause)
		synctest.Wait()
		if n := found.Load(); n < 2 || n > 12 {
			t.Errorf("%d readings for 100 names, want one each second", n)
		}
		if a := r.addrs("node99"); len(a) != 1 {
			t.Errorf("addresses %v, want one", a)
		}
	})
}

// TestManyNames checks that the number of lookups at the same time is limited, and that each
// lookup ends, if the server does not answer.
func TestManyNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &nameServer{hangs: true}
		r := newResolver(s.lookup, func() { t.Error("nothing was found") })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			r.run(ctx)
			close(ended)
		}()
		begin := time.Now()
		const hosts = 100
		for i := range hosts {
			r.addrs(fmt.Sprint("node", i))
		}
		<-time.After(10 * time.Minute)
		if s.count() != hosts || s.most != lookups || s.at.Sub(begin) > hosts/lookups*lookupTimeout {
			t.Errorf("%d lookups, at most %d at once, the last one after %s, want %d, %d and at most %s", s.count(), s.most, s.at.Sub(begin), hosts, lookups, hosts/lookups*lookupTimeout)
		}
		r.addrs("node0")
		cancel()
		<-ended
	})
}

// withName returns the lease of host i, which listens on port 7, with name as its PublicEndpoint.
func withName(t *testing.T, i byte, name string) *subnet.Lease {
	t.Helper()
	l := host(t, i, int(i))
	for j := range l.Endpoints {
		data, err := encodeData(leaseData{PublicKey: text(key(i)), Port: 7, PublicEndpoint: name})
		if err != nil {
			t.Fatal(err)
		}
		l.Endpoints[j].Data = data
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
				h.nat.names = newResolver(s.lookup, h.Notify)
				h.Go(h.nat.names.run)
				l := withName(t, 2, name)
				tried := map[string]bool{}
				for range 40 {
					h.sync(t, 10*time.Second, l)
					synctest.Wait()
					<-time.After(10 * time.Second) // the resolver has the clock of the process
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
		h.nat.names = newResolver(s.lookup, h.Notify)
		h.Go(h.nat.names.run)
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
