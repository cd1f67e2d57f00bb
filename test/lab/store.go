// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// PodNetwork returns the pod network of family f that NetworkConfig configures.
func PodNetwork(f prefix.Family) netip.Prefix {
	if f == prefix.IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5}), 16)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: 5}), 48)
}

// NetworkConfig returns the network configuration for pods of the given families. It has
// no Backend key if backend is nil.
func NetworkConfig(families []prefix.Family, backend json.RawMessage) (json.RawMessage, error) {
	cfg := map[string]any{"EnableIPv4": false}
	for _, f := range families {
		if f == prefix.IPv4 {
			cfg["EnableIPv4"], cfg["Network"] = true, PodNetwork(f)
		} else {
			cfg["EnableIPv6"], cfg["IPv6Network"] = true, PodNetwork(f)
		}
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

// PutNetwork puts the network configuration into the store.
func (l *Lab) PutNetwork(ctx context.Context, config json.RawMessage) error {
	c, err := l.etcd.Client(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Put(ctx, Prefix+"/config", string(config)); err != nil {
		return fmt.Errorf("put network configuration: %w", err)
	}
	return nil
}

// Lease is a subnet lease in the store.
type Lease struct {
	Key   string        // without the prefix up to subnets/
	Value string        // JSON
	TTL   time.Duration // the remaining time; 0 means that the lease does not expire
}

// Leases returns the leases in the store, ordered by key.
func (l *Lab) Leases(ctx context.Context) ([]Lease, error) {
	c, err := l.etcd.Client(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	const dir = Prefix + "/subnets/"
	resp, err := c.Get(ctx, dir, clientv3.WithPrefix())
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", err)
	}
	var leases []Lease
	for _, kv := range resp.Kvs {
		lease := Lease{Key: strings.TrimPrefix(string(kv.Key), dir), Value: string(kv.Value)}
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
