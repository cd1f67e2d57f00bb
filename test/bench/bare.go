// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/must"
)

// barePrefix is the prefix of etcd keys that a bare watch sees and the daemon does not.
const barePrefix = "/bare/"

func (b *bed) bareList(ctx context.Context) time.Duration {
	began := time.Now()
	client := b.startPlain(ctx, b.lab.Host(1), plainList, b.lab.Host(1).EtcdEndpoint())
	took := time.Since(began)
	end(client)
	return took
}

// bareEvents makes as many writes as events makes for the daemon, at the same rate, and
// returns the CPU time per event of a minimal process that watches them.
func (b *bed) bareEvents(ctx context.Context, count int) time.Duration {
	p := makePeer(len(b.peers))
	watcher := b.startPlain(ctx, b.lab.Host(1), plainWatch, b.lab.Host(1).EtcdEndpoint())
	defer end(watcher)
	key := barePrefix + p.subnet.String()
	const every = 2 * eventPause // the same rate as in events, where every other write is for a bare watch
	return spent(figures.ProcessCPU, watcher.Process.Pid, func() {
		for range count {
			b.put(ctx, key, p.value(b.backend, ""))
			pause(ctx, every)
			b.remove(ctx, key)
			pause(ctx, every)
		}
	}) / time.Duration(2*count)
}

// bareClient returns an etcd client with a window of fixed size. Otherwise gRPC would
// send a ping after each message to find the best size, and for a small event the ping is
// most of the work.
func bareClient(endpoint string) *clientv3.Client {
	const window = 1 << 20
	return must.Get(clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialOptions: []grpc.DialOption{
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window),
	}}))
}

func runList(endpoint string) {
	client := bareClient(endpoint)
	defer client.Close()
	must.Get(client.Get(context.Background(), etcdPrefix+"/subnets/", clientv3.WithPrefix()))
	sayThere()
}

func runWatch(endpoint string) {
	client := bareClient(endpoint)
	defer client.Close()

	for resp := range client.Watch(context.Background(), barePrefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify()) {
		must.Do(resp.Err())
		if resp.Created {
			sayThere()
		}
	}
	must.Fail("the watch has ended")
}
