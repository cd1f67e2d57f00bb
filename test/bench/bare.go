// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/figures"
)

// barePrefix is the prefix of etcd keys that a bare watch sees and the daemon does not.
const barePrefix = "/bare/"

// bareList returns the time from exec until a minimal etcd client has read all leases.
func (b *bed) bareList(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	_, stop, err := b.startBare(ctx, plainList, b.lab.Host(1).EtcdEndpoint())
	took := time.Since(began)
	if err != nil {
		return 0, fmt.Errorf("bare list: %w", err)
	}
	stop()
	return took, nil
}

// bareEvents makes as many writes as events makes for the daemon, at the same rate, and
// returns the CPU time per event of a minimal process that watches them.
func (b *bed) bareEvents(ctx context.Context, count int) (time.Duration, error) {
	p := makePeer(len(b.peers))
	value, err := p.value(b.backend)
	if err != nil {
		return 0, err
	}
	watcher, stop, err := b.startBare(ctx, plainWatch, b.lab.Host(1).EtcdEndpoint())
	if err != nil {
		return 0, fmt.Errorf("bare watch: %w", err)
	}
	defer stop()
	before, err := figures.ProcessCPU(watcher)
	if err != nil {
		return 0, err
	}
	key := barePrefix + p.subnet.String()
	const every = 2 * eventPause // the same rate as in events, where every other write is for a bare watch
	for range count {
		for _, write := range []func() error{
			func() error { return b.put(ctx, key, value) },
			func() error { return b.remove(ctx, key) },
		} {
			if err := errors.Join(write(), wait.For(ctx, every)); err != nil {
				return 0, err
			}
		}
	}
	after, err := figures.ProcessCPU(watcher)
	return (after - before) / time.Duration(2*count), err
}

// startBare starts the minimal program called name on host 1, with config as its only
// argument. It waits until the program reports that it has read the data, or that its
// watch has begun. The caller must call stop, unless startBare returns an error. See
// runPlain.
func (b *bed) startBare(ctx context.Context, name, config string) (pid int, stop func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, nil, err
	}
	cmd := &exec.Cmd{Path: self, Args: []string{name, config}, Stderr: os.Stderr}
	says, err := cmd.StdoutPipe()
	if err != nil {
		return 0, nil, err
	}
	if err := b.lab.Host(1).Start(cmd); err != nil {
		return 0, nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill() // the result of a killed process does not matter
		_ = cmd.Wait()
	}

	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })() // ends the wait below, because the program may never report
	if _, err := says.Read(make([]byte, 1)); err != nil {
		stop()
		return 0, nil, fmt.Errorf("%s has ended: %w", name, err)
	}
	return cmd.Process.Pid, stop, nil
}

func sayThere() error {
	_, err := os.Stdout.Write([]byte{'.'})
	return err
}

// bareClient returns an etcd client with a window of fixed size. Otherwise gRPC would
// send a ping after each message to find the best size, and for a small event the ping is
// most of the work.
func bareClient(endpoint string) (*clientv3.Client, error) {
	const window = 1 << 20
	return clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialOptions: []grpc.DialOption{
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window),
	}})
}

// runList reads all leases once, and reports that.
func runList(endpoint string) error {
	client, err := bareClient(endpoint)
	if err != nil {
		return err
	}
	defer client.Close()
	if _, err := client.Get(context.Background(), etcdPrefix+"/subnets/", clientv3.WithPrefix()); err != nil {
		return err
	}
	return sayThere()
}

// runWatch watches barePrefix until the process is killed. It reports that the watch has
// begun.
func runWatch(endpoint string) error {
	client, err := bareClient(endpoint)
	if err != nil {
		return err
	}
	defer client.Close()

	for resp := range client.Watch(context.Background(), barePrefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify()) {
		if err := resp.Err(); err != nil {
			return err
		}
		if resp.Created {
			if err := sayThere(); err != nil {
				return err
			}
		}
	}
	return errors.New("the watch has ended")
}
