// SPDX-License-Identifier: Apache-2.0

// Package lab builds hosts out of network namespaces: an underlay of one or several L2
// segments, an etcd and a Kubernetes API server, real flanneld processes, and pods behind them.
//
// A lab leaves nothing behind. Its namespaces have no name and exist only while the
// process holds them. Its files are on tmpfs mounts that only those namespaces see. Every
// child process dies with the thread that started it. So a lab disappears with its
// process, however that ends, and several labs do not affect each other.
package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Prefix is the etcd prefix of a lab's network. It is flanneld's default.
const Prefix = "/coreos.com/network"

const (
	maxHosts    = 200 // the last byte of a host's address is its number; the router uses 254
	maxSegments = 100
	minMTU      = 1280 // the least MTU of a link with IPv6
	maxMTU      = 65535
)

// Config describes a lab.
type Config struct {
	Hosts    int             // 0 means 3
	Segments int             // number of L2 segments, 0 means 1; host i is on the segment with index (i-1)%Segments
	Families []prefix.Family // of the underlay; nil means IPv4
	MTU      int             // of the underlay, in bytes; 0 means 1500

	// Loss (in percent) and Latency (one way) need netem in the kernel. Rate (bytes per
	// second towards each host) needs tbf. Zero turns each of them off.
	Loss    float64
	Latency time.Duration
	Rate    uint64

	// Flanneld is the path of the binary that hosts run unless FlanneldOptions names
	// another.
	Flanneld string
	// Network is the network configuration in the store at the start; nil means that the store
	// contains none.
	Network json.RawMessage
	// Networks, if not empty, makes each daemon serve these named networks instead of the
	// network of the field Network.
	Networks []Network
	Etcd     EtcdOptions
	// Progress, if not nil, is called after each step of the set-up.
	Progress func(step string)
}

