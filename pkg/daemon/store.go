// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"net/netip"

	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
	"github.com/flanneld/flanneld/subnet/kube"
)

// store is a manager with its connection.
type store interface {
	subnet.Manager
	// Reconnect replaces a connection from an address that was removed.
	Reconnect()
	// Close ends the connection.
	Close() error
}

// storeOpener creates the store of n. The callbacks of the store may use n at once.
type storeOpener func(ctx context.Context, n *network) (store, error)

// openStore creates the store that the options select.
func openStore(ctx context.Context, n *network) (store, error) {
	if n.opts.KubeSubnetMgr {
		return orNil(n.openKube(ctx))
	}
	return orNil(n.openEtcd(ctx))
}

// orNil returns a nil interface if there is an error: m may be a nil pointer then.
func orNil(m store, err error) (store, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
}

// etcdConfig returns the options for a connection to etcd.
func etcdConfig(o options.Options) etcd.Config {
	return etcd.Config{
		Endpoints: o.EtcdEndpoints, Prefix: o.EtcdPrefix,
		CertFile: o.EtcdCertFile, KeyFile: o.EtcdKeyFile, CAFile: o.EtcdCAFile,
		Username: o.EtcdUsername, Password: o.EtcdPassword.Reveal(),
		RenewMargin: o.RenewMargin, TTL: o.LeaseTTL,
	}
}

// etcdConfig returns the options for the store of n.
func (n *network) etcdConfig(ctx context.Context) etcd.Config {
	c := etcdConfig(n.opts)
	c.Previous = previousSubnets(ctx, n.opts.SubnetFile)
	c.Own, c.Known = *cmp.Or(n.past.Stored, &n.past.Own), n.past.Peers
	c.OnRepaired = n.metrics.Differed
	c.OnStatus = func(err error) { n.ready.reportStore(ctx, err) }
	c.OnLease = func(own subnet.Lease) {
		n.state.update(func(now *lastKnown) { now.renewed(own) })
	}
	return c
}

func (n *network) openEtcd(ctx context.Context) (*etcd.Manager, error) {
	c := n.etcdConfig(ctx)
	c.OnConfig = func(text []byte) { n.config.apply(ctx, text) }
	return etcd.New(c)
}

func (n *network) openKube(ctx context.Context) (*kube.Manager, error) {
	o := n.opts
	c := kube.Config{
		APIURL: o.KubeAPIURL, Kubeconfig: o.KubeconfigFile,
		NodeName: o.NodeName, PodName: o.PodName, PodNamespace: o.PodNamespace,
		NetConfig: o.NetConfigPath, AnnotationPrefix: o.KubeAnnotationPrefix,
		Own: n.past.Own, Known: n.past.Peers,
		OnStatus:   func(err error) { n.ready.reportStore(ctx, err) },
		OnRepaired: n.metrics.Differed,
	}
	if o.SetNodeNetworkUnavailable {
		c.Ready = n.ready.up
	}
	return kube.New(c)
}

// publicIPs returns the addresses that peers send to, according to the store.
func publicIPs(ctx context.Context, m store) ([]netip.Addr, error) {
	if s, ok := m.(subnet.PublicIPSource); ok {
		return s.PublicIPs(ctx)
	}
	return nil, nil
}
