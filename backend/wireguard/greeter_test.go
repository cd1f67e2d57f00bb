// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/hex"
	"fmt"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/conn/bindtest"
	wgdevice "golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// away is the travel time of a packet in TestGreet.
const away = 20 * time.Millisecond

type farBind struct{ conn.Bind }

func (b farBind) Send(packets [][]byte, to conn.Endpoint) error {
	for _, p := range packets {
		sent := append([]byte{}, p...)
		time.AfterFunc(away, func() { _ = b.Bind.Send([][]byte{sent}, to) })
	}
	return nil
}

// end is one of two hosts whose packets to each other arrive with a delay.
type end struct {
	dev     *wgdevice.Device
	greeter *greeter
	key     wgtypes.Key
}

func newEnds(t *testing.T, keys ...wgtypes.Key) (ends []end) {
	t.Helper()
	for i, bind := range bindtest.NewChannelBinds() {
		dev := wgdevice.NewDevice(tuntest.NewChannelTUN().TUN(), farBind{bind}, wgdevice.NewLogger(wgdevice.LogLevelSilent, ""))
		t.Cleanup(dev.Close)
		if err := dev.IpcSet("private_key=" + hex.EncodeToString(keys[i][:])); err != nil {
			t.Fatal(err)
		}
		if err := dev.Up(); err != nil {
			t.Fatal(err)
		}
		g := newGreeter(dev)
		t.Cleanup(g.close)
		ends = append(ends, end{dev, g, keys[i]})
	}
	return ends
}

// meet adds the other end as a peer of e. Its packets arrive at port.
func (e end) meet(t *testing.T, other end, port, keepalive int) {
	t.Helper()
	public := other.key.PublicKey()
	peer := fmt.Sprintf("public_key=%x\nendpoint=127.0.0.1:%d\npersistent_keepalive_interval=%d", public[:], port, keepalive)
	if err := e.dev.IpcSet(peer); err != nil {
		t.Fatal(err)
	}
	e.greeter.greet(e.key.PublicKey(), []wgtypes.PeerConfig{{PublicKey: public}})
}

func (e end) hasSession(t *testing.T, other end) bool {
	t.Helper()
	return len(e.greeter.strangers([]wgdevice.NoisePublicKey{wgdevice.NoisePublicKey(other.key.PublicKey())})) == 0
}

// TestGreet lets two hosts add each other, together or one after the other. Without
// sending packets they get a session in less than the 5 s after which WireGuard itself
// would start another handshake. The exception is two handshakes that cross again.
func TestGreet(t *testing.T) {
	for _, apart := range []time.Duration{0, away / 2, 2 * away, greetAgain - away/2, greetAgain, greetAgain + away/2, 2*greetAgain - 3*away, 2 * time.Second} {
		for first := range 2 {
			for _, keepalive := range []int{0, 25} {
				t.Run(fmt.Sprintf("%d first by %v, keepalive %d", first+1, apart, keepalive), func(t *testing.T) {
					t.Parallel()
					ends := newEnds(t, key(8), key(16))
					ends[first].meet(t, ends[1-first], first+1, keepalive)
					<-time.After(apart)
					ends[1-first].meet(t, ends[first], 2-first, keepalive)
					deadline := time.After(4 * time.Second)
					for !ends[0].hasSession(t, ends[1]) || !ends[1].hasSession(t, ends[0]) {
						select {
						case <-deadline:
							t.Fatal("no session")
						case <-time.After(away):
						}
					}
				})
			}
		}
	}
}

// TestGreeterClose checks that close waits for the time between handshakes of two
// devices, and not for handshakes that are still planned.
func TestGreeterClose(t *testing.T) {
	ends := newEnds(t, key(8), key(16))
	for i, e := range ends { // one of them would start another handshake
		e.greeter = newGreeter(e.dev)
		began := time.Now()
		e.meet(t, ends[1-i], i+1, 0)
		e.greeter.close()
		if took := time.Since(began); took < handshakePause || took >= (greetings-1)*greetAgain {
			t.Errorf("host %d: close took %v, want hardly more than %v", i+1, took, handshakePause)
		}
	}
}
