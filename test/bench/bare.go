// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/must"
)

// barePrefix is the prefix of etcd keys that a bare watch sees and the daemon does not.
const barePrefix = "/bare/"

// bareList returns the time from exec until a minimal etcd client has read all leases.
func (b *bed) bareList(ctx context.Context) time.Duration {
	began := time.Now()
	_, stop := b.startBare(ctx, plainList, b.lab.Host(1).EtcdEndpoint())
	took := time.Since(began)
	stop()
	return took
}

// bareEvents makes as many writes as events makes for the daemon, at the same rate, and
// returns the CPU time per event of a minimal process that watches them.
func (b *bed) bareEvents(ctx context.Context, count int) time.Duration {
	p := makePeer(len(b.peers))
	watcher, stop := b.startBare(ctx, plainWatch, b.lab.Host(1).EtcdEndpoint())
	defer stop()
	key := barePrefix + p.subnet.String()
	const every = 2 * eventPause // the same rate as in events, where every other write is for a bare watch
	return spent(figures.ProcessCPU, watcher, func() {
		for range count {
			b.put(ctx, key, p.value(b.backend, ""))
			pause(ctx, every)
			b.remove(ctx, key)
			pause(ctx, every)
		}
	}) / time.Duration(2*count)
}

// startBare starts the minimal program called name on host 1, with config as its only
// argument. It waits until the program reports that it has read the data, or that its
// watch has begun. The caller must call stop. See runPlain.
func (b *bed) startBare(ctx context.Context, name, config string) (pid int, stop func()) {
	cmd := &exec.Cmd{Path: must.Get(os.Executable()), Args: []string{name, config}, Stderr: os.Stderr}
	says := must.Get(cmd.StdoutPipe())
	must.Do(b.lab.Host(1).Start(cmd))
	stop = func() {
		_ = cmd.Process.Kill() // the result of a killed process does not matter
		_ = cmd.Wait()
	}

	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })() // ends the wait below, because the program may never report
	if _, err := says.Read(make([]byte, 1)); err != nil {
		stop()
		must.Fail("%s has ended: %w", name, err)
	}
	return cmd.Process.Pid, stop
}

func sayThere() { must.Get(os.Stdout.Write([]byte{'.'})) }

// bareClient returns an etcd client with a window of fixed size. Otherwise gRPC would
// send a ping after each message to find the best size, and for a small event the ping is
// most of the work.
func bareClient(endpoint string) *clientv3.Client {
	const window = 1 << 20
	return must.Get(clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialOptions: []grpc.DialOption{
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window),
	}}))
}

// runList reads all leases once, and reports that.
func runList(endpoint string) {
	client := bareClient(endpoint)
	defer client.Close()
	must.Get(client.Get(context.Background(), etcdPrefix+"/subnets/", clientv3.WithPrefix()))
	sayThere()
}

// runWatch watches barePrefix until the process is killed. It reports that the watch has
// begun.
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
