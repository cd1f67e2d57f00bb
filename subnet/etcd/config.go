// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/subnet"
)

// Config says where the store is and how to use it.
type Config struct {
	// Endpoints are URLs or host:port. The scheme of the first one decides for all of them whether
	// TLS is used. Without a scheme TLS is used if one of the files is given.
	Endpoints []string
	// Prefix is the prefix of all keys. Superfluous slashes are removed.
	Prefix string
	// CAFile, CertFile and KeyFile are paths of PEM files. CAFile alone is sufficient for TLS.
	// CertFile and KeyFile must be given together.
	CAFile, CertFile, KeyFile string
	// Username and Password are used if both are given.
	Username, Password string
	// RenewMargin is the time before the end of the lease at which the lease is renewed at the
	// latest. If the TTL is shorter than that, or hardly longer, the time is shortened: see margin.
	// Zero means one hour.
	RenewMargin time.Duration
	// Previous contains the subnets that this node had and wants again, of one or both families,
	// best first.
	Previous []netip.Prefix
	// Former returns the subnets that this node had in earlier configurations, last first. The node
	// takes one again if the configuration has it, and it is free. Former may be nil.
	Former func() []netip.Prefix
	// Own and Known are the last known state of an earlier run, with this host's lease as the store had
	// it. If the store is the same and still has the changes since then, the manager reads only
	// these changes at the start, and does not list all leases. Both may be zero.
	Own   subnet.Lease
	Known subnet.LedgerState
	// OnRepaired is called if the audit finds that Known was wrong, with the number of leases that
	// differ from those of the store at the same revision. It must not block, and must not call the
	// manager. It may be nil, like OnStatus, OnLease and OnConfig.
	OnRepaired func(leases int)
	// TTL is the time to live of the lease, rounded up to seconds. Zero means subnet.TTL.
	TTL time.Duration
	// OnStatus is called with nil at the first success and when the store becomes usable again. It
	// is called with the reason when the store becomes unusable, and for each new kind of failure
	// after that. It must not block, and must not call the manager.
	OnStatus func(error)
	// OnLease is called with this host's lease whenever it was acquired, written again or renewed. It
	// must not block, and must not call the manager.
	OnLease func(subnet.Lease)
	// OnConfig is called with the text of the configuration, or nil if there is none, when Watch
	// begins, when it resumes after a failure, and when the configuration has changed. So the text
	// may be the same as before. OnConfig must not block, and must not call the manager.
	OnConfig func(text []byte)
}

// margin returns how long before its end a lease with this TTL is renewed at the latest: see
// Manager.renewal, which varies the time. So the lease survives if the store is unavailable for
// less than the margin. It is RenewMargin, but leaves at least a minute before the renewal, or a
// third of a TTL below three minutes: 23h59m of a TTL of 24h at most, and 20s of one of 30s.
func (c *Config) margin(ttl time.Duration) time.Duration {
	least := min(time.Minute, ttl/3)
	return min(c.RenewMargin, ttl-least)
}
