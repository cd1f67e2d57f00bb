// SPDX-License-Identifier: Apache-2.0

// Package pathmtu finds the size of the largest packet that passes to each peer, with echo requests that
// must not be fragmented. It needs no ICMP error of a router.
//
//   - pathmtu.go has the Prober, with the paths to all peers and what is known of them.
//   - check.go checks one path: it finds a smaller size, or a larger one again.
//
// The package changes nothing: its user asks for the sizes and sets them.
package pathmtu

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/pkg/probe/schedule"
)

const (
	// Rate is the maximum number of echo requests per second that a host sends to find path MTUs, in all
	// its networks together.
	Rate = 10
	// interval is the least time between two checks of a path. The time is longer if there are more paths
	// than Rate allows.
	interval = 2 * time.Second
	// atOnce limits the number of paths that are checked at the same time.
	atOnce = 64
	// searchesAtOnce limits the number of searches at the same time, because checks of other paths need
	// some of Rate too.
	searchesAtOnce = 4
)

// Path is the way from this host to one subnet of a peer.
type Path struct {
	Subnet   netip.Prefix
	Device   string     // through which the packets leave
	From, To netip.Addr // addresses of the requests: of this host, and of the peer's device
	PublicIP netip.Addr // of the peer
	Full     int        // MTU of the device in bytes
	Least    int        // smallest size in bytes that the path may get; not less than the family of the addresses allows
}

// state is the present knowledge of a path. Only its check changes size and raised, and locks the Prober to write
// size, which others read.
type state struct {
	key    string
	path   Path
	size   int       // of the largest packet that passes, in bytes
	raised time.Time // time of the last attempt to find a larger size, or of the last change
	// searches limits the searches of a path that changes all the time, which would otherwise use up the packets
	// that all paths may send.
	searches *rate.Limiter
}

// Change is a change of the size of a path.
type Change struct {
	Key string // of the peer's lease
	Path
	Before, Now int // sizes in bytes
}

// Config configures a Prober.
type Config struct {
	Limit *rate.Limiter
	// Before has the sizes that an earlier prober has found. A path begins with its size in Before, so
	// that a restart never sends larger packets than the path is known to carry. NewProber takes
	// ownership of the map.
	Before map[netip.Prefix]int
	// Resized is called when the size of a path has changed: Take returns the key of its peer from then on.
	// Resized is required, and must not call the Prober, which is locked.
	Resized func()
	// Changed is called after each change, unless many paths change at once. It may be nil.
	Changed func(Change)
}

// Prober keeps the sizes of the paths to all peers. Its methods are safe for concurrent use.
type Prober struct {
	Config
	// echo reports whether a packet is answered within patience. Tests replace it.
	echo func(ctx context.Context, p Path, size int, patience time.Duration) (rtt time.Duration, ok bool)

	order    *schedule.Queue[*state] // paths that were never checked come first
	reports  *loglimit.Changes
	searches chan struct{} // has an element for each search that is under way
	found    sync.Map      // last size that a search has found, by device

	mu      sync.Mutex
	paths   map[netip.Prefix]*state
	peers   map[string][]Path   // by key of the lease
	resized map[string]struct{} // keys for Take
}

// NewLimit returns the limit for all probers of a host. It spreads the packets evenly.
func NewLimit() *rate.Limiter { return rate.NewLimiter(Rate, 1) }

// NewProber returns a prober.
func NewProber(c Config) *Prober {
	if c.Before == nil {
		c.Before = map[netip.Prefix]int{}
	}
	return &Prober{
		Config: c, order: schedule.NewQueue[*state](), reports: loglimit.NewChanges(loglimit.Burst), searches: make(chan struct{}, searchesAtOnce),
		paths: map[netip.Prefix]*state{}, peers: map[string][]Path{}, resized: map[string]struct{}{},
	}
}

// Run checks paths until ctx ends, and returns when all checks have ended.
func (p *Prober) Run(ctx context.Context) {
	if p.echo == nil {
		pinger := ping.NewPinger()
		defer pinger.Close()
		p.echo = echoes(pinger)
	}

	p.order.Run(ctx, schedule.Checks[*state]{AtOnce: atOnce, Permit: p.Limit.Wait, Check: p.check})
}

