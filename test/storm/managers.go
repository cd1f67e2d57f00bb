// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
	"github.com/flanneld/flanneld/subnet/kube"
	"github.com/flanneld/flanneld/test/figures"
)

// networkConfig has a subnet for each of about 32,000 hosts. extraSubnet is in its network, but no
// host takes it.
const (
	networkConfig = `{"Network":"10.128.0.0/9","SubnetMax":"10.255.254.0","SubnetLen":24,"Backend":{"Type":"vxlan"}}`
	extraSubnet   = "10.255.255.0-24"
)

// publicIP returns the public address that a host publishes. No interface has this address.
func publicIP(number int) netip.Addr { return figures.Addr("172.16.0.0", number+1) }

func vtep(number int) json.RawMessage {
	return fmt.Appendf(nil, `{"VNI":1,"VtepMAC":"02:be:%02x:%02x:%02x:%02x"}`, byte(number>>24), byte(number>>16), byte(number>>8), byte(number))
}

func (h *host) open(a Start, former *subnet.Lease) (manager, error) {
	if len(a.Store.Etcd) == 0 {
		return h.openKube(a.Store, former)
	}
	c := etcd.Config{
		Endpoints: a.Store.Etcd, Prefix: a.Store.Prefix, TTL: a.TTL, RenewMargin: a.Margin, OnStatus: h.onStatus, OnLease: h.onLease,
	}
	if former != nil {
		c.Previous = []netip.Prefix{former.Endpoints[0].Subnet}
		c.Own, c.Known = *former, h.known(former.Key)
	}
	return etcd.New(c)
}

func nodeName(number int) string { return fmt.Sprintf("node-%05d.example.com", number) }

func (h *host) openKube(s Store, former *subnet.Lease) (manager, error) {
	c := kube.Config{Kubeconfig: s.Kubeconfig, NodeName: nodeName(h.number), NetConfig: s.NetConfig, OnStatus: h.onStatus}
	if former != nil {
		c.Own, c.Known = *former, h.known(former.Key)
	}
	return kube.New(c)
}

// known returns the last known state of a host. It is the state that all hosts share, without the
// lease with the key own, and with the store as this host knew it.
func (h *host) known(own string) subnet.LedgerState {
	state := h.all.known
	state.Store = h.all.stores[h.number]
	state.Peers = slices.DeleteFunc(slices.Clone(state.Peers), func(p subnet.Peer) bool { return p.Lease.Key == own })
	return state
}
