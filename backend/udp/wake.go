// SPDX-License-Identifier: Apache-2.0

package udp

import "sync"

// changeNotifier makes the loop call Sync soon.
type changeNotifier struct {
	changed chan struct{}
	stop    chan struct{}
	running sync.WaitGroup
}

func newChangeNotifier() *changeNotifier {
	return &changeNotifier{changed: make(chan struct{}, 1), stop: make(chan struct{})}
}

// Changed implements backend.Network.
func (w *changeNotifier) Changed() <-chan struct{} { return w.changed }

// watch passes on what changed receives to Changed, until end.
func (w *changeNotifier) watch(changed <-chan struct{}) {
	w.running.Go(func() {
		for {
			select {
			case <-changed:
				w.notify()
			case <-w.stop:
				return
			}
		}
	})
}

func (w *changeNotifier) notify() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}
