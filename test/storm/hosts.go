// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/rpc"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// hostsChild makes this program run the managers of all hosts if it is the only argument. The
// managers are in a process of their own, so that their CPU time and memory can be read. Their
// process is the only one in host 1 of the lab, so that the byte counters of this host count only the
// traffic of the managers.
const hostsChild = "storm-hosts"

func isHosts(args []string) bool { return len(args) == 2 && args[1] == hostsChild }

// runHosts serves Hosts on standard input and output until the parent closes them.
func runHosts() error {
	klog.LogToStderr(false) // no log, because thousands of hosts would write the same
	klog.SetOutput(io.Discard)
	if err := useMemory(); err != nil {
		return err
	}
	server := rpc.NewServer()
	if err := server.RegisterName("Hosts", newHosts()); err != nil {
		return err
	}
	server.ServeConn(pipes{os.Stdin, os.Stdout})
	return nil
}

// useMemory makes the garbage collector run rarely until the process uses two thirds of the machine's
// memory. Otherwise its work on the memory of all hosts would count as CPU time that real hosts do
// not need.
func useMemory() error {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return fmt.Errorf("read the size of the memory: %w", err)
	}
	debug.SetGCPercent(400)
	debug.SetMemoryLimit(int64(info.Totalram) * int64(info.Unit) / 3 * 2)
	return nil
}

type pipes struct {
	io.ReadCloser
	io.WriteCloser
}

// Close implements io.Closer.
func (p pipes) Close() error { return errors.Join(p.ReadCloser.Close(), p.WriteCloser.Close()) }

// Hosts runs the managers of many hosts. The parent process calls its exported methods through
// net/rpc. The parent waits for the end of each call, so the methods do not run at the same time.
type Hosts struct {
	registry *registry
	hosts    map[int]*host
	loaded   map[int]*host        // hosts that Load has created, until Start starts them
	former   map[int]subnet.Lease // last leases of hosts that have been stopped
	// reference is the host that keeps the last known state. When it stops, its state is stored in
	// known. Each host that starts with a last known state gets a copy of known. One state is enough,
	// because all hosts know the same leases after a scenario.
	reference *host
	// witness knows the lease of the reference as the store has it, with its revision. A host itself does
	// not know that of its own lease, and without it a last known state is of no use.
	witness *host
	known   subnet.LedgerState
	outages int                    // number of outages that hosts had before they were stopped
	stores  map[int]subnet.StoreID // for each stopped host, the id of the store that the host knew; with Kubernetes the ids of hosts differ
}

func newHosts() *Hosts {
	return &Hosts{registry: newRegistry(), hosts: map[int]*host{}, loaded: map[int]*host{}, former: map[int]subnet.Lease{}, stores: map[int]subnet.StoreID{}}
}

// Range contains the numbers of some hosts: of the first one, and of the one after the last.
type Range struct{ From, To int }

// Start contains the hosts to start, and how they start.
type Start struct {
	Range
	Store  Store
	Forget bool          // the hosts start without their former leases and without their last known state
	TTL    time.Duration // TTL of leases; zero means the default
	Margin time.Duration // how long before the end of its lease a host renews it; zero means the default
}

// Store describes how hosts reach the store.
type Store struct {
	Etcd       []string // endpoints; empty if the store is the Kubernetes API
	Prefix     string
	Kubeconfig string
	NetConfig  string // path of the network configuration; only with Kubernetes
}

// Load creates hosts and, unless a.Forget is true, makes them read their last known state. The hosts
// send no requests to the store before Start starts them. Load returns an error if one of the hosts
// is running.
func (s *Hosts) Load(a Start, _ *struct{}) error {
	var loading errgroup.Group
	loading.SetLimit(runtime.NumCPU())
	for i := a.From; i < a.To; i++ {
		if s.hosts[i] != nil {
			return fmt.Errorf("host %d is running", i)
		}
		h := newHost(i, s)
		if l, ok := s.former[i]; ok && !a.Forget {
			h.former = &l
		}
		s.loaded[i] = h
		loading.Go(func() error { return h.load(a) })
	}
	return loading.Wait()
}

