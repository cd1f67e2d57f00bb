// SPDX-License-Identifier: Apache-2.0

package network

import (
	"cmp"
	"context"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/daemon/lastknown"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
	"github.com/flanneld/flanneld/subnet/kube"
)

// openStore creates the store that the options select.
func (p *parts) openStore(ctx context.Context) (Store, error) {
	if p.opts.KubeSubnetMgr {
		return orNil(p.openKube(ctx))
	}
	return orNil(p.openEtcd(ctx))
}

// orNil returns a nil interface if there is an error: m may be a nil pointer then.
func orNil(m Store, err error) (Store, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
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
func (p *parts) etcdConfig(ctx context.Context) etcd.Config {
	c := EtcdConfig(p.opts)
	c.Previous = previousSubnets(ctx, p.opts.SubnetFile)
	c.Own, c.Known = *cmp.Or(p.past.Stored, &p.past.Own), p.past.Peers
	c.OnRepaired = p.metrics.Differed
	c.OnStatus = func(err error) { p.ready.reportStore(ctx, err) }
	c.OnLease = func(own subnet.Lease) {
		p.state.Update(func(now *lastknown.State) { now.Renewed(own) })
	}
	return c
}

func (p *parts) openEtcd(ctx context.Context) (*etcd.Manager, error) {
	c := p.etcdConfig(ctx)
	c.OnConfig = func(text []byte) { p.config.apply(ctx, text) }
	return etcd.New(c)
}

func (p *parts) openKube(ctx context.Context) (*kube.Manager, error) {
	o := p.opts
	c := kube.Config{
		APIURL: o.KubeAPIURL, Kubeconfig: o.KubeconfigFile,
		NodeName: o.NodeName, PodName: o.PodName, PodNamespace: o.PodNamespace,
		NetConfig: o.NetConfigPath, AnnotationPrefix: o.KubeAnnotationPrefix,
		Own: p.past.Own, Known: p.past.Peers,
		OnStatus:   func(err error) { p.ready.reportStore(ctx, err) },
		OnRepaired: p.metrics.Differed, LocationLabel: o.LocationLabel,
	}
	if o.SetNodeNetworkUnavailable {
		c.Ready = p.ready.up
	}
	return kube.New(c)
}

// publicIPs returns the addresses that peers send to, if the store prescribes them.
func publicIPs(ctx context.Context, m Store) ([]netip.Addr, error) {
	if s, ok := m.(subnet.PublicIPSource); ok {
		return s.PublicIPs(ctx)
	}
	return nil, nil
}

// sight records the moment at which the store had the configuration of the network, if it has it. It
// waits until the store answers.
func (p *parts) sight(ctx context.Context, store subnet.Sighter, own subnet.Lease) {
	seen, err := store.Sight(ctx, own)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		klog.FromContext(ctx).Error(err, "cannot record that the store has the network configuration: a deletion while this host is down may not be noticed")
	case seen != subnet.Sighting{}:
		p.state.Update(func(now *lastknown.State) { now.Seen = seen })
	}
}
