// SPDX-License-Identifier: Apache-2.0

package udp

import "sync"

// wake makes the loop call Sync soon.
type wake struct {
	changed chan struct{}
	stop    chan struct{}
	running sync.WaitGroup
}

func newWake() *wake { return &wake{changed: make(chan struct{}, 1), stop: make(chan struct{})} }

// Changed implements backend.Network.
func (w *wake) Changed() <-chan struct{} { return w.changed }

// watch passes on what changed receives to Changed, until end.
func (w *wake) watch(changed <-chan struct{}) {
	w.running.Go(func() {
		for {
			select {
			case <-changed:
				w.poke()
			case <-w.stop:
				return
			}
		}
	})
}

func (w *wake) poke() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}