// echoes returns the function for Prober.echo.
func echoes(pinger *ping.Pinger) func(ctx context.Context, p Path, size int, patience time.Duration) (time.Duration, bool) {
	var logged sync.Once
	return func(ctx context.Context, p Path, size int, patience time.Duration) (time.Duration, bool) {
		rtt, err := pinger.Ping(ctx, p.To, ping.Path{Device: p.Device, From: p.From, Size: size, Whole: true}, patience)
		if errors.Is(err, ping.ErrNoSocket) {
			logged.Do(func() {
				klog.FromContext(ctx).Error(err, "cannot probe the MTU of paths: routes keep the MTU that they have")
			})
		}
		return rtt, err == nil
	}
}

// Aim replaces the paths to the peer with that key, and takes ownership of paths. The caller passes no
// paths if the peer is gone. A path that differs is checked soon. Until then it has the size of the former
// path to the subnet.
func (p *Prober) Aim(key string, paths []Path) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Equal(p.peers[key], paths) {
		return
	}

	for _, old := range p.peers[key] {
		if s := p.paths[old.Subnet]; s != nil && s.key == key && !slices.Contains(paths, old) {
			p.remove(s)
			p.Before[old.Subnet] = s.size // another lease may get the subnet next
		}
	}

	delete(p.peers, key)
	if len(paths) > 0 {
		p.peers[key] = paths
	}

	for _, path := range paths {
		if s := p.paths[path.Subnet]; s != nil && s.path == path {
			s.key = key
		} else {
			p.add(key, path)
		}
	}
}

// The caller holds p.mu.
// has reports whether s is not gone, and not replaced by another path to its subnet. The caller holds p.mu.
func (p *Prober) has(s *state) bool { return p.paths[s.path.Subnet] == s }

func (p *Prober) remove(s *state) {
	p.order.Remove(s)
	delete(p.paths, s.path.Subnet)
}

// add replaces another path to the same subnet, and takes over its size. The caller holds p.mu.
func (p *Prober) add(key string, path Path) {
	s := &state{
		key: key, path: path, size: path.Full, raised: time.Now(),
		searches: rate.NewLimiter(rate.Every(searchEvery), searchBurst),
	}
	before := p.Before[path.Subnet]
	delete(p.Before, path.Subnet)
	if other := p.paths[path.Subnet]; other != nil {
		before = other.size
		s.searches = other.searches
		p.remove(other)
	}
	if before >= path.Least && before < path.Full {
		s.size = before
	}

	p.paths[path.Subnet] = s
	p.order.Add(s, time.Time{})
}

// Retain calls the function is with the key of each peer, and removes the peer if the result is false. The
// Prober is locked during these calls.
func (p *Prober) Retain(is func(key string) bool) {
	p.mu.Lock()
	gone := slices.DeleteFunc(slices.Collect(maps.Keys(p.peers)), is)
	p.mu.Unlock()
	for _, key := range gone {
		p.Aim(key, nil)
	}
}

// Size returns the size in bytes of the largest packet that passes to a subnet. It returns 0 if that is the
// MTU of the device, or if there is no path to the subnet.
func (p *Prober) Size(subnet netip.Prefix) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.paths[subnet]; s != nil && s.size < s.path.Full {
		return s.size
	}
	return 0
}

// Take returns, in any order, the keys of the peers with a path whose size has changed since the last
// call.
func (p *Prober) Take() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	keys := slices.Collect(maps.Keys(p.resized))
	clear(p.resized)
	return keys
}

// set returns false if the path is gone.
func (p *Prober) set(s *state, size int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.has(s) {
		return false
	}
	if s.size != size {
		s.size = size
		s.raised = time.Now()
		p.resized[s.key] = struct{}{}
		p.Resized()
	}
	return true
}

// tell reports a change of a path's size, unless many paths change at once.
func (p *Prober) tell(ctx context.Context, c Change) {
	log, reported := p.reports.Next(klog.FromContext(ctx))
	if !reported {
		return
	}

	log = log.WithValues("peer", c.Key, "subnet", c.Subnet, "publicIP", c.PublicIP, "mtu", c.Now, "before", c.Before, "device", c.Full)
	switch {
	case c.Now == c.Full:
		log.Info("the path to a peer carries packets of the full MTU again")
	case c.Now > c.Before:
		log.Info("the path to a peer carries larger packets than before")
	default:
		log.Info("the path to a peer carries only smaller packets: the MTU of its route is lowered")
	}
	if p.Changed != nil {
		p.Changed(c)
	}
}
