// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"bytes"
	"context"
	"os"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// A preshared key matters only in handshakes: a session continues with any new key. Hosts
// learn a new key at different times, and no handshake between two hosts succeeds until
// both have it. So a host sets the new key of a peer at one of two times. Either the
// session is young, and lasts long enough for the other host to learn the key. Or the
// session is so old that a new session should have replaced it. The handshakes for a new
// session then seem to fail because the other host has the new key already.
const (
	youngSession = 10 * time.Second
	// A session is replaced after 120 s (REKEY_AFTER_TIME of the protocol), or up to 10 s
	// later if there is little traffic, and ends after discovery.SessionLife.
	oldSession = 135 * time.Second
)

// pskCheck is the interval at which the file of the preshared key is read, and peers that
// wait for a new key are checked. It is shorter than youngSession, so that no young session
// is missed.
const pskCheck = 3 * time.Second

// age is the time since the last handshake with the peer.
func takesPSK(age time.Duration) bool {
	return age < youngSession || age > oldSession
}

// secret is the preshared key in use.
type secret struct {
	key           wgtypes.Key
	known         bool
	failureLogged bool // the log says that the key cannot be read
	rotating      bool // the key is new, so a peer with another key may still have the previous one
	waiting       bool // some peers do not have the key yet
}

// read returns an error only if it has never read a key.
func (s *secret) read(ctx context.Context, c config) (wgtypes.Key, error) {
	key, err := c.psk()
	if err != nil && !s.known {
		return key, err
	}

	log := klog.FromContext(ctx)
	if err != nil && !s.failureLogged {
		log.Error(err, "going on with the preshared key that was there before")
	}
	s.failureLogged = err != nil
	if err != nil {
		return s.key, nil // sessions use it
	}

	if s.known && key != s.key {
		log.Info("the preshared key has changed: peers get it at their next handshakes", "file", c.PSKFile)
		s.waiting = true
	}
	s.rotating = s.rotating || !s.known || key != s.key
	s.key = key
	s.known = true
	return key, nil
}

// setWaiting records how many peers did not have the key in a pass. all reports whether it included
// all peers.
func (s *secret) setWaiting(ctx context.Context, waiting int, all bool) {
	was := s.waiting
	s.waiting = waiting > 0
	if s.waiting || !s.rotating {
		return
	}
	if was {
		klog.FromContext(ctx).Info("all peers have the new preshared key")
	}
	s.rotating = !all
}

func watchPSKFile(ctx context.Context, path string, changed func()) {
	last, _ := os.ReadFile(path) // secret.read logs the error
	for wait.For(ctx, pskCheck) == nil {
		now, _ := os.ReadFile(path)
		if !bytes.Equal(now, last) {
			last = now
			changed()
		}
	}
}
