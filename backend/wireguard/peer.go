package wireguard

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"flanneld/pkg/prefix"
	"flanneld/subnet"
)

// peer is what a device holds for a lease.
type peer struct {
	key      wgtypes.Key
	endpoint netip.AddrPort
	allowed  []netip.Prefix
}

// String says what wg(8) would.
func (p peer) String() string {
	return fmt.Sprintf("peer %s endpoint %s allowed ips %v", p.key, p.endpoint, p.allowed)
}

// peer returns what t holds for l; ok is false if l has nothing for it. l has
// passed Check.
func (b *Backend) peer(t tunnel, l subnet.Lease) (p peer, ok bool) {
	for _, f := range t.families {
		e, has := l.Endpoint(f)
		if !has {
			continue
		}
		if key, _, err := decodeData(e.Data); err == nil && !ok {
			p.key, ok = key, true
		}
		p.allowed = append(p.allowed, e.Subnet)
	}
	outer, has := l.Endpoint(b.outer(t, l))
	if !ok || !has {
		return peer{}, false
	}
	p.endpoint = netip.AddrPortFrom(outer.PublicIP, uint16(b.port(t, l, outer)))
	return p, true
}

// outer is the family of what t sends to the peer.
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
	case !four.PublicIP.IsPrivate(): // which is the RFC 1918 networks, and fc00::/7
		return prefix.IPv4
	case !six.PublicIP.IsPrivate() && own.Public.IsValid() && !own.Public.IsPrivate():
		return prefix.IPv6
	}
	return prefix.IPv4
}

// port is where the peer listens for t. The known flannel publishes ListenPortV6
// for IPv6 even where it has a single device, which listens on ListenPort.
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

// settings are what a device holds for itself, and for all peers alike.
type settings struct {
	key       wgtypes.Key
	port      int
	psk       wgtypes.Key
	rotating  bool // peers may have the preshared key before this one
	keepalive time.Duration
}

// sessionLife is how long after its handshake a session may be in use
// (REJECT_AFTER_TIME of the protocol).
const sessionLife = 180 * time.Second

// diff says what turns a device into one with the settings and peers that are
// wanted. An endpoint that differs is what the device has learnt of a peer that
// moves, or is behind NAT, and stays while it works: it is written only if known,
// the peers as they were wanted before, has another, or if there is no session.
// With sweep peers go that are not wanted. What is remembered nobody has asked the
// device for: a peer may be gone from it.
type diff struct {
	have  *wgtypes.Device
	want  map[wgtypes.Key]peer
	known map[wgtypes.Key]peer
	settings
	ages       map[wgtypes.Key]time.Duration // of the last handshakes, where have was asked for
	sweep      bool
	remembered bool
}

// config returns the changes; none if changed is false.
func (d diff) config() (c wgtypes.Config, changed bool) {
	if d.have.PrivateKey != d.key {
		c.PrivateKey = &d.key
	}
	if d.have.ListenPort != d.port {
		c.ListenPort = &d.port
	}
	present := map[wgtypes.Key]bool{}
	for _, h := range d.have.Peers {
		present[h.PublicKey] = true
		w, wanted := d.want[h.PublicKey]
		switch {
		case wanted:
			if p, differs := d.change(h, w); differs {
				c.Peers = append(c.Peers, p)
			}
		case d.sweep:
			c.Peers = append(c.Peers, wgtypes.PeerConfig{PublicKey: h.PublicKey, Remove: true, UpdateOnly: true})
		}
	}
	for key, w := range d.want {
		if !present[key] {
			c.Peers = append(c.Peers, d.add(w))
		}
	}
	// What comes takes its networks over from what goes, so that they are never without a peer.
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

func (d diff) add(w peer) wgtypes.PeerConfig {
	return wgtypes.PeerConfig{
		PublicKey: w.key, PresharedKey: &d.psk, PersistentKeepaliveInterval: &d.keepalive,
		Endpoint: net.UDPAddrFromAddrPort(w.endpoint), ReplaceAllowedIPs: true, AllowedIPs: ipNets(w.allowed),
	}
}

// change says what turns the peer h into w.
func (d diff) change(h wgtypes.Peer, w peer) (p wgtypes.PeerConfig, differs bool) {
	p = wgtypes.PeerConfig{PublicKey: w.key, UpdateOnly: true}
	if h.PresharedKey != d.psk && takesPSK(d.ages[h.PublicKey]) {
		p.PresharedKey, differs = &d.psk, true
	}
	if h.PersistentKeepaliveInterval != d.keepalive {
		p.PersistentKeepaliveInterval, differs = &d.keepalive, true
	}
	before, known := d.known[w.key]
	moved := known && before.endpoint != w.endpoint
	if endpointOf(h) != w.endpoint && (moved || d.ages[h.PublicKey] > sessionLife) {
		p.Endpoint, differs = net.UDPAddrFromAddrPort(w.endpoint), true
	}
	if !sameNetworks(h.AllowedIPs, w.allowed) {
		p.ReplaceAllowedIPs, p.AllowedIPs, differs = true, ipNets(w.allowed), true
	}
	if moved && d.remembered { // of one that has not only the device knows where it is
		return d.add(w), true
	}
	return p, differs
}

// waiting counts the peers that config leaves their preshared key, for now.
func (d diff) waiting() (count int) {
	for _, h := range d.have.Peers {
		if _, wanted := d.want[h.PublicKey]; wanted && h.PresharedKey != d.psk && !takesPSK(d.ages[h.PublicKey]) {
			count++
		}
	}
	return count
}

func endpointOf(h wgtypes.Peer) netip.AddrPort {
	if h.Endpoint == nil {
		return netip.AddrPort{}
	}
	a := h.Endpoint.AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

func ipNets(ps []netip.Prefix) []net.IPNet {
	var nets []net.IPNet
	for _, p := range ps {
		nets = append(nets, net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())})
	}
	return nets
}

func sameNetworks(have []net.IPNet, want []netip.Prefix) bool {
	if len(have) != len(want) {
		return false
	}
	for _, n := range have {
		a, _ := netip.AddrFromSlice(n.IP)
		bits, _ := n.Mask.Size()
		if !slices.Contains(want, netip.PrefixFrom(a.Unmap(), bits)) {
			return false
		}
	}
	return true
}
