// SPDX-License-Identifier: Apache-2.0

// Package subnet decides which host has which subnet, and which leases of other hosts a daemon may
// use. It contains the types of leases and of the network configuration, and the contract of the
// managers that talk to a store. It does no I/O: every decision depends only on arguments, such as
// the leases, the time and the source of random numbers.
//
// A lease is the right of one node to its subnets, with the public addresses and the backend data
// that other nodes need. Follow a lease through the files:
//
//   - lease.go: a Lease, its Endpoints of each family, and the Claim of a node that wants one
//   - config.go: the Config of the network; parse.go reads it from JSON, and json.go helps with
//     that and with the configuration of backends
//   - pool.go: the Pool of subnets that a Network gives to hosts, and how to pick one
//   - allocate.go: chooses a free subnet of each family from the pools; usage.go counts the free and
//     the leased subnets
//   - manager.go: the Manager, which acquires and keeps this host's lease in a store, and publishes
//     Updates with the leases of other nodes
//   - ledger.go: the Ledger, the daemon's cache of the leases of other nodes; it decides when a
//     lease is gone.
//   - arbiter.go: the Arbiter, which refuses leases that contradict the configuration, this node
//     or an older lease. prefixtable.go finds overlapping prefixes for it, and sharedips.go finds
//     public addresses that several leases have.
//
// Packages subnet/etcd and subnet/kube contain the managers. Package subnet/subnettest contains a
// manager of a store in memory, and the tests that every manager must pass.
package subnet
