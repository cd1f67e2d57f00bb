// SPDX-License-Identifier: Apache-2.0

// Package migration carries packets between hosts while a network changes its backend. Both
// backends run, and each host decides for each peer which of them carries the packets to it.
//
//   - migration.go is the Backend, which consists of the present one and the next one.
//   - network.go is the Network, which Start creates. It decides about each peer.
//   - probe.go finds out which peers the next backend reaches.
package migration

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
)

// The two backends, as indexes, and their number.
const (
	present = iota
	next
	sides
)

// Backend implements backend.Backend with two backends.
type Backend struct {
	env    backend.Env
	parts  [sides]part
	kernel *backend.Programmer // of the network that was started last
}

// part is one of the two backends.
type part struct {
	be   backend.Backend
	side backend.Side
}

// New creates the backend for a configuration with a next backend. It is for backend.Registry.Migrate.
func New(env backend.Env, newPresent, newNext backend.Create) (backend.Backend, []string, error) {
	b := &Backend{env: env}
	var warnings []string
	configs := [sides]subnet.Config{env.Config.Present(), env.Config.Next()}
	for i, create := range [sides]backend.Create{newPresent, newNext} {
		half := env
		half.Config = configs[i]
		half.Part = func(ctx context.Context) *backend.Programmer {
			p := b.kernel.NewPart(ctx, i)
			// A route of the next backend to the network would receive packets to addresses that the network
			// did not carry before.
			p.Spare = i == next
			return p
		}
		be, more, err := create(half)
		if err != nil {
			return nil, nil, err
		}
		warnings = append(warnings, more...)
		b.parts[i] = part{be, backend.NewSide(be, half.Config.BackendType)}
	}
	if err := b.check(); err != nil {
		return nil, nil, err
	}
	strict := b.parts[present].side.Type == b.parts[next].side.Type
	for i := range b.parts {
		b.parts[i].side.Strict = strict
	}
	return b, warnings, nil
}

// check returns an error if the two backends cannot run at the same time.
func (b *Backend) check() error {
	from := b.parts[present]
	to := b.parts[next]
	for _, p := range b.parts {
		switch p.side.Type {
		case "alloc", "extension":
			return fmt.Errorf("a network cannot migrate from or to the backend %s, whose routes flanneld does not manage: remove NextBackend", p.side.Type)
		case "ali-vpc", "aws-vpc", "gce", "tencent-vpc":
			return fmt.Errorf("a network cannot migrate from or to the backend %s, whose routes are in the VPC and not on the hosts: remove NextBackend", p.side.Type)
		}
	}
	if slices.Contains(b.Describe().Inside, "host-gw") { // a peer at the location that host-gw does not reach would be cut off during the migration
		return errors.New("SameLocation host-gw and NextBackend do not work together: remove NextBackend, or set SameLocation to vxlan")
	}

	used := from.be.Describe().Scope.Devices
	for _, name := range to.be.Describe().Scope.Devices {
		if slices.Contains(used, name) {
			return fmt.Errorf("Backend and NextBackend both have the device %s: want a NextBackend of another type, or for vxlan with another VNI, which also allows another Port or GBP", name)
		}
	}
	if from.side.Type == to.side.Type && (len(used) == 0 || from.side.Type == "udp") { // leases of udp do not contain the port, by which they could be told apart
		return fmt.Errorf("Backend and NextBackend are both %s: remove NextBackend", from.side.Type)
	}

	if port, clash := backend.PortClash(from.be.Describe().Ports, to.be.Describe().Ports); clash {
		return fmt.Errorf("Backend and NextBackend both have UDP port %d: want another one in NextBackend", port)
	}
	return nil
}

// Describe implements backend.Backend. Only one of the two backends may have locations. Both can carry packets of the
// MTU, even if the next one does not run yet.
func (b *Backend) Describe() backend.Description {
	d := b.parts[present].be.Describe().Join(b.parts[next].be.Describe())
	d.Sides = []backend.Side{b.parts[present].side, b.parts[next].side}
	d.Usable = func(ctx context.Context) error { return backend.Usable(ctx, b.parts[present].be) } // a next one that is not is tried again
	return d
}

// Claim implements backend.Backend. If the next backend cannot start on this host, or its Claim
// fails, Claim logs the error and returns the claim of the present backend alone. Otherwise peers
// could send by the next backend, and this host would be cut off.
//
// In the stage Leaving, the claim names the next backend as the present one, and the other way
// round. So peers learn that this host sends nothing by the present backend any more.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	claim, err := b.parts[present].claim(ctx, prev)
	if err != nil {
		return subnet.Claim{}, err
	}
	more, err := b.claimNext(ctx, prev)
	if err != nil {
		klog.FromContext(ctx).Error(err, "cannot publish data of the next backend: peers go on with the present one", "next", b.parts[next].side.Type)
		return claim, nil
	}

	if b.env.Config.Stage == subnet.Leaving {
		more.NextType = b.parts[present].side.Type
		for i := range more.Endpoints {
			more.Endpoints[i].NextData = claim.Endpoints[i].Data
		}
		return more, nil
	}

	claim.NextType = b.parts[next].side.Type
	for i := range claim.Endpoints {
		claim.Endpoints[i].NextData = more.Endpoints[i].Data
	}
	return claim, nil
}

// claimNext fails if the next backend finds out that it cannot start on this host.
func (b *Backend) claimNext(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	if err := backend.Usable(ctx, b.parts[next].be); err != nil {
		return subnet.Claim{}, err
	}
	return b.parts[next].claim(ctx, prev)
}

func (p part) claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	return p.be.Claim(ctx, p.side.Before(prev))
}
