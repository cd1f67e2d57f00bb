// SPDX-License-Identifier: Apache-2.0

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
	// handshakePause is the minimum time between two handshakes that a peer starts with
	// another. WireGuard drops a handshake less than 20 ms after the last one, and then
	// sends none for 5 s.
	handshakePause = 60 * time.Millisecond
	// A peer that still has no session gets another handshake after greetAgain, and a
	// last one later.
	greetAgain = 500 * time.Millisecond
	greetings  = 3
)

// greeter starts handshakes with the peers of a device in this process, because they may
// have a session with an earlier device. If two hosts start at the same time, both
// handshakes fail, and WireGuard starts none for 5 s. So the host with the smaller public
// key starts another one.
type greeter struct {
	dev   *wgdevice.Device
	stop  chan struct{}
	tasks sync.WaitGroup

	mu   sync.Mutex
	last time.Time // time of the last started handshake
}

func newGreeter(dev *wgdevice.Device) *greeter {
	return &greeter{dev: dev, stop: make(chan struct{})}
}

// greet must be called after a change of the device's peers. own is the device's public
// key.
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

// persist starts handshakes again with peers that have no session.
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

// start starts a handshake with a peer, unless the peer was removed. The device starts at most
// one in 5 s. With again it starts a new one at once and gives up the earlier one, so it
// ignores a late answer to that.
func (g *greeter) start(key wgdevice.NoisePublicKey, again bool) {
	peer := g.dev.LookupPeer(key)
	if peer == nil {
		return
	}
	if again {
		peer.ExpireCurrentKeypairs()
	}
	_ = peer.SendHandshakeInitiation(false) // a failed one is repeated with the next packet
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last = time.Now()
}

// strangers returns the peers that have had no session.
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

// close waits until another device may start handshakes with the same peers.
func (g *greeter) close() {
	close(g.stop)
	g.tasks.Wait()
	<-time.After(time.Until(g.last.Add(handshakePause)))
}
