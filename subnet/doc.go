// SPDX-License-Identifier: Apache-2.0

// Package subnet decides which host has which subnet, and what a daemon may believe about that. It
// contains the types of leases and of the network configuration, and the contract of the managers
// that talk to a store. It is pure: it does no I/O, and every decision is a function of its
// arguments.
//
// A lease is the right of one node to its subnets, with the public addresses and the backend data
// that other nodes need. Follow a lease through the files:
//
//   - lease.go: a Lease, its Endpoints of each family, and the Claim of a node that wants one
//   - config.go: the Config of the network; parse.go reads it from JSON, and json.go helps with
//     that and with the configuration of backends
//   - pool.go: the Pool of subnets that a Network gives to hosts, and how to pick one
//   - allocate.go: takes a subnet of each family from the pools; usage.go counts them
//   - manager.go: the Manager, which acquires and keeps the own lease in a store, and publishes
//     Updates with those of other nodes; optional.go: interfaces that not every manager implements,
//     such as the Elector of a leader
//   - ledger.go: the Ledger, the daemon's cache of the leases of other nodes; it decides when one
//     is gone. heldpeers.go indexes the peers whose lease the store has lost.
//   - arbiter.go: the Arbiter, which refuses leases that contradict the configuration, this node
//     or an older lease. prefixtable.go finds overlapping prefixes for it, and sharedips.go tracks
//     public addresses that several leases have.
//
// Packages subnet/etcd and subnet/kube contain the managers. Package subnet/subnettest contains one
// in memory, and the suite that all of them pass.
package subnet
