package wireguard

import (
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/conn/bindtest"
	wgdevice "golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// away is how long a packet of TestGreet is on its way.
const away = 10 * time.Millisecond

type farBind struct{ conn.Bind }

func (b farBind) Send(packets [][]byte, to conn.Endpoint) error {
	for _, p := range packets {
		sent := append([]byte{}, p...)
		time.AfterFunc(away, func() { _ = b.Bind.Send([][]byte{sent}, to) })
	}
	return nil
}

// end is one of two hosts whose packets to each other take their time.
type end struct {
	device
	key wgtypes.Key
}

func newEnds(t *testing.T, keys ...wgtypes.Key) (ends []*end) {
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
		ends = append(ends, &end{device{userspace: &userspaceDevice{dev: dev}}, keys[i]})
	}
	return ends
}

// meet has e get to know the other one, whose packets come to port.
func (e *end) meet(t *testing.T, other *end, port int) {
	t.Helper()
	public := other.key.PublicKey()
	if err := e.userspace.dev.IpcSet(fmt.Sprintf("public_key=%x\nendpoint=127.0.0.1:%d", public[:], port)); err != nil {
		t.Fatal(err)
	}
	e.greet(e.key.PublicKey(), wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: public}}}, false)
}

func (e *end) hasSession(t *testing.T) bool {
	t.Helper()
	state, err := e.userspace.dev.IpcGet()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(state, "last_handshake_time_sec=") && !strings.Contains(state, "last_handshake_time_sec=0\n")
}

// TestGreet has two hosts get to know each other, and a session without any
// packet, at the same time or one after the other.
func TestGreet(t *testing.T) {
	for _, apart := range []time.Duration{0, away / 2, 2 * away, handshakePause + 2*away, time.Second} {
		for first := range 2 {
			t.Run(fmt.Sprintf("%d first by %v", first+1, apart), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ends := newEnds(t, key(8), key(16))
					ends[first].meet(t, ends[1-first], first+1)
					time.Sleep(apart)
					ends[1-first].meet(t, ends[first], 2-first)
					time.Sleep(handshakePause + 4*away)
					for i, e := range ends {
						if !e.hasSession(t) {
							t.Errorf("host %d has no session", i+1)
						}
					}
				})
			})
		}
	}
}
