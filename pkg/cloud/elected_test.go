// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/wait"
)

// store is the store of a network whose hosts elect a leader. A term ends 20 seconds after the store has
// gone away, and another host can lead 10 seconds later, as in package subnet.
type store struct {
	mu        sync.Mutex
	leader    string
	announced json.RawMessage
	end       context.CancelFunc // of the term
	away      bool
	vacant    bool // no host can become the leader
	asked     int  // how often hosts have asked for the leader
}

var errAway = errors.New("the store does not answer")

func (s *store) setAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away = away; away && s.end != nil {
		time.AfterFunc(20*time.Second, s.end)
	}
}

// voter is the store as a host sees it. It implements cloud.Election.
type voter struct {
	*store
	name string
}

func (v voter) Leader(context.Context) (string, json.RawMessage, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.asked++; v.away {
		return "", nil, errAway
	}
	return v.leader, v.announced, nil
}

func (v voter) Lead(ctx context.Context, lead func(context.Context, func(context.Context, json.RawMessage) error)) error {
	v.mu.Lock()
	if v.away || v.vacant || v.leader != "" {
		defer v.mu.Unlock()
		if v.away {
			return errAway
		}
		return cloud.ErrLed
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	v.leader, v.announced, v.end = v.name, nil, cancel
	v.mu.Unlock()
	lead(ctx, func(_ context.Context, text json.RawMessage) error {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.away {
			return errAway
		}
		v.announced = text
		return nil
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	v.leader, v.announced, v.end = "", nil, nil
	return nil
}

// view is the cloud as a host sees it, which may lack rights.
type view struct {
	*cloudtest.Memory
	self     string
	lacks    bool          // used in Do
	unjoined error         // used in Do; of Join
	checks   time.Duration // how long Check takes
}

func (v *view) Join(context.Context) (target string, err error) {
	v.Do(func() { target, err = v.self, v.unjoined })
	return target, err
}

func (v *view) Check(ctx context.Context) error {
	if v.checks > 0 {
		_ = wait.For(ctx, v.checks) // the end of ctx ends the check
	}
	if _, err := v.Join(ctx); err != nil {
		return err
	}
	if err := v.denied(); err != nil {
		return err
	}
	return v.Memory.Check(ctx)
}

func (v *view) Put(ctx context.Context, r cloud.Route, replace bool) error {
	if err := v.denied(); err != nil {
		return err
	}
	return v.Memory.Put(ctx, r, replace)
}

func (v *view) Remove(ctx context.Context, r cloud.Route) error {
	if err := v.denied(); err != nil {
		return err
	}
	return v.Memory.Remove(ctx, r)
}

func (v *view) denied() (err error) {
	v.Do(func() {
		if v.lacks {
			err = &cloud.MissingError{Permissions: []string{"memory:all of " + v.self}, Page: "page.md"}
		}
	})
	return err
}

// network is a network of three hosts on one cloud, in simulated time.
type network struct {
	*testing.T
	*cloudtest.Memory
	*store
	views  [4]*view // by number of the host, like those that follow
	hosts  [4]*cloud.Elected
	stops  [4]func()
	tunnel bool // of the hosts that start
	// passes counts the passes that each host has caused.
	passes [4]atomic.Int64
}

// runNetwork runs test with a network in which no host has started.
func runNetwork(t *testing.T, test func(*network)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := &network{T: t, Memory: &cloudtest.Memory{Hosts: map[string][]netip.Addr{}, Tabs: []cloud.Table{{ID: "table-1"}}}, store: &store{}}
		for i := 1; i <= 3; i++ {
			n.Hosts[target(i)] = []netip.Addr{address(i)}
			n.views[i] = &view{Memory: n.Memory, self: target(i)}
		}
		test(n)
	})
}

// runLed runs test with a network that host 1 leads. Host 3 lacks rights. The other hosts have started too.
func runLed(t *testing.T, others []int, test func(*network)) {
	t.Helper()
	runNetwork(t, func(n *network) {
		n.views[3].lacks = true
		n.start(1)
		n.start(others...)
		test(n)
	})
}

// start starts hosts. Each knows the leases of all of them.
func (n *network) start(hosts ...int) {
	for _, i := range hosts {
		n.hosts[i] = cloud.NewElected(cloud.ElectedConfig{Election: voter{n.store, target(i)}, Tunnel: n.tunnel, KeeperConfig: cloud.KeeperConfig{
			Cloud: n.views[i], Own: lease(i), Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}, Resync: resync, Compared: func() { n.passes[i].Add(1) },
			Connected: func() time.Time { return time.Unix(1, 0) },
		}})
		peers := cloud.Peers{Complete: true}
		for other := 1; other <= 3; other++ {
			if other != i {
				peers.Hosts = append(peers.Hosts, lease(other))
			}
		}
		n.hosts[i].SetPeers(peers)
		ctx, cancel := context.WithCancel(n.Context())
		done := make(chan struct{})
		go func() { defer close(done); n.hosts[i].Run(ctx) }()
		n.stops[i] = sync.OnceFunc(func() { cancel(); <-done })
		n.Cleanup(n.stops[i])
	}
	n.after(20 * time.Second)
}

