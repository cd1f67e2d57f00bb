// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// peer returns the peer of t for lease l, whose backend data must be valid. ok is false if t cannot
// serve l.
func (b *Backend) peer(t tunnel, l subnet.Lease) (p discovery.Peer, ok bool) {
	for _, f := range t.families {
		e, has := l.Endpoint(f)
		if !has {
			continue
		}
		if d, err := decodeData(e.Data); err == nil && !ok {
			p.Key = d.key
			ok = true
		}
		p.Allowed = append(p.Allowed, e.Subnet)
	}

	outer, has := l.Endpoint(b.outer(t, l))
	if !ok || !has {
		return discovery.Peer{}, false
	}

	d, _ := decodeData(outer.Data)
	p.Endpoint = netip.AddrPortFrom(outer.PublicIP, uint16(b.port(t, l, d.port)))
	for _, e := range l.Endpoints {
		if len(t.outer) > 1 && e.PublicIP != outer.PublicIP {
			p.Other = netip.AddrPortFrom(e.PublicIP, p.Endpoint.Port())
		}
	}
	if p.Name = d.name; !p.Name.IsZero() && p.Name.Port == 0 {
		p.Name.Port = p.Endpoint.Port()
	}
	return p, true
}

// outer returns the family of the outer packets that t sends to the host with lease l: IPv4 if that is
// possible, unless only IPv6 has global addresses.
func (b *Backend) outer(t tunnel, l subnet.Lease) prefix.Family {
	if len(t.outer) == 1 {
		return t.outer[0]
	}

	four, has4 := l.Endpoint(prefix.IPv4)
	six, has6 := l.Endpoint(prefix.IPv6)
	own, _ := b.env.Underlay.Family(prefix.IPv6)
	switch {
	case !has6:
		return prefix.IPv4
	case !has4:
		return prefix.IPv6
	case !four.PublicIP.IsPrivate(): // private addresses are the RFC 1918 networks and fc00::/7
		return prefix.IPv4
	case !six.PublicIP.IsPrivate() && own.Public.IsValid() && !own.Public.IsPrivate():
		return prefix.IPv6
	}
	return prefix.IPv4
}

// port returns the UDP port to which t sends packets to the host with lease l. published is the one in the data of the
// family of the outer packets, or 0.
func (b *Backend) port(t tunnel, l subnet.Lease, published int) int {
	if b.config.Mode != modeSeparate {
		// flannel publishes ListenPortV6 for IPv6, even if its only device listens on ListenPort.
		if four, ok := l.Endpoint(prefix.IPv4); ok {
			d, _ := decodeData(four.Data)
			published = d.port
		} else if published == b.config.ListenPortV6 {
			published = b.config.ListenPort
		}
	}
	return cmp.Or(published, t.port)
}

// settings are the settings of a device, and those that all its peers share.
type settings struct {
	key       wgtypes.Key
	port      int
	psk       wgtypes.Key
	rotating  bool // peers may still have the previous preshared key
	keepalive time.Duration
}

// diff computes the changes from a device's state to the wanted settings and peers.
//
// The endpoint of a peer in the device may differ from the wanted one: the peer moves or is
// behind NAT, and the device has learned its present endpoint. Such an endpoint stays while
// it works. diff replaces it in two cases only. If the wanted endpoint has changed since
// the last pass (known), diff writes the wanted endpoint. If there is no session, it writes
// the endpoint to try (try) or, without one, the wanted endpoint.
//
// With removeUnwanted, peers that are not wanted are removed. With fromMemory, have is the
// last written state and was not read from the device. So a peer of have may be missing on the
// device.
type diff struct {
	have  *wgtypes.Device
	want  discovery.Peers
	known discovery.Peers
	try   map[wgtypes.Key]netip.AddrPort // endpoints to try instead of the wanted ones
	settings
	ages           map[wgtypes.Key]time.Duration // ages of the last handshakes; nil if have was not read
	removeUnwanted bool
	fromMemory     bool
}

func (d diff) config() (c wgtypes.Config, changed bool) {
	if d.have.PrivateKey != d.key {
		c.PrivateKey = &d.key
	}
	if d.have.ListenPort != d.port {
		c.ListenPort = &d.port
	}

	allowed := sync.OnceValue(d.allowed) // nearly no diff needs it
	var removals []wgtypes.PeerConfig
	present := map[wgtypes.Key]bool{}
	for _, h := range d.have.Peers {
		present[h.PublicKey] = true
		if w, wanted := d.want[h.PublicKey]; wanted {
			if p, differs := d.change(h, w, allowed); differs {
				c.Peers = append(c.Peers, p)
			}
		} else if d.removeUnwanted {
			removals = append(removals, wgtypes.PeerConfig{PublicKey: h.PublicKey, Remove: true, UpdateOnly: true})
		}
	}
	for key, w := range d.want {
		if !present[key] {
			c.Peers = append(c.Peers, d.add(w))
		}
	}

	// Removals come last: before them, other peers take over the subnets of the removed
	// peers, so that no subnet is ever without a peer.
	c.Peers = append(c.Peers, removals...)
	return c, c.PrivateKey != nil || c.ListenPort != nil || len(c.Peers) > 0
}

