// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// newCluster starts an etcd of three members that ends with the test. Members elect another leader
// if the leader is silent for the time election.
func newCluster(t *testing.T, election time.Duration) []*server {
	t.Helper()
	var members []*server
	var initial []string
	var configs []*embed.Config
	for i := range 3 {
		s := &server{url: "http://" + freeAddr(t)}
		client, err := url.Parse(s.url)
		if err != nil {
			t.Fatal(err)
		}
		peer := url.URL{Scheme: "http", Host: freeAddr(t)}
		cfg := embed.NewConfig()
		cfg.Name = fmt.Sprintf("m%d", i)
		cfg.Dir = filepath.Join(t.TempDir(), cfg.Name)
		cfg.UnsafeNoFsync = true
		cfg.TickMs, cfg.ElectionMs = 100, uint(election.Milliseconds())
		cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
		cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
		cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
		initial = append(initial, cfg.Name+"="+peer.String())
		members, configs = append(members, s), append(configs, cfg)
	}
	for i, cfg := range configs {
		cfg.InitialCluster = strings.Join(initial, ",")
		etcd, err := embed.StartEtcd(cfg)
		if err != nil {
			t.Fatal(err)
		}
		members[i].etcd = etcd
		t.Cleanup(members[i].stop)
	}
	for _, s := range members {
		select {
		case <-s.etcd.Server.ReadyNotify():
		case <-time.After(patience):
			t.Fatal("the cluster is not ready")
		}
	}
	return members
}

// TestLeaderLoss stops the member that is the leader of three. A watch must bring a write that the
// next leader accepts, and this host's lease must stay.
func TestLeaderLoss(t *testing.T) {
	members := newCluster(t, time.Second)
	leader := members[0]
	for _, s := range members {
		if s.etcd.Server.Leader() == s.etcd.Server.MemberID() {
			leader = s
		}
	}
	var urls []string
	var others []*server
	for _, s := range members {
		urls = append(urls, s.url)
		if s != leader {
			others = append(others, s)
		}
	}
	f := newFixture(t, others[0])
	f.put(t, "config", configV4)
	m := f.manager(t, func(c *Config) { c.Endpoints = urls })
	own := acquire(t, m, claim("192.0.2.1"))
	w := subnettest.Watch(t, m)
	w.Until(t, "no peer", subnettest.Has())
	ctx, cancel := context.WithCancel(t.Context())
	kept := make(chan error, 1)
	go func() { kept <- m.Keep(ctx, own) }()
	defer func() {
		cancel()
		if err := waittest.Receive(t, patience, "the end of Keep", kept); !errors.Is(err, context.Canceled) {
			t.Errorf("Keep: %v", err)
		}
	}()

	leader.stop()
	waittest.Until(t, patience, "a write after the leader is gone", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.kv.Put(ctx, f.prefix+"/subnets/10.5.200.0-24", leaseValue("192.0.2.200"))
		return err == nil
	})
	w.Until(t, "what was written then", subnettest.Has("10.5.200.0-24"))
	r, err := f.kv.Get(t.Context(), f.prefix+"/subnets/"+own.Key)
	if err != nil || len(r.Kvs) != 1 {
		t.Errorf("own lease after the leader is gone: %v, %v", r, err)
	}
}

func urlsOf(members []*server) (urls []string) {
	for _, s := range members {
		urls = append(urls, s.url)
	}
	return urls
}

// watchMany starts 12 managers that watch a cluster without leases, and waits for the first
// snapshot of each. options change each manager before it starts.
func watchMany(t *testing.T, f *fixture, members []*server, options ...func(*Manager)) []*subnettest.Watcher {
	t.Helper()
	watchers := make([]*subnettest.Watcher, 0, 12)
	for range cap(watchers) {
		m := f.manager(t, func(c *Config) { c.Endpoints = urlsOf(members) })
		for _, o := range options {
			o(m)
		}
		w := subnettest.Watch(t, m)
		w.Until(t, "no peer", subnettest.Has())
		watchers = append(watchers, w)
	}
	return watchers
}