// Start starts hosts. It first calls Load unless the caller has done so for the same hosts.
func (s *Hosts) Start(a Start, _ *struct{}) error {
	if s.loaded[a.From] == nil {
		if err := s.Load(a, nil); err != nil {
			return err
		}
	}

	for i := a.From; i < a.To; i++ {
		h := s.loaded[i]
		delete(s.loaded, i)
		if s.reference == nil {
			s.reference = h
			h.observation.ledger = &subnet.Ledger{}
		} else if s.witness == nil {
			s.witness = h
			h.observation.ledger = &subnet.Ledger{}
		}
		s.hosts[i] = h
		h.start()
	}
	return nil
}

// Stop stops running hosts as if their power was cut: their leases stay in the store. It stores these leases
// in leases.
func (s *Hosts) Stop(a Range, leases *[]subnet.Lease) error {
	var wg sync.WaitGroup
	for i := a.From; i < a.To; i++ {
		h := s.hosts[i]
		delete(s.hosts, i)
		h.mu.Lock()
		s.outages += h.outages
		h.mu.Unlock()
		wg.Go(h.stop)
		if h == s.reference {
			defer func() { s.reference, s.witness = nil, nil }()
		}
		if l, ok := h.lease(); ok {
			s.former[i], s.stores[i] = l, h.observation.stored()
			if h == s.reference {
				s.known = h.observation.state()
				if s.witness != nil {
					others := func(p subnet.Peer) bool { return p.Lease.Key != l.Key }
					s.known.Peers = append(s.known.Peers, slices.DeleteFunc(s.witness.observation.state().Peers, others)...)
				}
			}
			*leases = append(*leases, l)
		}
	}

	wg.Wait()
	if len(s.hosts) == 0 {
		debug.FreeOSMemory()
	}
	return nil
}

// Expect contains leases that hosts must know from now on or, if Gone is true, must not know any
// more. Hosts add their own leases when they acquire them.
type Expect struct {
	Leases []subnet.Lease
	Gone   bool
}

// Expect changes which leases a host must know to be right.
func (s *Hosts) Expect(a Expect, _ *struct{}) error { //nolint:unparam // net/rpc wants an error
	for i := range a.Leases {
		s.registry.expect(identify(&a.Leases[i]), !a.Gone)
	}
	return nil
}

// Wait contains how long Hosts.Wait waits, and for what.
type Wait struct {
	Limit   time.Duration
	Renewed time.Time // hosts must have renewed their leases after this time; zero means that they need not renew them
}

// State is the state of the running hosts. A host is right if it has a lease and knows the leases of
// all other hosts, and no others.
type State struct {
	Right, Running int
	Half, Last     time.Time // of the hosts that are right: when half of them, and when the last one became right
	Leased         time.Time // when the last of the hosts that have a lease has acquired it
	Renewed        int       // number of hosts that have renewed their leases since Wait.Renewed
	Outages        int       // how often a host has lost its store
	Example        string    // why some host is not right or, if all are, why one has lost its store
}

// Wait waits until all running hosts are right and have renewed their leases since a.Renewed. It
// waits no longer than a.Limit. In both cases it stores the state in r and returns nil.
func (s *Hosts) Wait(a Wait, r *State) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	wrong := -1 // number of the host that was not right at the last look; -1 at first
	for deadline := time.Now().Add(a.Limit); ; <-tick.C {
		expected := s.registry.expected()
		done := func(i int) bool {
			h := s.hosts[i]
			ok, _ := h.observation.right(expected)
			return ok && h.renewedSince(a.Renewed)
		}

		all := s.hosts[wrong] == nil || done(wrong)
		for i := range s.hosts {
			if !all {
				break
			}
			if all = done(i); !all {
				wrong = i
			}
		}
		if all || time.Now().After(deadline) {
			*r = s.state(expected, a.Renewed)
			return nil
		}
	}
}

// State returns the present state.
func (s *Hosts) State(_ struct{}, r *State) error { //nolint:unparam // net/rpc wants an error
	*r = s.state(s.registry.expected(), time.Time{})
	return nil
}

func (s *Hosts) state(expected *big.Int, renewed time.Time) (r State) {
	r.Outages = s.outages
	var times []time.Time
	example := "" // why some host is not right
	for _, h := range s.hosts {
		ok, since := h.observation.right(expected)
		if h.renewedSince(renewed) {
			r.Renewed++
		}

		r.Running++
		if ok {
			r.Right++
			times = append(times, since)
		} else {
			example = cmp.Or(h.why(), fmt.Sprintf("host %d %s", h.number, h.observation.difference(expected)))
		}

		h.mu.Lock()
		r.Outages += h.outages
		if h.acquired.After(r.Leased) {
			r.Leased = h.acquired
		}
		if h.said != "" {
			r.Example = fmt.Sprintf("host %d: %s", h.number, h.said)
		}
		h.mu.Unlock()
	}

	r.Example = cmp.Or(example, r.Example)
	if len(times) > 0 {
		slices.SortFunc(times, time.Time.Compare)
		r.Half = times[len(times)/2]
		r.Last = times[len(times)-1]
	}
	return r
}

