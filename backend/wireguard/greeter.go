package wireguard

import (
	"bytes"
	"encoding/hex"
	"slices"
	"strings"
	"sync"
	"time"

	wgdevice "golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

const (
	// handshakePause is the least time between two handshakes that one peer starts
	// with another: WireGuard drops what comes faster than every 20 ms, and then
	// nothing is sent for 5 s.
	handshakePause = 60 * time.Millisecond
	// A peer without a session is greeted again after greetAgain, and once more.
	greetAgain = 500 * time.Millisecond
	greetings  = 3
)

// greeter starts handshakes with the peers that a device in this process is given:
// they may have a session with the device before it. Two hosts that get to know
// each other may greet in the same instant. Then both handshakes fail, and
// WireGuard begins none for 5 s. So the host with the smaller public key begins another.
type greeter struct {
	dev   *wgdevice.Device
	stop  chan struct{}
	tasks sync.WaitGroup

	mu   sync.Mutex
	last time.Time // that a handshake was started
}

func newGreeter(dev *wgdevice.Device) *greeter {
	return &greeter{dev: dev, stop: make(chan struct{})}
}

// greet is called with what has just been done to the peers of the device whose
// public key is own.
func (g *greeter) greet(own wgtypes.Key, peers []wgtypes.PeerConfig) {
	var again []wgdevice.NoisePublicKey
	for _, p := range peers {
		if p.UpdateOnly {
			continue
		}
		key := wgdevice.NoisePublicKey(p.PublicKey)
		g.start(key, false)
		if bytes.Compare(own[:], key[:]) < 0 {
			again = append(again, key)
		}
	}
	if len(again) > 0 {
		g.tasks.Go(func() { g.persist(again) })
	}
}

// persist greets peers again that have no session.
func (g *greeter) persist(peers []wgdevice.NoisePublicKey) {
	for range greetings - 1 {
		select {
		case <-g.stop:
			return
		case <-time.After(greetAgain):
		}
		peers = g.strangers(peers)
		for _, key := range peers {
			select {
			case <-g.stop:
				return
			default:
				g.start(key, true)
			}
		}
	}
}

// start starts a handshake, unless the peer is gone. With again it does so even if
// the one before was less than 5 s ago, whose answer is not taken any more.
func (g *greeter) start(key wgdevice.NoisePublicKey, again bool) {
	peer := g.dev.LookupPeer(key)
	if peer == nil {
		return
	}
	if again {
		peer.ExpireCurrentKeypairs()
	}
	_ = peer.SendHandshakeInitiation(false) // a failed one is tried again with the next packet
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last = time.Now()
}

// strangers returns those of the peers that have had no session.
func (g *greeter) strangers(peers []wgdevice.NoisePublicKey) []wgdevice.NoisePublicKey {
	state, err := g.dev.IpcGet()
	if err != nil {
		return nil
	}
	met, of := map[string]bool{}, ""
	for line := range strings.Lines(state) {
		switch name, value, _ := strings.Cut(strings.TrimSpace(line), "="); name {
		case "public_key":
			of = value
		case "last_handshake_time_sec":
			met[of] = value != "0"
		}
	}
	return slices.DeleteFunc(peers, func(k wgdevice.NoisePublicKey) bool { return met[hex.EncodeToString(k[:])] })
}

// close returns when another device may greet the same peers.
func (g *greeter) close() {
	close(g.stop)
	g.tasks.Wait()
	<-time.After(time.Until(g.last.Add(handshakePause)))
}
