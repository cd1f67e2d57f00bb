// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/hex"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/conn/bindtest"
	wgdevice "golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
)

// latency is the time that a packet travels from one end to the other.
const latency = 20 * time.Millisecond

type delayedBind struct{ conn.Bind }

func (b delayedBind) Send(packets [][]byte, to conn.Endpoint) error {
	for _, p := range packets {
		sent := append([]byte{}, p...)
		time.AfterFunc(latency, func() { _ = b.Bind.Send([][]byte{sent}, to) })
	}
	return nil
}

// end is one of two hosts whose packets to each other arrive after latency.
type end struct {
	dev       *wgdevice.Device
	initiator *initiator
	key       wgtypes.Key
}

// newEnds returns two running ends with these private keys. They do not have each other as
// peers.
func newEnds(t *testing.T, keys ...wgtypes.Key) (ends []end) {
	t.Helper()
	for i, bind := range bindtest.NewChannelBinds() {
		dev := wgdevice.NewDevice(tuntest.NewChannelTUN().TUN(), delayedBind{bind}, wgdevice.NewLogger(wgdevice.LogLevelSilent, ""))
		t.Cleanup(dev.Close)
		if err := dev.IpcSet("private_key=" + hex.EncodeToString(keys[i][:])); err != nil {
			t.Fatal(err)
		}
		if err := dev.Up(); err != nil {
			t.Fatal(err)
		}
		starter := newInitiator(t.Context(), dev)
		t.Cleanup(starter.close)
		ends = append(ends, end{dev, starter, keys[i]})
	}
	return ends
}

// kept keeps peers from the garbage collector. Their finalizers would receive from channels of a
// bubble (testing/synctest), which only its goroutines may do.
var kept []*wgdevice.Peer

// addPeer adds other as a peer of e, and calls initiate. port is 1 if e is the first of the
// two ends, and 2 if it is the second. keepalive is in seconds.
func (e end) addPeer(t *testing.T, other end, port, keepalive int, fresh bool) {
	t.Helper()
	public := other.key.PublicKey()
	peer := fmt.Sprintf("public_key=%x\nendpoint=127.0.0.1:%d\npersistent_keepalive_interval=%d", public[:], port, keepalive)
	if err := e.dev.IpcSet(peer); err != nil {
		t.Fatal(err)
	}
	kept = append(kept, e.dev.LookupPeer(wgdevice.NoisePublicKey(public)))
	e.initiator.initiate(e.key.PublicKey(), []wgtypes.PeerConfig{{PublicKey: public}}, nil, fresh)
}

func (e end) hasSession(t *testing.T, other end) bool {
	t.Helper()
	return len(e.initiator.withoutSession([]wgdevice.NoisePublicKey{wgdevice.NoisePublicKey(other.key.PublicKey())}, time.Time{})) == 0
}

// TestInitiate checks that two hosts that add each other, at the same time or one after the
// other, get a session in less than 5 s although they have no data to send. After 5 s, WireGuard
// itself would start another handshake. No host is added shortly before the last handshake of the
// other one, because the handshakes could then cross again. In virtual time they cross in no other
// case, however busy the machine is.
func TestInitiate(t *testing.T) {
	for _, apart := range []time.Duration{0, latency / 2, 2 * latency, retryPause - latency/2, retryPause, retryPause + latency/2, 2*retryPause - 8*latency, 2 * time.Second} {
		for first := range 2 {
			for _, tt := range []struct {
				keepalive int
				fresh     bool
			}{{0, true}, {0, false}, {25, true}} {
				t.Run(fmt.Sprintf("%d first by %v, %+v", first+1, apart, tt), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						ends := newEnds(t, key(8), key(16))
						ends[first].addPeer(t, ends[1-first], first+1, tt.keepalive, tt.fresh)
						<-time.After(apart)
						ends[1-first].addPeer(t, ends[first], 2-first, tt.keepalive, tt.fresh)
						deadline := time.After(4 * time.Second)
						for !ends[0].hasSession(t, ends[1]) || !ends[1].hasSession(t, ends[0]) {
							select {
							case <-deadline:
								t.Fatal("no session")
							case <-time.After(latency):
							}
						}
					})
				})
			}
		}
	}
}

