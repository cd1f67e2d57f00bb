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
// gone away, as in package subnet.
type store struct {
	mu        sync.Mutex
	leader    string // name of the leader; empty if there is none
	announced json.RawMessage
	end       context.CancelFunc // ends the term; nil if there is no leader
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

// voter is the store as the host with this name sees it. It implements cloud.Election.
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

// view is the cloud as one host sees it. The host may lack rights.
type view struct {
	*cloudtest.Memory
	self     string        // target of the host
	lacks    bool          // the host lacks all rights; used in Do
	unjoined error         // error of Join; used in Do
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

// network is a network of the hosts 1 to 3 on one cloud, in simulated time. The index of each array is the
// number of a host.
type network struct {
	*testing.T
	*cloudtest.Memory
	*store
	views  [4]*view
	hosts  [4]*cloud.Elected // nil if the host has not started
	stops  [4]func()
	tunnel bool // value of Tunnel for hosts that start
	// passes counts the calls of Compared by each host, which cause passes.
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

// runLed runs test with a network in which host 1 leads, and the hosts in others have started after it. Host 3
// lacks rights.
func runLed(t *testing.T, others []int, test func(*network)) {
	t.Helper()
	runNetwork(t, func(n *network) {
		n.views[3].lacks = true
		n.start(1)
		n.start(others...)
		test(n)
	})
}

// start starts hosts at the same time, each with the leases of hosts 1 to 3, and lets 20 seconds pass.
func (n *network) start(hosts ...int) {
	for _, i := range hosts {
		n.hosts[i] = cloud.NewElected(cloud.ElectedConfig{Election: voter{n.store, target(i)}, KeeperConfig: cloud.KeeperConfig{Tunnel: n.tunnel,
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

// expect expects that the error of a host contains text, or that there is no error if text is empty. Messages begin
// with the situation, what.
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

// TestOneHostWrites checks that only the leader writes routes. After its end, another host must become the leader,
// write nothing while all routes are in order, and repair a route that was deleted.
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

// TestHostsWithoutRights checks hosts that lack rights, in four phases. While all hosts lack them, each one must name
// its missing rights. When host 3 gets rights, it must write the routes to all hosts. After its end, the others must
// stay in order for a while, then report that there is no leader, and never read the tables. When host 1 gets rights,
// it must become the leader.
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

// TestLeaderLosesItsRights expects that another host becomes the leader after the leader has lost its rights.
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

// TestLeaderCannotJoin expects that another host becomes the leader when the cloud does not know the leader any
// more. When the second leader has ended and the cloud knows the first one again, the first one must lead again.
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

// TestSlowCheck expects that a host has a result as soon as it has read the announcement, even while the check of
// its rights is still waiting for the cloud.
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

// TestElectionWithoutTheStore expects that no host writes while the store is away, and that routes still count as in
// order. A host that starts while the store is away must report that the store does not answer. When the store is
// back, a missing route must be put.
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

// TestNewLeaderWithoutTheCloud elects a leader that cannot read the tables. It expects that hosts whose routes were
// in order stay without an error, and that a host that starts then reports the error of the leader.
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

// TestLeaderWithoutLeases elects a leader that does not know the leases of other hosts yet. It expects that hosts
// with routes stay without an error.
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

// TestLeaderTellsTheReason expects that only the host to which no route can lead reports the reason that the leader
// has announced. In an outage of the cloud the leader must report the outage.
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

// TestHostWaitsForItsRoute expects that a new host waits for the leader to put its route, then is in order, and later
// reports an announcement that cannot be read.
func TestHostWaitsForItsRoute(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.views[2].lacks = true
		n.setAway(true)
		n.start() // starts no host, but lets time pass
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

// TestLateLeader has no leader for an hour, and then one that has not compared the routes yet. It expects that a host
// whose routes were in order reports an error until there is a leader, and no error from then on.
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
