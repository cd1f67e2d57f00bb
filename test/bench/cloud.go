// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/alivpc"
	"github.com/flanneld/flanneld/backend/alivpc/alitest"
	"github.com/flanneld/flanneld/backend/awsvpc"
	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/backend/gce"
	"github.com/flanneld/flanneld/backend/gce/gcetest"
	"github.com/flanneld/flanneld/backend/tencentvpc"
	"github.com/flanneld/flanneld/backend/tencentvpc/tencenttest"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/must"
)

// cloudServer is a test server that behaves like the API of a cloud.
type cloudServer struct {
	http.Handler
	backend  string
	factory  backend.Factory
	metadata func(n int, a netip.Addr) http.Handler // adds host n, and returns its metadata service
	calls    func() int
	env      func(api, metadata string) map[string]string
	// slow adds the route to host n directly, without a call of the API, because the calls that create
	// routes take long in this cloud. It is nil if they are quick.
	slow func(n int, dst netip.Prefix)
}

const (
	cloudResync  = 5 * time.Minute // the default of --resync
	cloudQuota   = 5000
	slowestStart = 100 // in a cloud with slow calls, the largest number of hosts whose routes are created by calls
)

func cloudNetworkPrefix() netip.Prefix { return netip.MustParsePrefix("10.16.0.0/12") }

func cloudServers() []*cloudServer {
	ec2 := ec2test.New()
	ali := alitest.New()
	tencent := tencenttest.New()
	google := gcetest.New()
	ec2.SetQuota(cloudQuota)
	ali.SetQuota(cloudQuota)
	tencent.SetQuota(cloudQuota)
	google.SetQuota(cloudQuota, false)
	subnetOf := func(n int) string { return fmt.Sprintf("subnet-%d", n) }
	return []*cloudServer{
		{
			Handler: ec2, backend: awsvpc.Type, factory: awsvpc.New, calls: func() int { return len(ec2.Calls()) },
			metadata: func(n int, a netip.Addr) http.Handler { return ec2test.Metadata(ec2.AddInstance(n, subnetOf(n), a)) },
			env: func(api, metadata string) map[string]string {
				return map[string]string{"AWS_ENDPOINT_URL_EC2": api, "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata}
			},
		},
		{
			Handler: google, backend: gce.Type, factory: gce.New, calls: func() int { return len(google.Calls()) },
			metadata: func(n int, a netip.Addr) http.Handler {
				name := google.AddInstance(n, a).Name
				google.SetScopes(name, "cloud-platform")
				return google.Metadata(name)
			},
			env: func(api, metadata string) map[string]string {
				return map[string]string{
					"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": api + "/compute/v1/", "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER": api,
					"GCE_METADATA_HOST": metadata[len("http://"):],
				}
			},
			slow: func(n int, dst netip.Prefix) {
				google.AddRoute(gcetest.Route{
					Name: fmt.Sprintf("host-%d", n), Description: "flanneld cluster= network=" + cloudNetworkPrefix().String(), Network: gcetest.NetworkURL(gcetest.Network),
					DestRange: dst.String(), Priority: 1000, Instance: fmt.Sprintf("projects/%s/zones/%s/instances/host-%d", gcetest.Project, gcetest.Zone, n),
				})
			},
		},
		{
			Handler: ali, backend: alivpc.Type, factory: alivpc.New, calls: func() int { return len(ali.Calls()) },
			metadata: func(n int, a netip.Addr) http.Handler { return alitest.Metadata(ali.AddInstance(n, subnetOf(n), a)) },
			env: func(api, metadata string) map[string]string {
				return map[string]string{"ALIBABA_CLOUD_VPC_ENDPOINT": api, "ALIBABA_CLOUD_ECS_ENDPOINT": api, "ALIBABA_CLOUD_METADATA_ENDPOINT": metadata}
			},
		},
		{
			Handler: tencent, backend: tencentvpc.Type, factory: tencentvpc.New, calls: func() int { return len(tencent.Calls()) },
			metadata: func(n int, a netip.Addr) http.Handler {
				return tencenttest.Metadata(tencent.AddInstance(n, subnetOf(n), a))
			},
			env: func(api, metadata string) map[string]string {
				return map[string]string{"TENCENTCLOUD_VPC_ENDPOINT": api, "TENCENTCLOUD_CVM_ENDPOINT": api, "TENCENTCLOUD_METADATA_ENDPOINT": metadata}
			},
		},
	}
}

func cloudHost(n int) cloud.Host {
	return cloud.Host{
		Subnets:   []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(16 + n/256), byte(n % 256), 0}), 24)},
		Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 168, byte(n / 250), byte(1 + n%250)})},
	}
}

