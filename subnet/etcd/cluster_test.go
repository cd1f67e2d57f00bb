package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"flanneld/subnet/subnettest"
)

// newCluster starts an etcd of three members that ends with the test.
func newCluster(t *testing.T) []*server {
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
		cfg.TickMs, cfg.ElectionMs = 100, 1000
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

// TestLeaderLoss takes the leader of three away: what is written under the next
// one arrives, and the own lease stays.
func TestLeaderLoss(t *testing.T) {
	members := newCluster(t)
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
	w.Until(t, "nobody", subnettest.Has())
	ctx, cancel := context.WithCancel(t.Context())
	kept := make(chan error, 1)
	go func() { kept <- m.Keep(ctx, own) }()
	defer func() {
		cancel()
		if err := <-kept; !errors.Is(err, context.Canceled) {
			t.Errorf("Keep: %v", err)
		}
	}()

	leader.stop()
	eventually(t, "a write after the leader is gone", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.kv.Put(ctx, f.prefix+"/subnets/10.5.200.0-24", value("192.0.2.200"))
		return err == nil
	})
	w.Until(t, "what was written then", subnettest.Has("10.5.200.0-24"))
	r, err := f.kv.Get(t.Context(), f.prefix+"/subnets/"+own.Key)
	if err != nil || len(r.Kvs) != 1 {
		t.Errorf("own lease after the leader is gone: %v, %v", r, err)
	}
}
