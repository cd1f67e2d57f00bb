// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/alivpc"
	"github.com/flanneld/flanneld/backend/alloc"
	"github.com/flanneld/flanneld/backend/awsvpc"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/gce"
	"github.com/flanneld/flanneld/backend/hostgw"
	"github.com/flanneld/flanneld/backend/ipip"
	"github.com/flanneld/flanneld/backend/location"
	"github.com/flanneld/flanneld/backend/tencentvpc"
	"github.com/flanneld/flanneld/backend/udp"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/backend/wireguard"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/subnet"
)

// newEnv returns the environment of a host whose network migrates between two backends. from and to
// are Backend objects in JSON.
func newEnv(k *dataplanetest.Kernel, from, to string) backend.Env {
	env := backendtest.Env(1500, prefix.IPv4)
	env.Kernel, env.Resync = k, time.Hour
	typeOf := func(raw string) string {
		var b struct{ Type string }
		_ = json.Unmarshal([]byte(raw), &b)
		return b.Type
	}
	env.Config.BackendType, env.Config.Backend = typeOf(from), json.RawMessage(from)
	env.Config.NextType, env.Config.NextBackend = typeOf(to), json.RawMessage(to)
	return env
}

func newBackend(t testing.TB, env backend.Env) (backend.Backend, error) {
	t.Helper()
	r, err := backend.NewRegistry(
		backend.Entry{Type: alloc.Type, Factory: alloc.New}, backend.Entry{Type: awsvpc.Type, Factory: awsvpc.New},
		backend.Entry{Type: alivpc.Type, Factory: alivpc.New},
		backend.Entry{Type: gce.Type, Factory: gce.New},
		backend.Entry{Type: tencentvpc.Type, Factory: tencentvpc.New},
		backend.Entry{Type: hostgw.Type, Factory: hostgw.New, Inside: true},
		backend.Entry{Type: udp.Type, Factory: udp.NewHost(udp.Settings{}).New},
		backend.Entry{Type: vxlan.Type, Factory: vxlan.New, Inside: true}, backend.Entry{Type: ipip.Type, Factory: ipip.New},
		backend.Entry{Type: wireguard.Type, Factory: wireguard.NewHost().New},
	)
	if err != nil {
		t.Fatal(err)
	}
	r.Migrate, r.Locate = New, location.New
	b, _, err := r.New(env)
	return b, err
}

const (
	hostGW = `{"Type":"host-gw"}`
	vni1   = `{"Type":"vxlan"}`
	vni7   = `{"Type":"vxlan","VNI":7}`
)

// TestImpossibleMigrations checks that each impossible migration is refused with an error that
// names the reason.
func TestImpossibleMigrations(t *testing.T) {
	for _, tt := range []struct{ from, to, want string }{
		{vni1, `{"Type":"vxlan","Port":4789}`, "both have the device flannel.1"},
		{hostGW, hostGW, "are both host-gw"},
		{vni1, `{"Type":"alloc"}`, "backend alloc"},
		{`{"Type":"alloc"}`, vni1, "backend alloc"},
		{vni1, `{"Type":"aws-vpc"}`, "backend aws-vpc, whose routes are in the VPC"},
		{`{"Type":"aws-vpc"}`, vni1, "backend aws-vpc, whose routes are in the VPC"},
		{vni1, `{"Type":"gce"}`, "backend gce, whose routes are in the VPC"},
		{vni1, `{"Type":"ali-vpc"}`, "backend ali-vpc, whose routes are in the VPC"},
		{vni1, `{"Type":"tencent-vpc"}`, "backend tencent-vpc, whose routes are in the VPC"},
		{vni1, `{"Type":"wireguard","SameLocation":"host-gw"}`, "SameLocation host-gw and NextBackend do not work together"},
		{`{"Type":"wireguard","SameLocation":{"Type":"host-gw"}}`, vni1, "SameLocation host-gw and NextBackend do not work together"},
		{vni1, `{"Type":"wireguard","SameLocation":"vxlan"}`, "both have the device flannel.1"},
		{vni1, `{"Type":"wiregard"}`, `NextBackend: unknown backend type "wiregard"`},
		{vni1, `{"Type":"vxlan","VNI":-1}`, "NextBackend: Backend.VNI is -1"},
	} {
		if _, err := newBackend(t, newEnv(dataplanetest.New(), tt.from, tt.to)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s to %s: error %v, want one with %q", tt.from, tt.to, err, tt.want)
		}
	}
	env := newEnv(dataplanetest.New(), `{"Type":"udp"}`, `{"Type":"udp","Port":7}`)
	env.Network = "blue" // so that the names of the devices are different
	if _, err := newBackend(t, env); err == nil || !strings.Contains(err.Error(), "are both udp") {
		t.Errorf("to another port of udp: error %v, want one that both are udp", err)
	}
}

