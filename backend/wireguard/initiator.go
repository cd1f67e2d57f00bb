// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"bytes"
	"context"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	wgdevice "golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

const (
	// handshakePause is the minimum time between the last handshake that a device starts with a
	// peer and the first one that the next device of this host starts with it. A peer drops a
	// handshake that arrives less than 20 ms after the last one (HandshakeInitationRate of
	// wireguard-go). The sender would then repeat it only after 5 s (REKEY_TIMEOUT of the
	// protocol).
	handshakePause = 60 * time.Millisecond
	// If this host has the smaller public key, the initiator starts up to handshakeAttempts
	// handshakes with a peer that has no session, with retryPause between them.
	retryPause = 500 * time.Millisecond
	// turnPause is the time for which the host with the larger public key lets the other host start.
	turnPause         = retryPause / 2
	handshakeAttempts = 3
	// stateReads limits how often retry reads the device's state in one round, because each reading
	// describes all peers of the device.
	stateReads = 32
)

// initiator starts handshakes with the peers of a device in this process. WireGuard itself starts
// one when it has a packet to send. But a peer may still have a session with an earlier device of
// this host. Without a handshake the packets that this peer sends would be lost.
//
// Two handshakes that cross do harm: both may fail, and WireGuard starts none for 5 s. Or one
// fails, and when WireGuard repeats it after 5 s, packets of the session that has begun are lost.
// Two hosts learn of each other at nearly the same time. So the host with the smaller public key
// starts, and starts again while there is no session. The other host starts later, if there is
// still no session. Handshakes can still cross if the hosts learn of each other at different times.
type initiator struct {
	dev    *wgdevice.Device
	ctx    context.Context // ends at close
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu   sync.Mutex
	last time.Time // time of the last started handshake
}

// newInitiator returns an initiator that continues after the end of ctx, until close.
func newInitiator(ctx context.Context, dev *wgdevice.Device) *initiator {
	i := &initiator{dev: dev}
	i.ctx, i.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return i
}

// initiate must be called after every change of the device's peers. own is the device's public key.
// fresh is set if the peers may have sessions with an earlier device. The peers in replaced may have another
// device than before. A session with the former one would only end after 15 s without an answer.
func (i *initiator) initiate(own wgtypes.Key, peers []wgtypes.PeerConfig, replaced map[wgtypes.Key]bool, fresh bool) {
	var added, again []wgdevice.NoisePublicKey
	for _, p := range peers {
		key := wgdevice.NoisePublicKey(p.PublicKey)
		switch {
		case replaced[p.PublicKey]:
			again = append(again, key)
		case !p.UpdateOnly:
			added = append(added, key)
		}
	}
	i.begin(own, added, fresh, time.Time{})
	i.begin(own, again, false, time.Now())
}

// begin starts handshakes with these peers. Sessions do not count that did not begin after since.
func (i *initiator) begin(own wgtypes.Key, peers []wgdevice.NoisePublicKey, fresh bool, since time.Time) {
	again := !since.IsZero()
	var first, second []wgdevice.NoisePublicKey
	for _, key := range peers {
		smaller := bytes.Compare(own[:], key[:]) < 0
		if smaller {
			first = append(first, key)
		} else if !fresh {
			second = append(second, key)
		}
		if smaller || fresh {
			i.startHandshake(key, again)
		}
	}

	if len(first) > 0 {
		i.tasks.Go(func() { i.retry(first, handshakeAttempts-1, retryPause, true, since) })
	}
	if len(second) > 0 {
		i.tasks.Go(func() { i.retry(second, 1, turnPause, again, since) })
	}
}

// retry starts handshakes with the peers that still have no session that began after since.
func (i *initiator) retry(peers []wgdevice.NoisePublicKey, times int, pause time.Duration, again bool, since time.Time) {
	for range times {
		if wait.For(i.ctx, pause) != nil {
			return
		}

		peers = i.withoutSession(peers, since) // nearly all have a session now
		var left []wgdevice.NoisePublicKey
		for few := range slices.Chunk(peers, 1+len(peers)/stateReads) {
			// A session may have begun a moment ago, and already have traffic. Another handshake would
			// interrupt that.
			few = i.withoutSession(few, since)
			for _, key := range few {
				if i.ctx.Err() != nil {
					return
				}
				i.startHandshake(key, again)
			}
			left = append(left, few...)
		}
		peers = left
	}
}

// startHandshake does nothing if the device has started a handshake with the peer in the last 5 s.
// With again, the device gives that one up, ignores a late answer to it, and starts a new one.
func (i *initiator) startHandshake(key wgdevice.NoisePublicKey, again bool) {
	peer := i.dev.LookupPeer(key)
	if peer == nil {
		return
	}
	if again {
		peer.ExpireCurrentKeypairs()
	}
	_ = peer.SendHandshakeInitiation(false) // if it fails, the device repeats it with the next packet

	i.mu.Lock()
	defer i.mu.Unlock()
	i.last = time.Now()
}

// withoutSession returns those peers with which the device has completed no handshake after since. It
// changes the array of peers.
func (i *initiator) withoutSession(peers []wgdevice.NoisePublicKey, since time.Time) []wgdevice.NoisePublicKey {
	state, err := i.dev.IpcGet()
	if err != nil {
		return nil
	}

	had := map[string]bool{}
	of := ""
	var seconds int64
	for line := range strings.Lines(state) {
		switch name, value, _ := strings.Cut(strings.TrimSpace(line), "="); name {
		case "public_key":
			of = value
		case "last_handshake_time_sec": // 0 without a handshake
			seconds, _ = strconv.ParseInt(value, 10, 64)
		case "last_handshake_time_nsec":
			fraction, _ := strconv.ParseInt(value, 10, 64)
			had[of] = seconds > 0 && time.Unix(seconds, fraction).After(since)
		}
	}
	return slices.DeleteFunc(peers, func(k wgdevice.NoisePublicKey) bool { return had[hex.EncodeToString(k[:])] })
}

func (i *initiator) close() {
	i.cancel()
	i.tasks.Wait()

	// Until another device may start handshakes with the same peers, even if this process is about to
	// stop: the next one may start them at once.
	<-time.After(time.Until(i.last.Add(handshakePause)))
}
