// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"net/netip"
	"net/rpc"
	"os"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

func TestMain(m *testing.M) {
	lab.RunChild()
	if isHosts(os.Args) {
		if err := runHosts(); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestKernelStorm runs all scenarios with few hosts and each store. It checks that each host is
// right at the end of each scenario, and that the costs were measured. It does not check times.
//
//stages:rest it needs older etcds, which take minutes to build
func TestKernelStorm(t *testing.T) {
	const hosts = "40"
	for store, want := range map[string]int{"etcd": 5, "kube": 4} {
		t.Run(store, func(t *testing.T) {
			var progress strings.Builder
			o := parse([]string{
				"-store", store, "-n", hosts, "-churn", "2s", "-renew", "3s", "-limit", "2m",
				"-etcd", "../../bin/tools/etcd-3.6", "-apiserver", "../../bin/tools/kube-apiserver",
			})
			r := &report{}
			if err := must.Catch(func() { one(t.Context(), o, store, o.sizes[0], r, &progress) }); err != nil {
				t.Fatalf("%v\n%s", err, progress.String())
			}
			if len(r.Results) != want {
				t.Errorf("%d scenarios have a result, want %d:\n%s", len(r.Results), want, progress.String())
			}
			for _, one := range r.Results {
				if one.Right != one.N || one.Calls.Total() == 0 || one.Sent == 0 || one.Peak == 0 || one.StoreCPU == 0 {
					t.Errorf("a figure is missing: %s", one)
				}
			}
		})
	}
}

func lease(key string, host int) subnet.Lease {
	return subnet.Lease{Key: key, Endpoints: []subnet.Endpoint{{PublicIP: publicIP(host)}}}
}

// TestObservation checks that a host counts as right only if it has a lease and knows exactly the
// other leases that should exist.
func TestObservation(t *testing.T) {
	r := newRegistry()
	own, a, b := lease("own", 0), lease("a", 1), lease("b", 2)
	s := &observation{registry: r, own: -1}
	learned := func(leases ...*subnet.Lease) {
		s.take(subnet.Update{Snapshot: func() subnet.Snapshot { return subnet.Snapshot{Leases: leases} }})
	}
	check := func(when string, want bool) {
		t.Helper()
		got, _ := s.right(r.expected())
		if got != want {
			t.Errorf("%s right is %v, want %v", when, got, want)
		}
		if text := s.difference(r.expected()); (text == "") != got {
			t.Errorf("%s the difference is %q", when, text)
		}
	}
	check("without an own lease", false)
	s.acquired(own)
	check("alone", true)
	r.expect(identify(&a), true)
	check("before the first peer is known", false)
	learned(&a, &b)
	check("with a peer that should not be there", false)
	s.take(subnet.Update{Changed: map[string]*subnet.Lease{"b": nil}})
	check("without it", true)
	moved := lease("a", 3)
	s.take(subnet.Update{Changed: map[string]*subnet.Lease{"a": &moved}})
	check("with a peer at another address", false)
	s.take(subnet.Update{Changed: map[string]*subnet.Lease{"a": &a}})
	check("with the peer at its address", true)
	_, since := s.right(r.expected())
	s.take(subnet.Update{Changed: map[string]*subnet.Lease{"a": &a}})
	if _, again := s.right(r.expected()); again != since {
		t.Error("an update without news counts as a change")
	}
}

// TestSettle checks that settle returns an error as long as a host knows a lease that should not exist.
func TestSettle(t *testing.T) {
	all := newHosts()
	known := &observation{registry: all.registry, own: -1}
	known.acquired(lease("own", 0))
	all.hosts[0] = &host{observation: known}
	server := rpc.NewServer()
	if err := server.RegisterName("Hosts", all); err != nil {
		t.Fatal(err)
	}
	near, far := net.Pipe()
	go server.ServeConn(far)
	s := &storm{n: 1, hosts: rpc.NewClient(near)}
	t.Cleanup(func() { _ = s.hosts.Close() })
	gone := lease("gone", 1)
	known.take(subnet.Update{Changed: map[string]*subnet.Lease{"gone": &gone}})
	settle := func() error { return must.Catch(func() { s.settle(t.Context(), "now") }) }
	if err := settle(); err == nil || !strings.Contains(err.Error(), "now 0 of 1 hosts are right: host 0 knows the lease gone") {
		t.Errorf("error %v, want one about the lease", err)
	}
	known.take(subnet.Update{Changed: map[string]*subnet.Lease{"gone": nil}})
	if err := settle(); err != nil {
		t.Error(err)
	}
}

// TestExtraSubnetIsFree checks that the subnet of the extra lease is in the network, but not among
// those that hosts take.
func TestExtraSubnetIsFree(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(networkConfig))
	if err != nil {
		t.Fatal(err)
	}
	pools, err := cfg.Pools()
	if err != nil {
		t.Fatal(err)
	}
	extra := netip.MustParsePrefix(strings.ReplaceAll(extraSubnet, "-", "/"))
	if !cfg.Networks[0].Prefix.Contains(extra.Addr()) || pools[0].Contains(extra) {
		t.Errorf("%s is outside of the network, or a host can take it", extra)
	}
}

func TestParse(t *testing.T) {
	o := parse([]string{"-n", "10,20", "-store", "kube", "-only", "boot,churn"})
	if len(o.sizes) != 2 || o.sizes[1] != 20 || len(o.stores) != 1 || len(o.scenarios) != 2 {
		t.Errorf("got %+v", o)
	}
	for _, args := range [][]string{{"-n", "0"}, {"-n", "x"}, {"-n", "99999"}, {"-store", "consul"}, {"-only", "flood"}, {"surplus"}} {
		if err := must.Catch(func() { parse(args) }); err == nil {
			t.Errorf("%q is accepted", args)
		}
	}
}