func (n *network) after(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// expect expects that a host is in order, or gives a reason that contains text.
func (n *network) expect(what string, host int, text string) {
	n.Helper()
	_, err := n.hosts[host].Result(n.Context())
	if text == "" && err != nil || text != "" && (err == nil || !strings.Contains(err.Error(), text)) {
		n.Errorf("%s: host %d has the error %v, want %q", what, host, err, text)
	}
}

func (n *network) expectWrites(what string, want int) {
	n.Helper()
	n.Do(func() {
		if len(n.Writes) != want {
			n.Errorf("%s: %d writes, want %d: %q", what, len(n.Writes), want, n.Writes)
		}
	})
}

func (n *network) expectLeader(what string, want int) {
	n.Helper()
	for i, h := range n.hosts {
		if h == nil {
			continue
		}
		if r := h.Report(); r.Leader != target(want) || r.Leading != (i == want) || r.Writer != cloud.WriterLeader {
			n.Errorf("%s: host %d reports the leader %q, leading %v, want %s", what, i, r.Leader, r.Leading, target(want))
		}
	}
}

// TestOneHostWrites lets the leader end. The next one finds all routes in order.
func TestOneHostWrites(t *testing.T) {
	runLed(t, []int{2, 3}, func(n *network) {
		n.expectWrites("at the start", 3)
		n.expectLeader("at the start", 1)
		for i := 1; i <= 3; i++ {
			n.expect("at the start", i, "")
			if r := n.hosts[i].Report(); len(r.Routes) != 1 || !r.Routes[0].Present || r.Routes[0].Dst != subnet(i) || r.Good.IsZero() {
				t.Errorf("host %d reports %+v, want its route in place", i, r)
			}
		}
		n.stops[1]()
		n.hosts[1] = nil
		n.after(resync * 2)
		n.expectLeader("after the leader has ended", 2)
		n.expectWrites("after the leader has ended", 3)
		if r := n.hosts[3].Report(); len(r.Unrouted)+len(r.Routed)+len(r.Tables) > 0 {
			t.Errorf("a host that does not lead reports %+v", r)
		}
		passes := n.passes[3].Load()
		n.after(24 * time.Hour)
		if more := n.passes[3].Load() - passes; more > 0 {
			t.Errorf("a host that does not lead has caused %d passes in a day at rest", more)
		}
		n.Do(func() { n.DeleteByHand("table-1", subnet(1)) })
		n.after(2 * resync)
		n.expectWrites("a route that was deleted", 4)
	})
}

// TestHostsWithoutRights has one host with rights. The others write nothing, and wait for their
// routes.
func TestHostsWithoutRights(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.views[1].lacks, n.views[2].lacks, n.views[3].lacks = true, true, true
		n.start(1, 2)
		n.expect("without a host that may write", 1, "no host writes the routes of the cloud, and this one cannot: permission memory:all of host-1 is missing")
		n.expect("without a host that may write", 2, "memory:all of host-2")
		n.Do(func() { n.views[3].lacks = false })
		n.start(3)
		n.after(20 * time.Second)
		for i := 1; i <= 3; i++ {
			n.expect("with a leader", i, "")
		}
		n.expectLeader("with a leader", 3)
		compared := 0
		n.Do(func() { compared = n.Compared })
		n.stops[3]()
		n.hosts[3] = nil
		n.after(time.Minute)
		n.expect("soon after the leader has ended", 1, "")
		n.after(24 * time.Hour)
		n.expect("much later", 1, "no host writes the routes of the cloud, and this one cannot")
		n.Do(func() {
			if n.Compared != compared {
				t.Errorf("%d readings of the tables by hosts that do not lead", n.Compared-compared)
			}
		})
		n.expectWrites("in total", 3)
		// An operator gives a host the rights.
		n.Do(func() { n.views[1].lacks = false })
		n.after(2 * time.Hour)
		n.expectLeader("with rights again", 1)
		n.expect("with rights again", 2, "")
	})
}