// TestInitiateReplaced checks that two hosts with a session start another one if the device of one of them, or of
// both, may be another one than before.
func TestInitiateReplaced(t *testing.T) {
	for _, know := range [][]int{{0, 1}, {0}, {1}} {
		t.Run(fmt.Sprintf("known to %v", know), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ends := newEnds(t, key(8), key(16))
				for i := range ends {
					ends[i].addPeer(t, ends[1-i], i+1, 0, true)
				}
				waittest.Until(t, 4*time.Second, "session", func() bool { return ends[0].hasSession(t, ends[1]) && ends[1].hasSession(t, ends[0]) })
				<-time.After(4 * latency) // a peer drops handshakes that follow each other too closely
				since := time.Now()
				for _, i := range know {
					public := ends[1-i].key.PublicKey()
					ends[i].initiator.initiate(ends[i].key.PublicKey(), []wgtypes.PeerConfig{{PublicKey: public, UpdateOnly: true}}, map[wgtypes.Key]bool{public: true}, false)
				}
				waittest.Until(t, 4*time.Second, "another session", func() bool {
					public := ends[0].key.PublicKey()
					return len(ends[1].initiator.withoutSession([]wgdevice.NoisePublicKey{wgdevice.NoisePublicKey(public)}, since)) == 0
				})
			})
		})
	}
}

// hookedBind sends packets, but first calls before with their endpoint and the packets.
type hookedBind struct {
	conn.Bind
	before func(to string, packets [][]byte)
}

func (b hookedBind) Send(packets [][]byte, to conn.Endpoint) error {
	b.before(to.DstToString(), packets)
	return b.Bind.Send(packets, to)
}

// TestRetryLeavesNewSessions checks that retry does not replace a session that has just begun.
// While retry starts a handshake with a first peer, which does not answer, a session with a
// second peer begins.
func TestRetryLeavesNewSessions(t *testing.T) {
	own, silent, other := key(8), key(16).PublicKey(), key(24)
	const silentAt = "127.0.0.1:9"
	var handshakes atomic.Int64 // with other
	var began atomic.Bool       // the session with other
	var i *initiator
	var ends [2]*wgdevice.Device
	hook := func(to string, packets [][]byte) {
		const initiation = 1 // the type of the message
		switch {
		case to != silentAt && packets[0][0] == initiation:
			handshakes.Add(1)
		case to == silentAt && !began.Swap(true):
			public := own.PublicKey()
			if err := ends[1].IpcSet(fmt.Sprintf("public_key=%x\nendpoint=127.0.0.1:2\npersistent_keepalive_interval=25", public[:])); err != nil {
				t.Error(err)
			}
			public = other.PublicKey()
			waittest.Until(t, 10*time.Second, "session with the other host", func() bool {
				return len(i.withoutSession([]wgdevice.NoisePublicKey{wgdevice.NoisePublicKey(public)}, time.Time{})) == 0
			})
		}
	}
	for n, bind := range bindtest.NewChannelBinds() {
		if n == 0 {
			bind = hookedBind{bind, hook}
		}
		dev := wgdevice.NewDevice(tuntest.NewChannelTUN().TUN(), bind, wgdevice.NewLogger(wgdevice.LogLevelSilent, ""))
		t.Cleanup(dev.Close)
		if err := dev.IpcSet("private_key=" + hex.EncodeToString([]wgtypes.Key{own, other}[n][:])); err != nil {
			t.Fatal(err)
		}
		if err := dev.Up(); err != nil {
			t.Fatal(err)
		}
		ends[n] = dev
	}
	i = newInitiator(t.Context(), ends[0])
	public := other.PublicKey()
	if err := ends[0].IpcSet(fmt.Sprintf("public_key=%x\nendpoint=%s\npublic_key=%x\nendpoint=127.0.0.1:1", silent[:], silentAt, public[:])); err != nil {
		t.Fatal(err)
	}
	peers := []wgdevice.NoisePublicKey{wgdevice.NoisePublicKey(silent), wgdevice.NoisePublicKey(public)}
	i.retry(peers, handshakeAttempts-1, retryPause, true, time.Time{})
	if n := handshakes.Load(); n > 0 || !began.Load() {
		t.Errorf("%d handshakes with a host that had just begun a session, want none", n)
	}
}

// TestInitiatorClose checks that close waits until handshakePause has passed since the last
// handshake, and does not wait for handshakes that are still planned.
func TestInitiatorClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ends := newEnds(t, key(8), key(16))
		for i, e := range ends { // without close, one of them would start another handshake
			e.initiator = newInitiator(t.Context(), e.dev)
			began := time.Now()
			e.addPeer(t, ends[1-i], i+1, 0, true)
			e.initiator.close()
			if took := time.Since(began); took != handshakePause {
				t.Errorf("host %d: close took %v, want %v", i+1, took, handshakePause)
			}
		}
	})
}