func (c *Config) setDefaults() {
	c.Hosts = cmp.Or(c.Hosts, 3)
	c.Segments = cmp.Or(c.Segments, 1)
	c.MTU = cmp.Or(c.MTU, 1500)
	if len(c.Families) == 0 {
		c.Families = []prefix.Family{prefix.IPv4}
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
}

func (c *Config) validate() error {
	for _, r := range []struct {
		what         string
		have, lo, hi int
	}{
		{"hosts", c.Hosts, 1, maxHosts},
		{"L2 segments", c.Segments, 1, maxSegments},
		{"underlay MTU", c.MTU, minMTU, maxMTU},
		{"networks", len(c.Networks), 0, maxNetworks},
	} {
		if r.have < r.lo || r.have > r.hi {
			return fmt.Errorf("%s: %d is not in %d to %d", r.what, r.have, r.lo, r.hi)
		}
	}

	if c.Loss < 0 || c.Loss > 100 {
		return fmt.Errorf("loss: %g is not a percentage", c.Loss)
	}
	if c.Latency < 0 {
		return fmt.Errorf("latency: %v is negative", c.Latency)
	}

	for _, f := range c.Families {
		if f != prefix.IPv4 && f != prefix.IPv6 {
			return fmt.Errorf("address family: %d is neither 4 nor 6", int(f))
		}
	}
	return nil
}

// Lab is a running lab. Its methods may be called by several goroutines at the same time.
type Lab struct {
	cfg      Config
	underlay *Namespace
	hosts    []*Host
	etcd     *Etcd // nil if Config.Etcd.Disabled

	mu  sync.Mutex
	api *APIServer // nil until StartAPIServer
}

// New builds the underlay and the hosts, and starts the store unless it is disabled. The
// caller must call Close, unless New returns an error.
func New(ctx context.Context, cfg Config) (*Lab, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("a lab needs root: it makes network namespaces")
	}

	l := &Lab{cfg: cfg}
	if err := l.build(ctx); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

func (l *Lab) build(ctx context.Context) (err error) {
	if l.underlay, err = newNamespace("underlay", enterHostNamespaces); err != nil {
		return err
	}
	if err := l.buildSegments(ctx); err != nil {
		return fmt.Errorf("build underlay: %w", err)
	}

	for i := 1; i <= l.cfg.Hosts; i++ {
		h := &Host{lab: l, number: i, segment: (i - 1) % l.cfg.Segments}
		err := h.install(ctx)
		if h.Namespace != nil { // for Close
			l.hosts = append(l.hosts, h)
		}
		if err != nil {
			return fmt.Errorf("build host%d: %w", i, err)
		}
	}
	if err := l.pinNeighbours(ctx); err != nil {
		return fmt.Errorf("build underlay: %w", err)
	}
	l.cfg.Progress(fmt.Sprintf("%s on %s", count(l.cfg.Hosts, "host"), count(l.cfg.Segments, "L2 segment")))

	if l.cfg.Etcd.Disabled {
		return nil
	}
	if l.etcd, err = newEtcd(l.underlay, l.endpointAddrs(), l.cfg.Etcd); err != nil {
		return fmt.Errorf("prepare etcd: %w", err)
	}
	if err := l.etcd.Start(ctx); err != nil {
		return err
	}
	if err := l.putNetworks(ctx); err != nil {
		return err
	}
	l.cfg.Progress("etcd")
	return nil
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// Close ends all processes of the lab and removes its namespaces. It gives daemons two
// seconds to stop.
func (l *Lab) Close() {
	var daemons []*Daemon
	for _, h := range l.hosts {
		daemons = append(daemons, h.running()...)
	}
	stopAll(daemons)

	l.mu.Lock()
	api := l.api
	l.mu.Unlock()
	if api != nil {
		api.Kill() // before etcd, for which the API server would wait
	}
	if l.etcd != nil {
		l.etcd.Kill()
	}

	for _, h := range l.hosts {
		for _, p := range h.Pods() {
			p.close()
		}
		h.close()
	}
	if l.underlay != nil {
		l.underlay.close()
	}
}

// Hosts returns the hosts in order. The caller owns the slice.
func (l *Lab) Hosts() []*Host { return slices.Clone(l.hosts) }

// Host returns host number i, counted from 1.
func (l *Lab) Host(i int) *Host { return l.hosts[i-1] }

// Pods returns the pods of all hosts: those of host1 first, each in the order of their
// creation.
func (l *Lab) Pods() []*Pod {
	var pods []*Pod
	for _, h := range l.hosts {
		pods = append(pods, h.Pods()...)
	}
	return pods
}

// Etcd returns the store, or nil if the lab has none.
func (l *Lab) Etcd() *Etcd { return l.etcd }

// Underlay returns the router's namespace. It contains the bridges of the segments, the
// store and the API server.
func (l *Lab) Underlay() *Namespace { return l.underlay }

// Families returns the configured address families of the underlay.
func (l *Lab) Families() []prefix.Family { return slices.Clone(l.cfg.Families) }

// StartFlanneld starts flanneld with the same options on every host and waits until all
// of them are ready.
func (l *Lab) StartFlanneld(ctx context.Context, o FlanneldOptions) error {
	for _, h := range l.hosts {
		if _, err := h.StartFlanneld(ctx, o); err != nil {
			return err
		}
	}
	for _, h := range l.hosts {
		if err := h.Daemon().Ready(ctx); err != nil {
			return err
		}
	}
	l.cfg.Progress("flanneld on every host")
	return nil
}

// AddPods adds one pod to every host. If the lab has several networks, it adds one to every
// host in each network.
func (l *Lab) AddPods(ctx context.Context) error {
	for _, h := range l.hosts {
		if err := h.AddPods(ctx); err != nil {
			return err
		}
	}
	l.cfg.Progress("a pod on every host" + map[bool]string{true: " in each network"}[len(l.networkNames()) > 0])
	return nil
}
