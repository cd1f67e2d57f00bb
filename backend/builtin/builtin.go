// SPDX-License-Identifier: Apache-2.0

// Package builtin lists the backends that flanneld and flannelctl contain.
package builtin

import (
	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/alivpc"
	"github.com/flanneld/flanneld/backend/alloc"
	"github.com/flanneld/flanneld/backend/awsvpc"
	"github.com/flanneld/flanneld/backend/extension"
	"github.com/flanneld/flanneld/backend/gce"
	"github.com/flanneld/flanneld/backend/hostgw"
	"github.com/flanneld/flanneld/backend/ipip"
	"github.com/flanneld/flanneld/backend/location"
	"github.com/flanneld/flanneld/backend/migration"
	"github.com/flanneld/flanneld/backend/overflow"
	"github.com/flanneld/flanneld/backend/tencentvpc"
	"github.com/flanneld/flanneld/backend/udp"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/backend/wireguard"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/kernel/tunnel"
	"github.com/flanneld/flanneld/pkg/options"
)

// New returns all backends, for one network with these options.
func New(o options.Options) (backend.Catalog, error) {
	commands := extension.NewHost(extension.Settings{
		Allow: o.AllowExtensionBackend, StateDir: o.StateDir, Name: o.StateName() + "-commands",
	})

	packets := udp.NewHost(udp.Settings{Check: tunnel.SourceCheck(o.UDPSourceCheck), Persist: o.UDPPersist})
	encrypted := wireguard.NewHost()
	registry, err := backend.NewRegistry(
		backend.Entry{Type: alivpc.Type, Factory: alivpc.New, OneThread: true},
		backend.Entry{Type: alloc.Type, Factory: alloc.New, OneThread: true},
		backend.Entry{Type: awsvpc.Type, Factory: awsvpc.New, OneThread: true},
		backend.Entry{Type: extension.Type, Factory: commands.New},
		backend.Entry{Type: gce.Type, Factory: gce.New, OneThread: true},
		backend.Entry{Type: hostgw.Type, Factory: hostgw.New, Inside: true, OneThread: true},
		backend.Entry{Type: ipip.Type, Factory: ipip.New, ProbesMTU: true, OneThread: true},
		backend.Entry{Type: tencentvpc.Type, Factory: tencentvpc.New, OneThread: true},
		backend.Entry{Type: udp.Type, Factory: packets.New, ProbesMTU: true, OneThread: udp.OneThread()},
		backend.Entry{Type: vxlan.Type, Factory: vxlan.New, ProbesMTU: true, Overflows: true, Inside: true, OneThread: true},
		backend.Entry{Type: wireguard.Type, Factory: encrypted.New, ProbesMTU: true},
	)
	registry.Migrate = migration.New
	registry.Combine = overflow.New
	registry.Locate = location.New
	return backend.Catalog{
		Registry:    registry,
		Shutdown:    commands.Shutdown,
		Leftovers:   commands.Leftovers(),
		CloseUnused: func() error { return oneline.Join(packets.CloseUnused(), encrypted.CloseUnused()) },
		FreePorts: func(ports []int) error {
			return oneline.Join(packets.FreePorts(ports), encrypted.FreePorts(ports))
		},
		Close: func() {
			_ = packets.Close()
			_ = encrypted.Close()
		},
		Recorded: extension.Recorded,
		Files:    wireguard.WrittenKeys,
	}, err
}
