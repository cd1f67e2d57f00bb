// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// lastRequest is how the requests of a superseded Acquire end, once armed is set.
type lastRequest struct {
	armed    atomic.Pointer[context.CancelFunc] // ends the context of Acquire
	answered bool                               // the write is answered, and the request after it fails
	late     chan func() error                  // if it is not nil, the store executes the write when the function in it is called
	written  atomic.Bool
}

func (l *lastRequest) intercept(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	end := l.armed.Load()
	txn, _ := req.(*pb.TxnRequest)
	writes := len(txn.GetSuccess()) > 0 && txn.Success[0].GetRequestPut() != nil
	switch {
	case end == nil || !writes && !l.written.Load():
		return invoke(ctx, method, req, reply, cc, opts...)
	case writes && l.answered:
		defer l.written.Store(true)
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	l.armed.Store(nil)
	(*end)()
	ctx = context.WithoutCancel(ctx)
	switch {
	case writes && l.late != nil:
		l.late <- func() error { return invoke(ctx, method, req, new(pb.TxnResponse), cc, opts...) }
	case writes:
		_ = invoke(ctx, method, req, reply, cc, opts...)
	}
	return context.Canceled
}

// TestSupersededClaimIsGivenBack changes the configuration and back while the host takes the lease
// for the first change. Afterwards the store must have the lease of before and nothing else of this
// host, and Watch must not have published any of its leases.
func TestSupersededClaimIsGivenBack(t *testing.T) {
	const other = `{"Network":"10.6.0.0/16"}`
	both := claim("192.0.2.1", "2001:db8::1")
	claims := map[string]subnet.Claim{configV4: claim("192.0.2.1"), configV6: claim("2001:db8::1"), configDual: both, other: claim("192.0.2.1")}
	s := newServer(t)
	for name, ends := range map[string]struct {
		late     bool // the store executes the write after the change back
		answered bool // the write is answered, and the next request is not
		kill     bool // another process makes the change back
	}{
		"answer lost":             {},
		"write late":              {late: true},
		"after the answer":        {answered: true},
		"killed":                  {kill: true},
		"killed after the answer": {kill: true, answered: true},
	} {
		for between, change := range map[string][2]string{
			"IPv4 and IPv6": {configV4, configV6}, "IPv6 and IPv4": {configV6, configV4}, "dual and IPv6": {configDual, configV6},
			"dual and IPv4": {configDual, configV4}, "IPv4 and dual": {configV4, configDual}, "two networks": {configV4, other},
		} {
			t.Run(name+", "+between, func(t *testing.T) {
				f := newFixture(t, s)
				leases := f.etcdLeases(t)
				last := &lastRequest{answered: ends.answered}
				if ends.late {
					last.late = make(chan func() error, 1)
				}
				f.put(t, "config", change[0])
				m := f.manager(t)
				m.client.cfg.DialOptions = append(m.client.cfg.DialOptions, grpc.WithChainUnaryInterceptor(last.intercept))
				own := acquire(t, m, claims[change[0]])
				w := subnettest.Watch(t, m)
				w.Until(t, "no peers", subnettest.Has())

				f.put(t, "config", change[1])
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				last.armed.Store(&cancel)
				if _, err := subnettest.Acquire(ctx, m, claims[change[1]]); !errors.Is(err, context.Canceled) {
					t.Fatalf("Acquire returns %v, want the error of its context", err)
				}
				f.put(t, "config", change[0])
				if ends.kill {
					m = f.manager(t)
					m.Resumed(own)
				}
				want := claims[change[0]]
				want.Endpoints = own.Endpoints
				if back := acquire(t, m, want); back.Key != own.Key {
					t.Errorf("the lease is %s, want %s again", back.Key, own.Key)
				}
				if ends.late {
					if err := waittest.Receive(t, patience, "the late write", last.late)(); err != nil {
						t.Fatal(err)
					}
				}
				if keys := f.keys(t, "subnets/"); len(keys) != 1 || keys[0] != own.Key {
					t.Errorf("the store has %q, want %q", keys, own.Key)
				}
				if n := f.etcdLeases(t) - leases; n != 1 {
					t.Errorf("%d etcd leases, want 1", n)
				}
				f.put(t, "subnets/10.5.0.0-24", leaseValue("192.0.2.9")) // hosts get other subnets
				w.Until(t, "the peer alone", subnettest.Has("10.5.0.0-24"))
				for _, u := range w.All() {
					if !subnettest.Has()(u) && !subnettest.Has("10.5.0.0-24")(u) {
						t.Errorf("Watch has published a lease of the host itself: %+v", u)
					}
				}
			})
		}
	}
}
