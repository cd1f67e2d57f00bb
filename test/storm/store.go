// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// server is a store under test: one process in the namespace of the lab's router.
// The process is etcd, or a Kubernetes API server without the etcd that stores its
// data.
type server interface {
	name() string
	pid() int
	restart(ctx context.Context)
	// calls returns how many requests the process has received since its start, by
	// kind. An API server counts only requests for Nodes.
	calls(ctx context.Context) figures.Counts
	// writeAndRead writes and reads something that is not flannel's, as other users of the store do.
	writeAndRead(ctx context.Context)
	// bystanderCalls returns the kinds under which calls counts the requests of
	// writeAndRead, if it counts them.
	bystanderCalls() []string
	// reach returns how hosts reach the store.
	reach() Store
	// join writes what hosts need before they start, and leave deletes it together with their leases, as
	// if these had expired. from is the number of the first host, and to the one after that of the last.
	join(ctx context.Context, from, to int)
	leave(ctx context.Context, leases []subnet.Lease, from, to int)
	// putExtra writes a lease for the host extra, which does not exist, and returns it.
	putExtra(ctx context.Context) subnet.Lease
	close()
}

// usage is what a process has used so far.
type usage struct {
	cpu  time.Duration
	peak float64 // largest memory in bytes since the process started, or since figures.ResetPeak
}

func usageOf(pid int) usage { return usage{figures.ProcessCPU(pid), figures.ProcessMemory(pid).Peak} }

// etcdServer is the lab's etcd, of one member.
type etcdServer struct {
	etcd   *lab.Etcd
	client *clientv3.Client
	http   *http.Client
}

func newEtcdServer(ctx context.Context, l *lab.Lab) *etcdServer {
	s := &etcdServer{
		etcd: l.Etcd(), client: must.Get(l.Etcd().Client(ctx)),
		http: &http.Client{Transport: &http.Transport{DialContext: l.Underlay().Dial, DisableKeepAlives: true}, Timeout: 20 * time.Second},
	}
	must.Do(l.PutNetwork(ctx, []byte(networkConfig)))
	return s
}

func (*etcdServer) name() string { return "etcd" }

func (s *etcdServer) pid() int { return s.etcd.PID() }

func (s *etcdServer) restart(ctx context.Context) { must.Do(s.etcd.Restart(ctx)) }

func (s *etcdServer) close() { _ = s.client.Close() }

func (s *etcdServer) reach() Store { return Store{Etcd: s.etcd.Endpoints(), Prefix: lab.Prefix} }

func (*etcdServer) join(context.Context, int, int) {}

func (s *etcdServer) leave(ctx context.Context, leases []subnet.Lease, _, _ int) {
	for _, l := range leases {
		must.Get(s.client.Delete(ctx, lab.Prefix+"/subnets/"+l.Key))
	}
}

func (s *etcdServer) putExtra(ctx context.Context) subnet.Lease {
	l := subnet.Lease{Key: extraSubnet, Endpoints: []subnet.Endpoint{{PublicIP: publicIP(extra)}}}
	value := fmt.Sprintf(`{"PublicIP":"%s","PublicIPv6":null,"BackendType":"vxlan","BackendData":%s}`, publicIP(extra), vtep(extra))
	must.Get(s.client.Put(ctx, lab.Prefix+"/subnets/"+l.Key, value))
	return l
}

func (s *etcdServer) writeAndRead(ctx context.Context) {
	must.Get(s.client.Put(ctx, "/bystander", time.Now().String()))
	must.Get(s.client.Get(ctx, "/bystander"))
}

func (*etcdServer) bystanderCalls() []string { return []string{"Put", "Range"} }

// calls counts messages instead of gRPC calls, because one stream carries many
// requests.
func (s *etcdServer) calls(ctx context.Context) figures.Counts {
	return figures.EtcdMessages(ctx, s.http, s.etcd.Endpoints()[0])
}