// TestMemberCutOff separates one of three members from the others, which continue without it. Hosts
// that were connected to that member must change to another one.
//
//stages:rest it waits for a cluster of three etcds to notice a lost member
func TestMemberCutOff(t *testing.T) {
	members := newCluster(t, time.Second)
	cut := members[0]
	f := newFixture(t, members[1])
	watchers := watchMany(t, f, members)
	for _, s := range members[1:] {
		cut.etcd.Server.CutPeer(s.etcd.Server.MemberID())
	}
	waittest.Until(t, patience, "a write that the other two accept", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.kv.Put(ctx, f.prefix+"/subnets/10.5.200.0-24", leaseValue("192.0.2.200"))
		return err == nil
	})
	for i, w := range watchers {
		w.Until(t, fmt.Sprintf("that write, by host %d of %d", i+1, len(watchers)), subnettest.Has("10.5.200.0-24"))
	}
}

// TestMemberHangs makes the disk of one of three members hang. That member commits nothing, but
// continues to report that there is nothing new. Hosts that were connected to it must change to
// another member. The member is not the leader, because the others would first have to elect
// another one.
//
//stages:rest it waits for a cluster of three etcds to notice a hanging member
func TestMemberHangs(t *testing.T) {
	members := newCluster(t, 5*time.Second) // long, so that a busy machine does not make the hanging member the leader
	slices.SortFunc(members, func(a, b *server) int {
		leads := func(s *server) int {
			if s.etcd.Server.Leader() == s.etcd.Server.MemberID() {
				return 1
			}
			return 0
		}
		return leads(a) - leads(b)
	})
	f := newFixture(t, members[1])
	watchers := watchMany(t, f, members, func(m *Manager) { m.timing.check = time.Second })
	disk := members[0].etcd.Server.Backend().BatchTx()
	disk.LockOutsideApply()
	t.Cleanup(disk.Unlock)
	f.put(t, "subnets/10.5.200.0-24", leaseValue("192.0.2.200"))
	for i, w := range watchers {
		w.Until(t, fmt.Sprintf("that write, by host %d of %d", i+1, len(watchers)), subnettest.Has("10.5.200.0-24"))
	}
}

// TestMemberDoesNotAnswer gives a manager two bad endpoints before a good one. The first accepts
// connections and sends nothing, like a stopped process. The second refuses connections. OnStatus
// must not get an error.
func TestMemberDoesNotAnswer(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	f.put(t, "config", configV4)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	var status statuses
	m := f.manager(t, status.option)
	m.client.endpoints = []string{"http://" + silent.Addr().String(), "http://" + freeAddr(t), f.url}
	if _, err := m.Config(t.Context()); err != nil {
		t.Error(err)
	}
	for _, err := range status.list() {
		if err != nil {
			t.Error(err)
		}
	}
}

// TestComeBack makes the preferred endpoint of a host fail and work again. The host must use the
// other endpoint, stay with it while the preferred one accepts connections and does not answer, and
// come back when that one answers. The change back must not count as an outage.
func TestComeBack(t *testing.T) {
	s := sharedServer(t)
	f := newFixture(t, s)
	preferred, other := newProxy(t, s), newProxy(t, s)
	var status statuses
	m := f.manager(t, status.option)
	m.client.endpoints, m.client.preferred = []string{preferred.url(), other.url()}, preferred.url()
	m.timing.check, m.timing.back, m.timing.request = 20*time.Millisecond, 100*time.Millisecond, 500*time.Millisecond
	w := subnettest.Watch(t, m)
	w.Until(t, "no peer", subnettest.Has())
	var keys []string
	expectNews := func() {
		t.Helper()
		keys = append(keys, fmt.Sprintf("10.5.%d.0-24", 200+len(keys)))
		f.put(t, "subnets/"+keys[len(keys)-1], leaseValue(fmt.Sprintf("192.0.2.%d", 200+len(keys))))
		w.Until(t, "the next lease", subnettest.Has(keys...))
	}
	first := func() string {
		m.client.mu.Lock()
		defer m.client.mu.Unlock()
		return m.client.endpoints[0]
	}
	expectNews() // the watch uses the preferred endpoint
	preferred.cut()
	expectNews()
	if first() != other.url() {
		t.Errorf("the first endpoint is %s, want the other one", first())
	}
	before := len(status.list())
	preferred.open(t)
	preferred.stall()
	<-time.After(2 * m.timing.request)
	expectNews()
	if first() != other.url() {
		t.Errorf("the first endpoint is %s, which does not answer", first())
	}
	preferred.cut()
	preferred.open(t)
	waittest.Until(t, patience, "the preferred endpoint is the first one again", func() bool { return first() == preferred.url() })
	expectNews()
	other.cut()
	expectNews()
	for _, err := range status.list()[before:] {
		if err != nil {
			t.Errorf("after the first change: %v", err)
		}
	}
}