// host simulates the part of a host that uses the store. It has no devices, routes and rules.
type host struct {
	number      int
	all         *Hosts
	observation *observation
	former      *subnet.Lease // lease of its last run; nil if the host starts without it
	manager     manager       // nil until load
	cancel      context.CancelFunc
	done        chan struct{}

	mu       sync.Mutex
	own      *subnet.Lease
	acquired time.Time // when own was acquired
	renewed  time.Time // when own was renewed last
	outages  int
	said     string
	ended    error // error with which the host has ended although it was not stopped
}

func newHost(number int, all *Hosts) *host {
	return &host{number: number, all: all, observation: &observation{registry: all.registry, own: -1}, done: make(chan struct{})}
}

// manager is a subnet.Manager that can be closed.
type manager interface {
	subnet.Manager
	Close() error
}

func (h *host) load(a Start) (err error) {
	h.manager, err = h.open(a, h.former)
	return err
}

// start starts run in the background: the host acquires a lease, renews it and watches the leases of
// other hosts, like a daemon. The caller must have called load.
func (h *host) start() {
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logr.Discard()))
	h.cancel = cancel
	go func() {
		defer close(h.done)
		if err := h.run(ctx); ctx.Err() == nil {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.ended = err
		}
	}()
}

func (h *host) stop() {
	h.cancel()
	<-h.done
}

// run acquires the host's lease. Then it keeps this lease and watches those of other hosts, until ctx
// ends or one of these two tasks fails. At the end it closes the manager.
func (h *host) run(ctx context.Context) error {
	m := h.manager
	defer m.Close()
	own, err := h.acquire(ctx, m, h.former)
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.own, h.acquired = &own, time.Now()
	h.mu.Unlock()
	h.observation.acquired(own)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	kept := make(chan error, 1)
	go func() {
		kept <- m.Keep(ctx, own)
		cancel()
	}()

	err = m.Watch(ctx, h.observation.take)
	cancel()
	return errors.Join(err, <-kept)
}

// acquire takes a lease by the same steps as the daemon. If no subnet is free, it tries again each
// second until ctx ends.
func (h *host) acquire(ctx context.Context, m manager, former *subnet.Lease) (own subnet.Lease, err error) {
	if _, err := m.PublicIPs(ctx); err != nil {
		return own, err
	}
	if r, ok := m.(subnet.Resumer); ok && former != nil {
		r.Resumed(*former)
	}

	for {
		cfg, err := m.Config(ctx)
		if err != nil {
			return own, err
		}
		claim := subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{{PublicIP: publicIP(h.number), Data: vtep(h.number)}}}
		before, err := m.Recall(ctx, claim)
		if err != nil {
			return own, err
		}

		switch {
		case len(before.Endpoints) > 0:
			claim.Endpoints[0].Subnet = before.Endpoints[0].Subnet
		case former != nil:
			claim.Endpoints[0].Subnet = former.Endpoints[0].Subnet
		}
		if own, err = m.Acquire(ctx, cfg, claim); !errors.Is(err, subnet.ErrNoSubnets) {
			return own, err
		}

		select {
		case <-ctx.Done():
			return own, ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

func (h *host) lease() (subnet.Lease, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.own == nil {
		return subnet.Lease{}, false
	}
	return *h.own, true
}

func (h *host) why() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended == nil {
		return ""
	}
	return fmt.Sprintf("host %d has ended: %v", h.number, h.ended)
}

// onStatus is called by the manager: with an error when it loses the store, and with nil when the
// store is back.
func (h *host) onStatus(err error) {
	if err == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.outages++
	h.said = err.Error()
}

// onLease is called by the manager of etcd when it acquires this host's lease and when it renews it.
// onLease records only renewals. With Kubernetes, hosts renew no leases.
func (h *host) onLease(subnet.Lease) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.own != nil {
		h.renewed = time.Now()
	}
}

func (h *host) renewedSince(t time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.renewed.Before(t)
}
