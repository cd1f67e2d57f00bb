package wireguard

import (
	"bytes"
	"context"
	"os"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"k8s.io/klog/v2"
)

// A preshared key takes part in handshakes alone: a session goes on whatever its
// peer is given. Hosts learn of a new key at different moments, and until both
// have it no handshake between them succeeds. So a peer gets it either when its
// session is young, and lasts long enough for the other host to learn, or when
// the session is so old that the other host seems to have it already.
const (
	youngSession = 10 * time.Second
	// One is replaced after 120 s (REKEY_AFTER_TIME of the protocol), up to 10 s
	// later if little is sent, and dead after sessionLife.
	oldSession = 135 * time.Second
)

// pskCheck is how often the file of the preshared key is read, and how often
// peers are looked at that wait for a new one. It is less than youngSession.
const pskCheck = 3 * time.Second

// takesPSK says whether this is the moment to give a new preshared key to a peer, with which
// the last handshake is that old.
func takesPSK(age time.Duration) bool {
	return age < youngSession || age > oldSession
}

// secret is the preshared key in use.
type secret struct {
	key      wgtypes.Key
	known    bool
	failing  bool // that is logged
	rotating bool // it is new here, so what peers have in its place was ours
	waiting  bool // not all peers have it yet
}

// read returns the preshared key. Where it cannot be read any more the one
// before is kept: sessions have it.
func (s *secret) read(ctx context.Context, c config) (wgtypes.Key, error) {
	key, err := c.psk()
	if err != nil && !s.known {
		return key, err
	}
	log := klog.FromContext(ctx)
	if err != nil && !s.failing {
		log.Error(err, "going on with the preshared key that was there before")
	}
	if s.failing = err != nil; s.failing {
		return s.key, nil
	}
	if s.known && key != s.key {
		log.Info("the preshared key has changed: peers get it at their next handshakes", "file", c.PSKFile)
		s.waiting = true
	}
	s.rotating = s.rotating || !s.known || key != s.key
	s.key, s.known = key, true
	return key, nil
}

// settle notes how many peers wait for the key, and whether these were all there are.
func (s *secret) settle(ctx context.Context, waiting int, all bool) {
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

// watch has Changed deliver what kernel delivers, and when the file of the
// preshared key has changed, until Close.
func (n *network) watch(kernel <-chan struct{}) {
	n.running.Go(func() {
		var tick <-chan time.Time
		if n.config.PSKFile != "" {
			ticker := time.NewTicker(pskCheck)
			defer ticker.Stop()
			tick = ticker.C
		}
		seen, _ := os.ReadFile(n.config.PSKFile) // who needs it says what is wrong with it
		for {
			select {
			case <-n.stop:
				return
			case <-kernel:
			case <-tick:
				now, _ := os.ReadFile(n.config.PSKFile)
				if bytes.Equal(now, seen) {
					continue
				}
				seen = now
			}
			select {
			case n.changed <- struct{}{}:
			default:
			}
		}
	})
}
