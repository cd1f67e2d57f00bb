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

// away is how long a packet of TestGreet is on its way.
const away = 20 * time.Millisecond

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

// meet has e get to know the other one, whose packets come to port.
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

// TestGreet has two hosts get to know each other, together or one after the other.
// Nobody sends anything, and yet they have a session sooner than in the 5 s after
// which WireGuard begins another handshake. Not so if the last greeting is crossed.
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
							t.Fatal("there is no session")
						case <-time.After(away):
						}
					}
				})
			}
		}
	}
}

// TestGreeterClose leaves the time that has to be between the greetings of two
// devices, and does not wait for those that are still to come.
func TestGreeterClose(t *testing.T) {
	ends := newEnds(t, key(8), key(16))
	for i, e := range ends { // one of them would greet again
		e.greeter = newGreeter(e.dev)
		began := time.Now()
		e.meet(t, ends[1-i], i+1, 0)
		e.greeter.close()
		if took := time.Since(began); took < handshakePause || took >= (greetings-1)*greetAgain {
			t.Errorf("host %d: it took %v, want hardly more than %v", i+1, took, handshakePause)
		}
	}
}
