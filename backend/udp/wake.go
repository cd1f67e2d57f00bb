package udp

import "sync"

// wake has the loop call Sync before long, whatever the cause.
type wake struct {
	changed chan struct{}
	stop    chan struct{}
	running sync.WaitGroup
}

func newWake() *wake { return &wake{changed: make(chan struct{}, 1), stop: make(chan struct{})} }

// Changed implements backend.Network.
func (w *wake) Changed() <-chan struct{} { return w.changed }

// watch has Changed deliver what changed delivers, until end.
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
