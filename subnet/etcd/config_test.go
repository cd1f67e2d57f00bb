// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"testing"
	"time"

	"github.com/flanneld/flanneld/subnet/subnettest"
)

func TestWatchTellsOfTheConfiguration(t *testing.T) {
	s := newServer(t)
	f := newFixture(t, s)
	f.put(t, "config", configV4)
	texts := make(chan *string, 100)
	m := f.manager(t, func(c *Config) {
		c.OnConfig = func(text []byte) {
			if text == nil {
				texts <- nil
				return
			}
			reported := string(text)
			texts <- &reported
		}
	})
	subnettest.Watch(t, m)
	last := ""
	expect := func(want string) {
		t.Helper()
		deadline := time.After(patience)
		for {
			select {
			case text := <-texts:
				got := "none"
				if text != nil {
					got = *text
				}
				if got != want && got != last { // the configuration before may be reported again
					t.Errorf("%q was reported between %q and %q", got, last, want)
				}
				if got == want {
					last = want
					return
				}
			case <-deadline:
				t.Fatalf("%q was not reported", want)
			}
		}
	}
	expect(configV4)
	f.put(t, "config", "another")
	expect("another")
	f.put(t, "config", "")
	expect("")
	f.delete(t, "config")
	expect("none")

	// A configuration that was put during an outage is reported after it, and no earlier one.
	f.put(t, "config", "before")
	expect("before")
	s.stop()
	s.start(t)
	f.put(t, "config", "after")
	expect("after")
	f.put(t, "config", "later")
	expect("later")
}
