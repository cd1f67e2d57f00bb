// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend/wireguard/discovery"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// peer returns the peer of t for lease l, whose backend data must be valid. ok is false if t
// does not serve l: l has no subnet of a family inside the tunnel, or no address that t can
// send to.
func (b *Backend) peer(t tunnel, l subnet.Lease) (p discovery.Peer, ok bool) {
	for _, f := range t.families {
		e, has := l.Endpoint(f)
		if !has {
			continue
		}
		if key, _, err := decodeData(e.Data); err == nil && !ok {
			p.Key = key
			ok = true
		}
		p.Allowed = append(p.Allowed, e.Subnet)
	}

	outer, has := l.Endpoint(b.outer(t, l))
	if !ok || !has {
		return discovery.Peer{}, false
	}

	p.Endpoint = netip.AddrPortFrom(outer.PublicIP, uint16(b.port(t, l, outer)))
	for _, e := range l.Endpoints {
		if len(t.outer) > 1 && e.PublicIP != outer.PublicIP {
			p.Other = netip.AddrPortFrom(e.PublicIP, p.Endpoint.Port())
		}
	}
	if p.Name = decodeNamed(outer.Data); !p.Name.IsZero() && p.Name.Port == 0 {
		p.Name.Port = p.Endpoint.Port()
	}
	return p, true
}

// outer returns the family of the outer packets that t sends to the host with lease l. If only
// one family is possible, it is that one. If both are possible, it is IPv6 if the IPv4 address of
// that host is private and the IPv6 addresses of both hosts are not private, and otherwise IPv4.
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

// port returns the UDP port that the host with lease l listens on for the packets of t. outer
// is the endpoint of l that t sends to. If the data contains no port, it is that of t. Upstream
// flannel publishes ListenPortV6 for IPv6, even if its only device listens on ListenPort. So with
// one device for both families, port uses the port in the data for IPv4. If l has no IPv4, it
// returns ListenPort instead of ListenPortV6.
func (b *Backend) port(t tunnel, l subnet.Lease, outer subnet.Endpoint) int {
	_, port, _ := decodeData(outer.Data)
	if b.config.Mode != modeSeparate {
		if four, ok := l.Endpoint(prefix.IPv4); ok {
			_, port, _ = decodeData(four.Data)
		} else if port == b.config.ListenPortV6 {
			port = b.config.ListenPort
		}
	}
	if port == 0 {
		return t.port
	}
	return port
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

// newDiff returns a diff from have to settings. The caller adds the wanted peers.
func newDiff(s settings, have *wgtypes.Device) diff {
	return diff{have: have, settings: s, want: discovery.Peers{}, known: discovery.Peers{}}
}

// config returns the changes to write. changed is false if there are none.
func (d diff) config() (c wgtypes.Config, changed bool) {
	if d.have.PrivateKey != d.key {
		c.PrivateKey = &d.key
	}
	if d.have.ListenPort != d.port {
		c.ListenPort = &d.port
	}

	allowed := sync.OnceValue(d.allowed) // nearly no diff needs it
	present := map[wgtypes.Key]bool{}
	for _, h := range d.have.Peers {
		present[h.PublicKey] = true
		w, wanted := d.want[h.PublicKey]
		switch {
		case wanted:
			if p, differs := d.change(h, w, allowed); differs {
				c.Peers = append(c.Peers, p)
			}
		case d.removeUnwanted:
			c.Peers = append(c.Peers, wgtypes.PeerConfig{PublicKey: h.PublicKey, Remove: true, UpdateOnly: true})
		}
	}

	for key, w := range d.want {
		if !present[key] {
			c.Peers = append(c.Peers, d.add(w))
		}
	}

	// Removals come last: before them, other peers take over the subnets of the removed
	// peers, so that no subnet is ever without a peer.
	slices.SortStableFunc(c.Peers, func(a, b wgtypes.PeerConfig) int {
		switch {
		case a.Remove == b.Remove:
			return 0
		case a.Remove:
			return 1
		}
		return -1
	})
	return c, c.PrivateKey != nil || c.ListenPort != nil || len(c.Peers) > 0
}

func (d diff) add(w discovery.Peer) wgtypes.PeerConfig {
	return wgtypes.PeerConfig{
		PublicKey: w.Key, PresharedKey: &d.psk, PersistentKeepaliveInterval: &d.keepalive,
		Endpoint: net.UDPAddrFromAddrPort(w.Endpoint), ReplaceAllowedIPs: true, AllowedIPs: ipNets(w.Allowed),
	}
}

// change compares h, the peer in the device, with the wanted peer w, and returns the change that
// h needs now. differs is false if h needs no change now. change leaves a difference to a later
// pass if the change could disturb the session with the peer. It sets a new preshared key only at
// the times that takesPSK allows. It sets the endpoint only if there is no session, or if the
// endpoint of w has changed since the last pass. If that endpoint has changed and h was not read from the
// device, change returns all of w, because the device may not have the peer.
//
// allowed returns the subnets of all wanted peers. mustRemove needs it to decide whether h must lose
// its surplus subnets. change calls allowed only if h has subnets that are not in w.
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

	missing, surplus := networkChanges(h.AllowedIPs, w.Allowed)
	switch {
	case mustRemove(surplus, allowed):
		p.ReplaceAllowedIPs, p.AllowedIPs, differs = true, ipNets(w.Allowed), true
	case len(missing) > 0:
		p.AllowedIPs = ipNets(missing)
		differs = true
	}
	if moved && d.fromMemory { // add works even if the peer is missing on the device, but overwrites the endpoint
		return d.add(w), true
	}
	return p, differs
}

// waiting returns the number of wanted peers in the device whose preshared key must change
// later, and not now.
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

// networkChanges compares the subnets in want with those in have. missing contains the subnets that
// are only in want, and surplus those that are only in have.
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

// mustRemove reports whether the surplus subnets of a peer must be removed from it. That is not
// necessary if all of them belong to other wanted peers: when WireGuard adds a subnet to a
// peer, it takes the subnet away from the former one, so that the subnet is never without a
// peer. allowed returns the subnets of all wanted peers.
func mustRemove(surplus []netip.Prefix, allowed func() map[netip.Prefix]bool) bool {
	return slices.ContainsFunc(surplus, func(p netip.Prefix) bool { return !allowed()[p] })
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
