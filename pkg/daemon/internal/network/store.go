// SPDX-License-Identifier: Apache-2.0

package network

import (
	"cmp"
	"context"
	"net/netip"

	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/options"
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

// openStore opens the store of the network, with the watch of its configuration, to which etcd passes the
// configuration. The parameter one is a function that opens the store of one of several networks. If it is nil, there
// is only one network, and the options select its store.
func (n *Network) openStore(ctx context.Context, one func(etcd.Config) (Store, error)) (err error) {
	n.config = &configWatch{follow: n.follows(), validate: n.validate}
	switch {
	case one != nil:
		n.store, err = one(n.etcdConfig(ctx))
	case n.opts.KubeSubnetMgr:
		n.store, err = kube.New(n.kubeConfig())
	default:
		c := n.etcdConfig(ctx)
		c.OnConfig = func(text []byte) { n.config.apply(ctx, text) }
		n.store, err = etcd.New(c)
	}
	if err != nil {
		n.store = nil // and not a nil pointer
		return err
	}
	n.config.warn = n.store.Warn
	return nil
}

// follows reports whether the network changes to another configuration while it runs.
func (n *Network) follows() bool { return n.opts.FollowConfig && !n.opts.ExitOnConfigChange }

func (n *Network) validate(text []byte) (subnet.Config, error) {
	cfg, _, warnings, err := Validate("", text, !n.opts.KubeSubnetMgr, n.catalog.Registry)
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
func (n *Network) etcdConfig(ctx context.Context) etcd.Config {
	c := EtcdConfig(n.opts)
	c.Previous = previousSubnets(ctx, n.opts.SubnetFile)
	c.Former = func() []netip.Prefix { return n.last().Subnets }

	c.Own = *cmp.Or(n.past.Stored, &n.past.Own)
	c.Known = n.past.Peers
	c.OnRepaired = n.metrics.Differed
	c.OnStatus = n.ready.reportStore
	c.OnLease = func(own subnet.Lease) {
		n.state.Update(func(now *lastknown.State) { now.Renewed(own) })
	}
	return c
}

// kubeConfig returns the options for the store of the network.
func (n *Network) kubeConfig() kube.Config {
	c := kube.Config{
		APIURL: n.opts.KubeAPIURL, Kubeconfig: n.opts.KubeconfigFile,
		NodeName: n.opts.NodeName, PodName: n.opts.PodName, PodNamespace: n.opts.PodNamespace,
		NetConfig: n.opts.NetConfigPath, AnnotationPrefix: n.opts.KubeAnnotationPrefix,
		Own: n.past.Own, Known: n.past.Peers,
		OnStatus:   n.ready.reportStore,
		OnRepaired: n.metrics.Differed, LocationLabel: n.opts.LocationLabel,
	}
	if n.opts.SetNodeNetworkUnavailable {
		c.Ready = n.ready.up
	}
	return c
}
