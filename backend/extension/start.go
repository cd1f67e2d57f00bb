// SPDX-License-Identifier: Apache-2.0

package extension

import (
	"context"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	if err := b.prepare(ctx, own.Endpoints); err != nil {
		return nil, err
	}
	store := b.host.store
	s := store.setup()
	s.Undo = b.config.shutdown
	s.Input = input{Env: b.ownVariables(own.Endpoints)}
	if post := hash(s.Number, b.config.post, s.Input); s.Post != post {
		again := s
		again.Key = "" // if the command fails, the next start begins with PreStartupCommand
		store.setSetup(again)
		store.flush(ctx)
		if _, err := b.attempt(ctx, b.config.post, s.Input); err != nil {
			return nil, err
		}
		s.Post = post
	}

	store.setSetup(s)
	store.flush(ctx)
	b.host.timeout.Store(int64(b.config.timeout))
	p, err := b.env.Programmer(ctx, b.env.Scope())
	if err != nil {
		return nil, err
	}
	p.Base = b.env.Base(own)
	return &network{
		Backend: b, Notifier: p.Notifier, kernel: p, setup: s.Number,
		running: map[string]bool{}, failures: map[string]failure{},
	}, nil
}

// Values of the IPv6 variables of PostStartupCommand and ShutdownCommand on a host without
// IPv6. Scripts written for flannel expect them.
const (
	noSubnet  = "::/0"
	noAddress = "<nil>"
)

// ownVariables returns the variables for PostStartupCommand and ShutdownCommand. They are empty for
// a family without a subnet.
func (b *Backend) ownVariables(own []subnet.Endpoint) []string {
	values := map[prefix.Family][3]string{prefix.IPv6: {"", noSubnet, noAddress}}
	for _, e := range own {
		if !e.Subnet.IsValid() {
			continue
		}
		v := values[e.Family()]
		v[1] = e.Subnet.String()
		if n, ok := b.env.Config.Network(e.Family()); ok {
			v[0] = n.Prefix.String()
		}
		if a, ok := b.env.Underlay.Family(e.Family()); ok {
			v[2] = a.Local.String()
		}
		values[e.Family()] = v
	}
	return assign(values, 0)
}