// TestLeaderLosesItsRights expects that a leader which lacks rights makes way for another host.
func TestLeaderLosesItsRights(t *testing.T) {
	runLed(t, []int{2}, func(n *network) {
		n.Do(func() {
			n.views[1].lacks = true
			n.DeleteByHand("table-1", subnet(3))
		})
		n.after(2 * resync)
		n.expectLeader("after the rights are gone", 2)
		n.expectWrites("after the rights are gone", 4)
		n.expect("after the rights are gone", 1, "")
	})
}

// TestLeaderCannotJoin expects that a leader which the cloud does not know any more makes way for another
// host.
func TestLeaderCannotJoin(t *testing.T) {
	runLed(t, []int{2}, func(n *network) {
		n.Do(func() {
			n.views[1].unjoined = errors.New("no network interface has an address of this host")
			n.DeleteByHand("table-1", subnet(3))
		})
		n.after(2 * resync)
		n.expectLeader("a leader that the cloud does not know", 2)
		n.expectWrites("a leader that the cloud does not know", 4)
		n.stops[2]()
		n.hosts[2] = nil
		n.after(time.Hour)
		n.expect("without another host", 1, "no host writes the routes of the cloud, and this one cannot: ")
		n.Do(func() { n.views[1].unjoined = nil })
		n.after(time.Hour)
		n.expectLeader("a host that was repaired", 1)
	})
}

// TestSlowCheck has a host that does not reach the API of the cloud. It is ready as soon as it knows its
// route.
func TestSlowCheck(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.start(1)
		n.views[2].checks = time.Minute
		n.start(2)
		ctx, cancel := context.WithTimeout(n.Context(), time.Second)
		defer cancel()
		if _, err := n.hosts[2].Result(ctx); err != nil {
			t.Error(err)
		}
	})
}

// TestElectionWithoutTheStore loses the store. No host writes then, and all routes count as in order.
func TestElectionWithoutTheStore(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.start(1)
		n.start(2)
		n.setAway(true)
		n.after(30 * time.Second)
		n.Do(func() { n.DeleteByHand("table-1", subnet(3)) })
		n.after(time.Hour)
		n.expectWrites("without the store", 3)
		for i := 1; i <= 2; i++ {
			n.expect("without the store", i, "")
		}
		n.start(3)
		n.expect("a host that starts without the store", 3, "the store does not answer")
		n.setAway(false)
		n.after(2 * time.Minute)
		n.expectWrites("with the store", 4)
		for i := 1; i <= 3; i++ {
			n.expect("with the store", i, "")
		}
	})
}

