// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// PodNetwork returns the pod range of family f that NetworkConfig configures.
func PodNetwork(f prefix.Family) netip.Prefix { return podNetwork(0, f) }

func podNetwork(i int, f prefix.Family) netip.Prefix {
	const first = 5
	if f == prefix.IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(first + i)}), 16)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: byte(first + i)}), 48)
}

// NetworkConfig returns the network configuration of the lab's only network, for pods
// of the given families. It has no key Backend if backend is nil.
func NetworkConfig(families []prefix.Family, backend json.RawMessage) (json.RawMessage, error) {
	return networkConfig(0, families, backend)
}

func networkConfig(i int, families []prefix.Family, backend json.RawMessage) (json.RawMessage, error) {
	cfg := map[string]any{"EnableIPv4": false}
	for _, f := range families {
		enable, network := "EnableIPv4", "Network"
		if f == prefix.IPv6 {
			enable, network = "EnableIPv6", "IPv6Network"
		}
		cfg[enable] = true
		cfg[network] = podNetwork(i, f)
	}

	if backend != nil {
		cfg["Backend"] = backend
	}

	text, err := json.Marshal(cfg)
	if err != nil {
		return nil, fmt.Errorf("write network configuration: %w", err)
	}
	return text, nil
}

// PutNetwork replaces the network configuration in the store, for a lab with one
// network without a name.
func (l *Lab) PutNetwork(ctx context.Context, config json.RawMessage) error {
	return l.put(ctx, Prefix+"/config", config)
}

func (l *Lab) put(ctx context.Context, key string, config json.RawMessage) error {
	c, err := l.etcd.Client(ctx)
	if err != nil {
		return err
	}
	defer c.Close()

	if _, err := c.Put(ctx, key, string(config)); err != nil {
		return fmt.Errorf("put network configuration: %w", err)
	}
	return nil
}

// Lease is a subnet lease in the store.
type Lease struct {
	Network string        // name of the network; empty if the lab has one without a name
	Key     string        // etcd key of the lease, without the prefix up to subnets/
	Value   string        // JSON
	TTL     time.Duration // the remaining time; 0 means that the lease does not expire
}

// Leases returns the leases in the store, ordered by network and key.
func (l *Lab) Leases(ctx context.Context) ([]Lease, error) {
	c, err := l.etcd.Client(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()

	var leases []Lease
	names := l.networkNames()
	if len(names) == 0 {
		names = []string{""}
	}
	for _, network := range slices.Sorted(slices.Values(names)) {
		of, err := leasesBelow(ctx, c, network, path.Join(Prefix, network, "subnets")+"/")
		if err != nil {
			return nil, err
		}
		leases = append(leases, of...)
	}
	return leases, nil
}

func leasesBelow(ctx context.Context, c *clientv3.Client, network, dir string) ([]Lease, error) {
	resp, err := c.Get(ctx, dir, clientv3.WithPrefix())
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", err)
	}

	var leases []Lease
	for _, kv := range resp.Kvs {
		lease := Lease{Network: network, Key: strings.TrimPrefix(string(kv.Key), dir), Value: string(kv.Value)}
		if kv.Lease != 0 {
			ttl, err := c.TimeToLive(ctx, clientv3.LeaseID(kv.Lease))
			if err != nil {
				return nil, fmt.Errorf("ask for the TTL of lease %s: %w", lease.Key, err)
			}
			lease.TTL = time.Duration(ttl.TTL) * time.Second
		}
		leases = append(leases, lease)
	}
	return leases, nil
}
