// SPDX-License-Identifier: Apache-2.0

package network

import (
	"cmp"
	"context"
	"net/netip"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
	"github.com/flanneld/flanneld/subnet/kube"
)

// Store is a manager whose connection can be replaced and closed.
type Store interface {
	subnet.Manager
	// Reconnect replaces the connection, after the local address of the old one was removed.
	Reconnect()
	// Close ends the connection.
	Close() error
}

// storeOpener has what the store of a network needs.
type storeOpener struct {
	opts     options.Options
	backends backend.Registry
	past     lastknown.State
	state    *lastknown.Store
	ready    *readiness
	metrics  *metrics.Metrics
}

// open opens the store of a network with the watch of its configuration. It opens them together, because
// etcd passes the configuration to the watch, and the watch passes warnings to the Kubernetes API. The
// parameter one is a function that opens the store of one of several networks. If one is nil, there is only
// one network, and the options select its store.
func (o storeOpener) open(ctx context.Context, one func(etcd.Config) (Store, error)) (Store, *configWatch, error) {
	if one == nil && o.opts.KubeSubnetMgr {
		m, err := kube.New(o.kubeConfig(ctx))
		if err != nil {
			return nil, nil, err
		}
		return m, newConfigWatch(o.follows(), o.validate, m.Warn), nil
	}

	config := newConfigWatch(o.follows(), o.validate, nil)
	c := o.etcdConfig(ctx)
	if one != nil {
		store, err := one(c)
		return store, config, err
	}

	c.OnConfig = func(text []byte) { config.apply(ctx, text) }
	m, err := etcd.New(c)
	if err != nil {
		return nil, nil, err
	}
	return m, config, nil
}

// follows reports whether the network changes to another configuration while it runs.
func (o storeOpener) follows() bool { return o.opts.FollowConfig && !o.opts.ExitOnConfigChange }

func (o storeOpener) validate(text []byte) (subnet.Config, error) {
	cfg, _, warnings, err := Validate("", text, !o.opts.KubeSubnetMgr, o.backends)
	cfg.Warnings = warnings
	return cfg, err
}

// EtcdConfig returns the options for a connection to etcd.
func EtcdConfig(o options.Options) etcd.Config {
	return etcd.Config{
		Endpoints: o.EtcdEndpoints, Prefix: o.EtcdPrefix,
		CertFile: o.EtcdCertFile, KeyFile: o.EtcdKeyFile, CAFile: o.EtcdCAFile,
		Username: o.EtcdUsername, Password: o.EtcdPassword.Reveal(),
		RenewMargin: o.RenewMargin, TTL: o.LeaseTTL,
	}
}

// etcdConfig returns the options for the store of the network.
func (o storeOpener) etcdConfig(ctx context.Context) etcd.Config {
	c := EtcdConfig(o.opts)
	c.Previous = previousSubnets(ctx, o.opts.SubnetFile)
	c.Former = func() []netip.Prefix {
		last, ok := o.state.Get()
		if !ok {
			last = o.past
		}
		return last.Subnets
	}

	c.Own = *cmp.Or(o.past.Stored, &o.past.Own)
	c.Known = o.past.Peers
	c.OnRepaired = o.metrics.Differed
	c.OnStatus = func(err error) { o.ready.reportStore(ctx, err) }
	c.OnLease = func(own subnet.Lease) {
		o.state.Update(func(now *lastknown.State) { now.Renewed(own) })
	}
	return c
}

// kubeConfig returns the options for the store of the network.
func (o storeOpener) kubeConfig(ctx context.Context) kube.Config {
	c := kube.Config{
		APIURL: o.opts.KubeAPIURL, Kubeconfig: o.opts.KubeconfigFile,
		NodeName: o.opts.NodeName, PodName: o.opts.PodName, PodNamespace: o.opts.PodNamespace,
		NetConfig: o.opts.NetConfigPath, AnnotationPrefix: o.opts.KubeAnnotationPrefix,
		Own: o.past.Own, Known: o.past.Peers,
		OnStatus:   func(err error) { o.ready.reportStore(ctx, err) },
		OnRepaired: o.metrics.Differed, LocationLabel: o.opts.LocationLabel,
	}
	if o.opts.SetNodeNetworkUnavailable {
		c.Ready = o.ready.up
	}
	return c
}

// warner returns the function with which the store tells operators of a problem, or nil if the store
// cannot.
func warner(m Store) func(reason, message string) {
	if w, ok := m.(subnet.Warner); ok {
		return w.Warn
	}
	return nil
}

// publicIPs returns the addresses that peers send to, if the store prescribes them.
func publicIPs(ctx context.Context, m Store) ([]netip.Addr, error) {
	if s, ok := m.(subnet.AddressSource); ok {
		return s.PublicIPs(ctx)
	}
	return nil, nil
}