// TestNewLeaderWithoutTheCloud has a leader that cannot read the tables. Hosts whose routes were in order
// stay ready.
func TestNewLeaderWithoutTheCloud(t *testing.T) {
	runLed(t, []int{2, 3}, func(n *network) {
		n.Do(func() { n.Fails = cloud.ErrUnavailable })
		n.stops[1]()
		n.hosts[1] = nil
		n.after(2 * resync)
		n.expectLeader("in an outage of the cloud", 2)
		n.expect("the leader in an outage of the cloud", 2, "the cloud does not answer")
		n.expect("a host with a route", 3, "")
		n.start(1)
		n.expect("a host that has just started", 1, "because the leader host-2 cannot write: read the route tables: ")
		n.Do(func() { n.Fails = nil })
		n.after(2 * resync)
		for i := 1; i <= 3; i++ {
			n.expect("after the outage", i, "")
		}
	})
}

// TestLeaderWithoutLeases has a leader whose store has not told the leases yet. It must not tell hosts with
// routes that they have none.
func TestLeaderWithoutLeases(t *testing.T) {
	runLed(t, []int{2, 3}, func(n *network) {
		n.hosts[2].SetPeers(cloud.Peers{})
		n.stops[1]()
		n.hosts[1] = nil
		n.after(2 * resync)
		n.expectLeader("without leases", 2)
		n.expect("a host with a route", 3, "")
		n.expect("the leader", 2, "")
	})
}

// TestLeaderTellsTheReason expects that a host says why it has no route, and its leader is in order.
func TestLeaderTellsTheReason(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.Unfit = map[string]error{target(2): errors.New("it forwards no packets")}
		n.start(1)
		n.start(2, 3)
		n.expect("a host that forwards no packets", 2, "no route to 10.5.2.0/24, says the leader host-1: it forwards no packets")
		n.expect("the leader", 1, "")
		n.expect("another host", 3, "")
		n.Do(func() { n.Fails = cloud.ErrUnavailable })
		n.after(2 * resync)
		n.expect("the leader in an outage of the cloud", 1, "the cloud does not answer")
		n.Do(func() { n.Fails, n.Unfit = nil, nil })
		n.after(2 * resync)
		n.expect("a host that was repaired", 2, "")
		n.expect("the leader after the outage", 1, "")
	})
}

// TestHostWaitsForItsRoute expects that a new host gives its reason only after a while.
func TestHostWaitsForItsRoute(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.views[2].lacks = true
		n.setAway(true)
		n.start() // nothing, but time passes
		n.setAway(false)
		n.leader, n.announced = "host-9", json.RawMessage(`{"routed":["10.5.1.0/24"]}`)
		n.start(2)
		n.expect("without its route", 2, "waiting for the leader host-9, which has not put the route to 10.5.2.0/24 yet")
		n.mu.Lock()
		n.announced = json.RawMessage(`{"routed":["10.5.1.0/24","10.5.2.0/24"]}`)
		n.mu.Unlock()
		n.after(20 * time.Second)
		n.expect("with its route", 2, "")
		n.mu.Lock()
		n.announced = json.RawMessage(`nonsense`)
		n.mu.Unlock()
		n.after(2 * resync)
		n.expect("with an announcement that cannot be read", 2, "cannot be read")
	})
}

// TestLateLeader has no leader for long, and then one that has not compared the routes yet. A host whose routes were
// in order is ready again at once.
func TestLateLeader(t *testing.T) {
	runLed(t, []int{3}, func(n *network) {
		n.stops[1]()
		n.hosts[1] = nil
		n.after(time.Hour)
		n.expect("without a leader", 3, "no host writes the routes of the cloud")
		n.mu.Lock()
		n.leader, n.announced = "host-9", nil
		n.mu.Unlock()
		n.after(2 * resync)
		n.expect("with a leader that has not compared the routes", 3, "")
	})
}