// TestPortsByType checks that PortsByType names each port at the backend that receives the packets,
// even if that backend is the one inside of a location.
func TestPortsByType(t *testing.T) {
	const located = `{"Type":"wireguard","SameLocation":{"Type":"vxlan","VNI":7}}`
	for _, tt := range [][2]string{{located, hostGW}, {hostGW, located}} {
		b, err := newBackend(t, newEnv(dataplanetest.New(), tt[0], tt[1]))
		if err != nil {
			t.Fatal(err)
		}
		ports := b.Describe().Ports
		if !slices.Equal(ports["wireguard"], []int{51820}) || !slices.Equal(ports["vxlan"], []int{8472}) || len(ports["host-gw"]) > 0 {
			t.Errorf("%s to %s: %v", tt[0], tt[1], ports)
		}
	}
}

// start returns a started network of host 1, which migrates between the Backend objects from and
// to.
func start(t *testing.T, k *dataplanetest.Kernel, from, to string) *network {
	t.Helper()
	b, err := newBackend(t, newEnv(k, from, to))
	if err != nil {
		t.Fatal(err)
	}
	claim, err := b.Claim(t.Context(), subnet.Claim{})
	if err != nil {
		t.Fatal(err)
	}
	claim.Endpoints[0].Subnet = subnetOf(1)
	n, err := b.Start(t.Context(), subnet.Lease{Key: "host1", BackendType: claim.BackendType, NextType: claim.NextType, Endpoints: claim.Endpoints})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	return n.(*network)
}

// TestStartWithoutOwnData expects that a network does not start with a lease that has only data of other backends.
func TestStartWithoutOwnData(t *testing.T) {
	for _, own := range []subnet.Lease{
		{Key: "host1", BackendType: vxlan.Type, Endpoints: []subnet.Endpoint{{Subnet: subnetOf(1), Data: dataOf(1, 9)}}},
		{Key: "host1", BackendType: hostgw.Type, Endpoints: []subnet.Endpoint{{Subnet: subnetOf(1), Data: dataOf(1, 1)}}},
	} {
		b, err := newBackend(t, newEnv(dataplanetest.New(), vni1, vni7))
		if err != nil {
			t.Fatal(err)
		}
		if n, err := b.Start(t.Context(), own); !errors.Is(err, errNoData) {
			t.Errorf("type %s, data %s: error %v, want that the lease has no data", own.BackendType, own.Endpoints[0].Data, err)
			if err == nil {
				_ = n.Close()
			}
		}
	}
}