func (d diff) add(w discovery.Peer) wgtypes.PeerConfig {
	return wgtypes.PeerConfig{
		PublicKey: w.Key, PresharedKey: &d.psk, PersistentKeepaliveInterval: &d.keepalive,
		Endpoint: net.UDPAddrFromAddrPort(w.Endpoint), ReplaceAllowedIPs: true, AllowedIPs: ipNets(w.Allowed),
	}
}

// change returns the change that h, the peer in the device, needs now to become w. It leaves a
// difference to a later pass if the change could disturb the session with the peer. allowed returns
// the subnets of all wanted peers.
func (d diff) change(h wgtypes.Peer, w discovery.Peer, allowed func() map[netip.Prefix]bool) (p wgtypes.PeerConfig, differs bool) {
	p = wgtypes.PeerConfig{PublicKey: w.Key, UpdateOnly: true}
	if h.PresharedKey != d.psk && takesPSK(d.ages[h.PublicKey]) {
		p.PresharedKey = &d.psk
		differs = true
	}
	if h.PersistentKeepaliveInterval != d.keepalive {
		p.PersistentKeepaliveInterval = &d.keepalive
		differs = true
	}

	before, known := d.known[w.Key]
	moved := known && before.Endpoint != w.Endpoint
	to := w.Endpoint
	if tried, ok := d.try[w.Key]; ok && !moved {
		to = tried
	}
	if discovery.EndpointOf(h) != to && (moved || d.ages[h.PublicKey] > discovery.SessionLife) {
		p.Endpoint = net.UDPAddrFromAddrPort(to)
		differs = true
	}

	// A surplus subnet of another wanted peer goes by itself: when WireGuard adds a subnet to a peer, it
	// takes it away from the former one, so that the subnet is never without a peer.
	missing, surplus := networkChanges(h.AllowedIPs, w.Allowed)
	if slices.ContainsFunc(surplus, func(p netip.Prefix) bool { return !allowed()[p] }) {
		p.ReplaceAllowedIPs = true
		p.AllowedIPs = ipNets(w.Allowed)
		differs = true
	} else if len(missing) > 0 {
		p.AllowedIPs = ipNets(missing)
		differs = true
	}

	if moved && d.fromMemory { // add works even if the peer is missing on the device, but overwrites the endpoint
		return d.add(w), true
	}
	return p, differs
}

// replaced returns the peers that listen on another port than before, usually on another device.
func (d diff) replaced() map[wgtypes.Key]bool {
	all := map[wgtypes.Key]bool{}
	for key, before := range d.known {
		if now, wanted := d.want[key]; wanted && now.Endpoint.Port() != before.Endpoint.Port() {
			all[key] = true
		}
	}
	return all
}

// waiting counts the wanted peers in the device whose preshared key must change, but not now.
func (d diff) waiting() (count int) {
	for _, h := range d.have.Peers {
		if _, wanted := d.want[h.PublicKey]; wanted && h.PresharedKey != d.psk && !takesPSK(d.ages[h.PublicKey]) {
			count++
		}
	}
	return count
}

func ipNets(ps []netip.Prefix) []net.IPNet {
	var nets []net.IPNet
	for _, p := range ps {
		nets = append(nets, net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())})
	}
	return nets
}

func networkChanges(have []net.IPNet, want []netip.Prefix) (missing, surplus []netip.Prefix) {
	missing = slices.Clone(want)
	for _, n := range have {
		a, _ := netip.AddrFromSlice(n.IP)
		bits, _ := n.Mask.Size()
		p := netip.PrefixFrom(a.Unmap(), bits)
		if !slices.Contains(want, p) {
			surplus = append(surplus, p)
		}
		missing = slices.DeleteFunc(missing, func(m netip.Prefix) bool { return m == p })
	}
	return missing, surplus
}

func (d diff) allowed() map[netip.Prefix]bool {
	all := map[netip.Prefix]bool{}
	for _, w := range d.want {
		for _, p := range w.Allowed {
			all[p] = true
		}
	}
	return all
}