// measureCloud counts the calls that hosts make to the API of each cloud. It runs the keepers of the daemons in this
// process.
func (r *runner) measureCloud(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.Logger{}) // without a log, which would have a line for each route
	for _, hosts := range []int{10, 100, 1000} {
		for _, s := range cloudServers() {
			r.cloudRound(ctx, s, hosts)
		}
	}
}

func (r *runner) cloudRound(ctx context.Context, s *cloudServer, hosts int) {
	b := &cloudBench{cloudServer: s, api: httptest.NewServer(s), metadata: map[int]http.Handler{}}
	defer b.api.Close()
	for n := 1; n <= hosts; n++ {
		b.metadata[n] = s.metadata(n, cloudHost(n).Addresses[0])
		if s.slow != nil && hosts > slowestStart {
			s.slow(n, cloudHost(n).Subnets[0])
		}
	}

	group := s.backend + ", calls of the API"
	add := func(what string, n int) { r.report.add(group, what, hosts, "calls", float64(n)) }

	b.metadata[hosts+1] = s.metadata(hosts+1, cloudHost(hosts + 1).Addresses[0])
	before := b.calls()
	b.run(ctx, hosts+1, hosts, true)
	add("a host joins", b.calls()-before)
	add("a day at rest", int(24*time.Hour/cloudResync)*hosts*b.run(ctx, 2, hosts, false))
}

// cloudBench is a server with the hosts of its cloud.
type cloudBench struct {
	*cloudServer
	api      *httptest.Server
	metadata map[int]http.Handler // by number of the host
}

// run lets the backend of host n work as in its daemon, until it has compared the routes twice. It returns the number
// of calls that the second comparison made. A host that joins also claims its lease, and the second comparison
// confirms its route. That of any other host is one of the many at rest: nothing has changed since the first. The
// addresses of the services are in environment variables of this process, which each call replaces.
func (b *cloudBench) run(ctx context.Context, n, hosts int, joins bool) int {
	metadata := httptest.NewServer(b.metadata[n])
	defer metadata.Close()
	for name, value := range b.env(b.api.URL, metadata.URL) {
		must.Do(os.Setenv(name, value))
	}

	a := cloudHost(n).Addresses[0]
	be, _, err := b.factory([]byte(`{}`), backend.Env{
		Underlay: underlay.Interface{Name: "eth0", Index: 2, MTU: 1500, Addrs: []underlay.Address{{Local: a, Public: a}}},
		Config:   subnet.Config{Networks: []subnet.Network{{Prefix: cloudNetworkPrefix()}}},
	})
	must.Do(err)
	resync := time.Millisecond // as soon as possible
	if joins {
		must.Get(be.Claim(ctx, subnet.Claim{}))
		resync = cloudResync
	}
	return b.keep(ctx, be.(*cloudnet.Backend).Cloud, n, hosts, resync)
}

func cloudPeers(n, hosts int) cloud.Peers {
	p := cloud.Peers{Complete: true}
	for other := 1; other <= hosts; other++ {
		if other != n {
			p.Hosts = append(p.Hosts, cloudHost(other))
		}
	}
	return p
}

// keep runs the keeper of host n until it has compared the routes twice, and returns the number of calls between the
// two. The last comparison must succeed.
func (b *cloudBench) keep(ctx context.Context, c cloud.Cloud, n, hosts int, resync time.Duration) int {
	ctx, cancel := context.WithCancel(ctx)
	calls := make(chan int, 2) // after each comparison
	k := cloud.NewKeeper(cloud.KeeperConfig{
		Cloud: c, Own: cloudHost(n), Networks: []netip.Prefix{cloudNetworkPrefix()}, Resync: resync,
		Connected: func() time.Time { return time.Unix(1, 0) },
		Compared: func() {
			select {
			case calls <- b.calls():
			default:
			}
		},
	})

	k.SetPeers(cloudPeers(n, hosts))
	done := make(chan struct{})
	go func() { defer close(done); k.Run(ctx) }()
	defer func() { cancel(); <-done }()

	var counts [2]int
	for i := range counts {
		select {
		case <-ctx.Done():
			must.Do(context.Cause(ctx))
		case counts[i] = <-calls:
		}
	}
	_, err := k.Result(ctx)
	must.Do(err)
	return counts[1] - counts[0]
}