// dataOf returns the data of host n for a vxlan backend with that VNI.
func dataOf(n, vni int) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"VNI":%d,"VtepMAC":"02:00:00:00:%02x:%02x"}`, vni, vni, n))
}

// lease returns the lease of host n with a backend and, if its type is not empty, a next one.
func lease(n int, kind string, data json.RawMessage, nextKind string, nextData json.RawMessage) *subnet.Lease {
	return &subnet.Lease{Key: fmt.Sprintf("host%d", n), BackendType: kind, NextType: nextKind, Endpoints: []subnet.Endpoint{{
		Subnet: subnetOf(n), PublicIP: netip.AddrFrom4([4]byte{192, 168, 77, byte(n)}), Data: data, NextData: nextData,
	}}}
}

// answer records that the peers with these keys have answered the probes through the next backend.
func answer(n *network, keys ...string) {
	n.prober.mu.Lock()
	defer n.prober.mu.Unlock()
	for _, key := range keys {
		n.prober.peers[key] = &probed{targets: n.targets(key), answered: true}
	}
}

// TestDecisions checks the routes to a peer in the phases of a migration from vxlan to host-gw, and
// back.
func TestDecisions(t *testing.T) {
	before := lease(2, "vxlan", dataOf(2, 1), "", nil)
	both := lease(2, "vxlan", dataOf(2, 1), "host-gw", nil)
	finished := lease(2, "host-gw", nil, "", nil)
	reversed := lease(2, "host-gw", nil, "vxlan", dataOf(2, 1))
	for _, tt := range []struct {
		name  string
		steps []any    // leases of the peer; a bool means that a probe has come back, and nil that the peer goes
		want  []string // devices of its routes after each step, the best one first
	}{
		{"it does not follow", []any{before, true}, []string{"flannel.1", "flannel.1"}},
		{"it follows", []any{before, both, true, finished}, []string{"flannel.1", "flannel.1 eth0", "eth0 flannel.1", "eth0"}},
		{"it finishes before a probe", []any{both, finished}, []string{"flannel.1 eth0", "eth0"}},
		{"it goes back", []any{both, true, before}, []string{"flannel.1 eth0", "eth0 flannel.1", "flannel.1"}},
		{"it goes back and begins again", []any{both, true, before, both, true}, []string{"flannel.1 eth0", "eth0 flannel.1", "flannel.1", "flannel.1 eth0", "eth0 flannel.1"}},
		{"it returns after the end", []any{both, true, finished, both, before}, []string{"flannel.1 eth0", "eth0 flannel.1", "eth0", "eth0 flannel.1", "flannel.1"}},
		{"it migrates the other way", []any{before, reversed, true}, []string{"flannel.1", "flannel.1 eth0", "eth0 flannel.1"}},
		{"it goes", []any{both, true, nil, both}, []string{"flannel.1 eth0", "eth0 flannel.1", "", "flannel.1 eth0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := dataplanetest.New()
			n := start(t, k, vni1, hostGW)
			leases := map[string]*subnet.Lease{}
			set := backend.Set{Leases: leases, All: true, Complete: true}
			for i, step := range tt.steps {
				switch step := step.(type) {
				case *subnet.Lease:
					leases["host2"] = step
					if leases := n.split(step); leases[present] == nil && leases[next] == nil {
						t.Fatalf("step %d: the lease cannot be used", i)
					}
				case bool:
					answer(n, "host2")
				case nil:
					delete(leases, "host2")
				}
				out, err := n.Sync(t.Context(), set)
				if err != nil || len(out.Refused) > 0 {
					t.Fatalf("step %d: %v, %v", i, out, err)
				}
				var devices []string
				for _, r := range routes(t.Context(), t, k, subnetOf(2)) {
					devices = append(devices, strings.TrimSuffix(r, " standby"))
				}
				if got := strings.Join(devices, " "); got != tt.want[i] {
					t.Errorf("step %d: routes through %q, want %q", i, got, tt.want[i])
				}
				set = backend.Set{Leases: leases, Changed: []string{"host2"}, Complete: true}
			}
		})
	}
}

// TestIdentitiesOfTheNextBackend checks which identities leases claim for the next backend, and what
// remains without that backend. A next backend that starts late must make all leases be checked again.
func TestIdentitiesOfTheNextBackend(t *testing.T) {
	n := start(t, dataplanetest.New(), vni1, vni7)
	first := lease(2, "vxlan", dataOf(2, 1), "", nil)
	for name, tt := range map[string]struct {
		lease *subnet.Lease
		want  *subnet.Lease // nil: it claims none
	}{
		"it does not follow":              {first, nil},
		"it follows":                      {lease(2, "vxlan", dataOf(2, 1), "vxlan", dataOf(2, 7)), first},
		"it migrates the other way":       {lease(2, "vxlan", dataOf(2, 7), "vxlan", dataOf(2, 1)), first},
		"it has only the next backend":    {lease(2, "vxlan", dataOf(2, 7), "", nil), nil},
		"its next data cannot be used":    {lease(2, "vxlan", dataOf(2, 1), "vxlan", json.RawMessage(`{"VNI":7}`)), nil},
		"its next backend is a third one": {lease(2, "vxlan", dataOf(2, 1), "udp", nil), nil},
	} {
		ids, without := n.CheckNext(*tt.lease)
		if !reflect.DeepEqual(without, tt.want) {
			t.Errorf("%s: without it the lease is %+v, want %+v", name, without, tt.want)
		}
		if tt.want != nil && !slices.Equal(ids, []string{"IPv4 VTEP MAC 02:00:00:00:07:02"}) {
			t.Errorf("%s: the identities are %q", name, ids)
		}
	}

	n.running[next] = nil
	if ids, _ := n.CheckNext(*lease(2, "vxlan", dataOf(2, 1), "vxlan", dataOf(2, 7))); ids != nil {
		t.Errorf("while the next backend does not run, the identities are %q", ids)
	}
	for i, want := range []bool{true, false} {
		if out, err := n.Sync(t.Context(), backend.Set{Complete: true}); err != nil || out.Recheck != want {
			t.Errorf("pass %d: %+v, %v, want Recheck: %v", i, out, err, want)
		}
	}
}

// TestAnswerForAFormerLease checks that an answer to a probe does not count if the lease of the
// peer has changed since the probe. Packets to the peer must stay with the present backend until
// the peer answers a new probe.
func TestAnswerForAFormerLease(t *testing.T) {
	former := lease(2, "vxlan", dataOf(2, 1), "vxlan", dataOf(2, 7))
	moved := lease(2, "vxlan", dataOf(2, 1), "vxlan", dataOf(2, 7))
	moved.Endpoints[0].PublicIP = netip.MustParseAddr("192.168.77.99")
	for name, changed := range map[string]*subnet.Lease{
		"other data for the next backend": lease(2, "vxlan", dataOf(2, 1), "vxlan", dataOf(3, 7)),
		"another public address":          moved,
	} {
		t.Run(name, func(t *testing.T) {
			k := dataplanetest.New()
			n := start(t, k, vni1, vni7)
			leases := map[string]*subnet.Lease{"host2": former}
			step := func(set backend.Set, want string) {
				t.Helper()
				set.Leases, set.Complete = leases, true
				if _, err := n.Sync(t.Context(), set); err != nil {
					t.Fatal(err)
				}
				if got := routes(t.Context(), t, k, subnetOf(2)); len(got) != 2 || got[0] != want {
					t.Errorf("routes through %q, want %s to be the best of two", got, want)
				}
			}
			step(backend.Set{All: true}, "flannel.1")
			answer(n, "host2")
			leases["host2"] = changed
			step(backend.Set{Changed: []string{"host2"}}, "flannel.1")
			answer(n, "host2")
			n.compared = time.Time{} // so that the backends do not get the key as a changed one
			step(backend.Set{}, "flannel.7")
		})
	}
}

// recorder is a network that records the sets that it gets.
type recorder struct {
	backend.Network
	sets []backend.Set
}

// Sync implements backend.Network.
func (r *recorder) Sync(ctx context.Context, set backend.Set) (backend.Outcome, error) {
	r.sets = append(r.sets, set)
	return r.Network.Sync(ctx, set)
}

// TestAnswersAreChanges checks that both backends get the key of a peer that has answered a probe
// as a changed key, although its lease has not changed. With a set without changes, wireguard would
// compare all peers with its device.
func TestAnswersAreChanges(t *testing.T) {
	n := start(t, dataplanetest.New(), vni1, vni7)
	var parts [sides]*recorder
	for i := range n.running {
		parts[i] = &recorder{Network: n.running[i]}
		n.running[i] = parts[i]
	}
	leases := map[string]*subnet.Lease{}
	for host := 2; host <= 5; host++ {
		l := lease(host, "vxlan", dataOf(host, 1), "vxlan", dataOf(host, 7))
		leases[l.Key] = l
	}
	if _, err := n.Sync(t.Context(), backend.Set{Leases: leases, All: true, Complete: true}); err != nil {
		t.Fatal(err)
	}
	answer(n, "host3")
	if _, err := n.Sync(t.Context(), backend.Set{Leases: leases, Complete: true}); err != nil {
		t.Fatal(err)
	}
	for i, part := range parts {
		if last := part.sets[len(part.sets)-1]; last.All || !slices.Equal(last.Changed, []string{"host3"}) {
			t.Errorf("backend %d gets all %v, changed %q, want host3 alone", i, last.All, last.Changed)
		}
	}
}

// TestRestartKeepsTheRoutes checks that a restarted daemon decides about each peer by the kernel's
// routes. The best route to each peer must stay, and nothing may need a repair.
func TestRestartKeepsTheRoutes(t *testing.T) {
	k := dataplanetest.New()
	leases := map[string]*subnet.Lease{}
	for n := 2; n <= 4; n++ {
		l := lease(n, "vxlan", dataOf(n, 1), "vxlan", dataOf(n, 7))
		leases[l.Key] = l
	}
	set := backend.Set{Leases: leases, All: true, Complete: true}
	first := start(t, k, vni1, vni7)
	if _, err := first.Sync(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	answer(first, "host2", "host4")
	if _, err := first.Sync(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	want := map[int]string{2: "flannel.7", 3: "flannel.1", 4: "flannel.7"}
	check := func(when string) {
		t.Helper()
		for n, dev := range want {
			if got := routes(t.Context(), t, k, subnetOf(n)); len(got) != 2 || got[0] != dev {
				t.Errorf("%s: routes to host%d %q, want %s to be the best of two", when, n, got, dev)
			}
		}
	}
	check("before the restart")
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := start(t, k, vni1, vni7)
	check("at the restart")
	if _, err := second.Sync(t.Context(), backend.Set{Leases: leases, All: true}); err != nil { // with the peers of the last known state
		t.Fatal(err)
	}
	check("after the last known state")
	out, err := second.Sync(t.Context(), set)
	if err != nil || out.Repaired > 0 {
		t.Errorf("%+v, %v", out, err)
	}
	check("after the restart")
	waiting := slices.DeleteFunc(slices.Sorted(maps.Keys(leases)), func(key string) bool { return second.choice(key).Waiting == "" })
	if !slices.Equal(waiting, []string{"host3"}) {
		t.Errorf("waiting peers are %q, want host3", waiting)
	}
}

// TestWayOut checks which peers hold a host in each stage after a migration, and its claims.
func TestWayOut(t *testing.T) {
	both, gone := lease(2, "vxlan", dataOf(2, 1), "vxlan", dataOf(2, 7)), lease(2, "vxlan", dataOf(2, 7), "", nil)
	leaving := lease(2, "vxlan", dataOf(2, 7), "vxlan", dataOf(2, 1))
	for _, tt := range []struct {
		stage  subnet.Stage
		peer   *subnet.Lease
		proven bool
		best   string // device of the best route
		holds  bool
	}{
		{subnet.Finished, both, false, "flannel.1", true},
		{subnet.Finished, both, true, "flannel.7", false},
		{subnet.Finished, leaving, false, "flannel.1", true},
		{subnet.Finished, leaving, true, "flannel.7", false},
		{subnet.Finished, gone, false, "flannel.7", false},
		{subnet.Leaving, both, false, "flannel.7", true},
		{subnet.Leaving, leaving, false, "flannel.7", false},
		{subnet.Leaving, gone, false, "flannel.7", false},
	} {
		k := dataplanetest.New()
		env := newEnv(k, vni1, vni7)
		env.Config.Stage = tt.stage
		b, err := newBackend(t, env)
		if err != nil {
			t.Fatal(err)
		}
		claim, err := b.Claim(t.Context(), lease(1, "vxlan", dataOf(1, 1), "vxlan", dataOf(1, 7)).Claim())
		if err != nil {
			t.Fatal(err)
		}
		main, second := dataOf(1, 1), dataOf(1, 7)
		if tt.stage == subnet.Leaving {
			main, second = second, main
		}
		e := claim.Endpoints[0]
		if claim.NextType != "vxlan" || string(e.Data) != string(main) || string(e.NextData) != string(second) {
			t.Errorf("%s: the claim is %+v, want the data %s and %s", tt.stage, claim, main, second)
		}
		started, err := b.Start(t.Context(), subnet.Lease{Key: "host1", BackendType: claim.BackendType, NextType: claim.NextType, Endpoints: claim.Endpoints})
		if err != nil {
			t.Fatal(err)
		}
		defer started.Close()
		n := started.(*network)
		set := backend.Set{Leases: map[string]*subnet.Lease{"host2": tt.peer}, All: true, Complete: true}
		out, err := n.Sync(t.Context(), set)
		if tt.proven && err == nil {
			answer(n, "host2")
			out, err = n.Sync(t.Context(), set)
		}
		if err != nil || out.Reclaim == tt.holds {
			t.Errorf("%+v: the network asks for the next step: %v, %v", tt, out.Reclaim, err)
		}
		if got := routes(t.Context(), t, k, subnetOf(2)); len(got) == 0 || got[0] != tt.best {
			t.Errorf("%+v: routes through %q", tt, got)
		}
	}
}

// TestUnusableNextData checks that a peer whose data for the next backend cannot be used is served
// by the present one.
func TestUnusableNextData(t *testing.T) {
	k := dataplanetest.New()
	n := start(t, k, hostGW, vni1)
	leases := map[string]*subnet.Lease{"host2": lease(2, "host-gw", nil, "vxlan", json.RawMessage(`{"VtepMAC":"nonsense"}`))}
	out, err := n.Sync(t.Context(), backend.Set{Leases: leases, All: true, Complete: true})
	if err != nil || len(out.Refused) > 0 {
		t.Fatalf("%+v, %v", out, err)
	}
	if _, err := n.Check(*leases["host2"]); err != nil {
		t.Errorf("the lease is refused: %v", err)
	}
	if got := n.choice("host2"); got.Backend != "host-gw" || !strings.Contains(got.Waiting, "nonsense") {
		t.Errorf("migration is %+v, want host-gw, because of the data", got)
	}
	if got := routes(t.Context(), t, k, subnetOf(2)); !slices.Equal(got, []string{"eth0"}) {
		t.Errorf("routes through %q, want eth0", got)
	}
}

// TestNextBackendDoesNotStart checks that a host goes on with the present backend if the next one
// does not start, and starts the next one later.
func TestNextBackendDoesNotStart(t *testing.T) {
	k := dataplanetest.New()
	n := start(t, k, hostGW, vni1)
	_ = n.running[next].Close()
	n.running[next], n.notStarted = nil, errNoData
	n.NewPart(t.Context(), next)
	if mtu := n.Describe().MTU; mtu != 1450 { // the daemon writes the MTU to the subnet file only once
		t.Errorf("MTU %d, want that of the next backend", mtu)
	}
	leases := map[string]*subnet.Lease{"host2": lease(2, "host-gw", nil, "vxlan", dataOf(2, 1)), "host3": lease(3, "vxlan", dataOf(3, 1), "", nil)}
	n.nextStart = time.Now().Add(time.Hour)
	out, err := n.Sync(t.Context(), backend.Set{Leases: leases, All: true, Complete: true})
	if err != nil || out.Again == 0 {
		t.Errorf("%+v, %v, want another pass", out, err)
	}
	if len(out.Refused) != 1 || out.Refused[0].Key != "host3" {
		t.Errorf("refused %v, want host3, which has the next backend alone", out.Refused)
	}
	n.nextStart = time.Time{}
	if out, err = n.Sync(t.Context(), backend.Set{Leases: leases, Complete: true}); err != nil || len(out.Refused) > 0 {
		t.Errorf("after the next start: %+v, %v", out, err)
	}
	if got := routes(t.Context(), t, k, subnetOf(3)); !slices.Equal(got, []string{"flannel.1"}) {
		t.Errorf("routes through %q, want flannel.1", got)
	}
}

// occupied is a backend that does not start before free is set, because its port is in use.
type occupied struct {
	backend.Backend
	free *bool
}

// Describe implements backend.Backend.
func (o occupied) Describe() backend.Description {
	d := o.Backend.Describe()
	d.Ports = map[string][]int{vxlan.Type: {7}}
	return d
}

// Start implements backend.Backend.
func (o occupied) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	if !*o.free {
		return nil, fmt.Errorf("listen: %w", unix.EADDRINUSE)
	}
	return o.Backend.Start(ctx, own)
}

// TestNextBackendGetsItsPort checks that the next backend starts if an earlier network has left
// a tunnel running on its port: FreePorts closes that tunnel. The next backend must not start if
// another program has the port.
func TestNextBackendGetsItsPort(t *testing.T) {
	for _, left := range []int{7, 8} { // port on which an earlier network has left a tunnel; if it is 8, another program has port 7
		b, err := newBackend(t, newEnv(dataplanetest.New(), vni1, vni7))
		if err != nil {
			t.Fatal(err)
		}
		m, free := b.(*Backend), false
		m.parts[next].be = occupied{m.parts[next].be, &free}
		m.env.FreePorts = func(ports []int) error {
			free = slices.Contains(ports, left)
			return nil
		}
		claim, err := b.Claim(t.Context(), subnet.Claim{})
		if err != nil {
			t.Fatal(err)
		}
		claim.Endpoints[0].Subnet = subnetOf(1)
		started, err := b.Start(t.Context(), subnet.Lease{Key: "host1", BackendType: claim.BackendType, NextType: claim.NextType, Endpoints: claim.Endpoints})
		if err != nil {
			t.Fatal(err)
		}
		defer started.Close()
		n := started.(*network)
		if runs := n.running[next] != nil; runs != (left == 7) {
			t.Errorf("with a tunnel left on port %d the next backend runs: %v, because of %v", left, runs, n.notStarted)
		}
	}
}

// reporter is a network of which only the report is used.
type reporter struct {
	backend.Network
	report backend.NetworkReport
}

func (r reporter) Report() backend.NetworkReport { return r.report }

// TestModes checks that the report has the mode of each backend.
func TestModes(t *testing.T) {
	n := &network{}
	n.running[present] = reporter{report: backend.NetworkReport{Mode: "kernel"}}
	if r := n.Report(); r.Mode != "kernel" || r.NextMode != "" {
		t.Errorf("before the next backend runs: %+v", r)
	}
	n.running[next] = reporter{report: backend.NetworkReport{Mode: "userspace"}}
	if r := n.Report(); r.Mode != "kernel" || r.NextMode != "userspace" {
		t.Errorf("%+v, want both modes", r)
	}
}

// republisher is a network that has other data for this host's lease in each pass.
type republisher struct{ backend.Network }

func (r republisher) Sync(ctx context.Context, set backend.Set) (backend.Outcome, error) {
	out, err := r.Network.Sync(ctx, set)
	out.Republish = true
	return out, err
}

// TestBothBackendsPublish checks that each of the two backends can change its published data during
// a migration.
func TestBothBackendsPublish(t *testing.T) {
	for side := range sides {
		n := start(t, dataplanetest.New(), vni1, vni7)
		n.running[side] = republisher{n.running[side]}
		if out, err := n.Sync(t.Context(), backend.Set{All: true}); err != nil || !out.Republish {
			t.Errorf("backend %d of the migration cannot publish other data: %+v, %v", side, out, err)
		}
	}
}

// TestPeersGoWithoutTheNextBackend removes peers while the next backend does not run. The routes of
// both backends to these peers must be deleted when the store has answered, and the routes to all
// other peers must stay.
func TestPeersGoWithoutTheNextBackend(t *testing.T) {
	for _, all := range []bool{false, true} {
		k := dataplanetest.New()
		leases := map[string]*subnet.Lease{}
		for n := 2; n <= 5; n++ {
			l := lease(n, "vxlan", dataOf(n, 1), "vxlan", dataOf(n, 7))
			leases[l.Key] = l
		}
		first := start(t, k, vni1, vni7)
		for range 2 {
			if _, err := first.Sync(t.Context(), backend.Set{Leases: leases, All: true, Complete: true}); err != nil {
				t.Fatal(err)
			}
			answer(first, "host2", "host4")
		}
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		n := start(t, k, vni1, vni7)
		_ = n.running[next].Close()
		n.running[next], n.notStarted, n.nextStart = nil, errNoData, time.Now().Add(time.Hour)
		n.NewPart(t.Context(), next)
		step := func(set backend.Set) {
			t.Helper()
			set.Leases = leases
			if _, err := n.Sync(t.Context(), set); err != nil {
				t.Fatal(err)
			}
		}
		expect := func(when string, want map[int]bool) {
			t.Helper()
			for host, there := range want {
				if got := routes(t.Context(), t, k, subnetOf(host)); len(got) > 0 != there {
					t.Errorf("%s, all %v: routes to host%d %q, want some: %v", when, all, host, got, there)
				}
			}
		}
		step(backend.Set{All: true}) // with the peers of the last known state
		delete(leases, "host2")
		delete(leases, "host3")
		changed := backend.Set{Changed: []string{"host2", "host3"}, All: all}
		step(changed)
		expect("before the store has answered", map[int]bool{2: true, 3: true, 4: true, 5: true})
		step(backend.Set{All: all, Complete: true})
		expect("when it has answered", map[int]bool{2: false, 3: false, 4: true, 5: true})
		delete(leases, "host4")
		step(backend.Set{Changed: []string{"host4"}, All: all, Complete: true})
		expect("after another one", map[int]bool{4: false, 5: true})
		state, err := k.Read(t.Context(), n.Describe().Scope)
		if err != nil {
			t.Fatal(err)
		}
		if _, there := state.Links["flannel.7"]; !there {
			t.Error("the device of the next backend was removed")
		}
		for key := range state.Neighs {
			if key.Dev == "flannel.1" && key.IP != subnetOf(5).Addr() {
				t.Errorf("all %v: neighbour %v stays", all, key)
			}
		}
		if _, there := state.Neighs[dataplane.NeighKey{Dev: "flannel.7", IP: subnetOf(5).Addr()}]; !there {
			t.Errorf("all %v: the neighbour on the device of the next backend was removed", all)
		}
	}
}

// TestClaim checks that the claim contains the same data for each backend as the last claim, if
// that had any, in each phase of a migration.
func TestClaim(t *testing.T) {
	k := dataplanetest.New()
	b, err := newBackend(t, newEnv(k, vni1, vni7))
	if err != nil {
		t.Fatal(err)
	}
	one, seven := dataOf(1, 1), dataOf(1, 7)
	for name, prev := range map[string]*subnet.Lease{
		"before": lease(1, "vxlan", one, "", nil), "both": lease(1, "vxlan", one, "vxlan", seven), "finished": lease(1, "vxlan", seven, "", nil),
	} {
		c, err := b.Claim(t.Context(), prev.Claim())
		if err != nil || c.BackendType != "vxlan" || c.NextType != "vxlan" {
			t.Fatalf("%s: %+v, %v", name, c, err)
		}
		e := c.Endpoints[0]
		if keeps := name != "finished"; keeps != (string(e.Data) == string(one)) {
			t.Errorf("%s: data is %s, the same as before: want %v", name, e.Data, keeps)
		}
		if keeps := name != "before"; keeps != (string(e.NextData) == string(seven)) {
			t.Errorf("%s: next data is %s, the same as before: want %v", name, e.NextData, keeps)
		}
	}
}

// modules is a kernel in memory. While missing is set, it cannot create devices other than vxlan,
// as if it had no modules for them.
type modules struct {
	*dataplanetest.Kernel
	missing *bool
}

// Apply implements dataplane.Kernel.
func (m modules) Apply(ctx context.Context, ops []dataplane.Op) []dataplane.OpError {
	l, ok := ops[0].Object.(dataplane.Link)
	switch {
	case !ok || l.Kind == dataplane.KindVXLAN:
		return m.Kernel.Apply(ctx, ops)
	case *m.missing:
		return []dataplane.OpError{{Op: ops[0], Err: unix.EOPNOTSUPP}}
	}
	return nil
}

// TestClaimWithoutAModule checks that a host publishes no data for a next backend whose kernel
// module is missing, because the host would be cut off when the migration is finished. When the
// module is loaded, the network must ask for another claim.
func TestClaimWithoutAModule(t *testing.T) {
	for _, to := range []string{`{"Type":"ipip"}`, `{"Type":"wireguard","Implementation":"kernel"}`} {
		missing := true
		k := dataplanetest.New()
		env := newEnv(k, vni1, to)
		env.StateDir = t.TempDir() // folder for the key of wireguard
		env.Kernel = modules{k, &missing}
		b, err := newBackend(t, env)
		if err != nil {
			t.Fatal(err)
		}
		claim, err := b.Claim(t.Context(), subnet.Claim{})
		if err != nil || claim.BackendType != "vxlan" || claim.NextType != "" {
			t.Fatalf("%s: %+v, %v, want data for vxlan alone", to, claim, err)
		}
		claim.Endpoints[0].Subnet = subnetOf(1)
		n, err := b.Start(t.Context(), subnet.Lease{Key: "host1", BackendType: claim.BackendType, Endpoints: claim.Endpoints})
		if err != nil {
			t.Fatal(err)
		}
		if got := n.(*network).notStarted; !errors.Is(got, unix.EOPNOTSUPP) {
			t.Errorf("%s does not start because of %v, want the reason why it has no data", to, got)
		}
		asks := func(when string, want bool) {
			t.Helper()
			n.(*network).nextStart = time.Time{}
			out, err := n.Sync(t.Context(), backend.Set{Complete: true})
			if err != nil || out.Again == 0 {
				t.Errorf("%s, %s: %+v, %v, want another pass", to, when, out, err)
			}
			if out.Reclaim != want {
				t.Errorf("%s, %s: the network asks for another claim: %v", to, when, out.Reclaim)
			}
		}
		asks("without the module", false)
		missing = false
		asks("with the module", true)
		if claim, err = b.Claim(t.Context(), claim); err != nil || claim.NextType == "" {
			t.Errorf("%s: the claim with the module is %+v, %v", to, claim, err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}
