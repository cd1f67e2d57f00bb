// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/subnetfile"
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

// manager returns the manager that the options select. last is the state of the last
// process.
func (d *daemon) manager(ctx context.Context, last lastKnown) (store, error) {
	if d.opts.KubeSubnetMgr {
		return d.kubeManager(ctx, last)
	}
	return d.etcdManager(ctx, last)
}

func (d *daemon) etcdManager(ctx context.Context, last lastKnown) (store, error) {
	o := d.opts
	return etcd.New(etcd.Config{
		Endpoints: o.EtcdEndpoints, Prefix: o.EtcdPrefix,
		CertFile: o.EtcdCertFile, KeyFile: o.EtcdKeyFile, CAFile: o.EtcdCAFile,
		Username: o.EtcdUsername, Password: o.EtcdPassword.Reveal(),
		RenewMargin: o.RenewMargin, TTL: o.LeaseTTL,
		Previous: d.previous(ctx),
		Own:      *cmp.Or(last.Stored, &last.Own), Known: last.Peers,
		OnRepaired: d.metrics.Differed,
		OnStatus:   func(err error) { d.reportStore(ctx, err) },
		OnLease: func(own subnet.Lease) {
			d.record.update(func(now *lastKnown) { now.renewed(own) })
		},
		OnConfig: func(text []byte) { d.config.told(ctx, text) },
	})
}

// previous returns the subnets of this node in the subnet file.
func (d *daemon) previous(ctx context.Context) []netip.Prefix {
	log := klog.FromContext(ctx)
	previous, err := subnetfile.Read(d.opts.SubnetFile)
	if err != nil {
		log.Error(err, "cannot read the previous subnet")
	}
	for _, w := range previous.Warnings {
		log.Error(nil, "damaged subnet file", "path", d.opts.SubnetFile, "line", w)
	}
	var subnets []netip.Prefix
	for _, e := range previous.Entries {
		if e.Subnet.IsValid() {
			subnets = append(subnets, e.Subnet)
		}
	}
	return subnets
}

func (d *daemon) kubeManager(ctx context.Context, last lastKnown) (store, error) {
	o := d.opts
	c := kube.Config{
		APIURL: o.KubeAPIURL, Kubeconfig: o.KubeconfigFile,
		NodeName: o.NodeName, PodName: o.PodName, PodNamespace: o.PodNamespace,
		NetConfig: o.NetConfigPath, AnnotationPrefix: o.KubeAnnotationPrefix,
		Own: last.Own, Known: last.Peers,
		OnStatus:   func(err error) { d.reportStore(ctx, err) },
		OnRepaired: d.metrics.Differed,
	}
	if o.SetNodeNetworkUnavailable {
		c.Ready = d.up
	}
	return kube.New(c)
}

// publicIPs returns the addresses that peers send to, according to the store.
func publicIPs(ctx context.Context, m store) ([]netip.Addr, error) {
	if k, ok := m.(interface {
		PublicIPs(context.Context) ([]netip.Addr, error)
	}); ok {
		return k.PublicIPs(ctx)
	}
	return nil, nil
}
