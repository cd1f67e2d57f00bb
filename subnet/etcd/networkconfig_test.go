// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"errors"
	"testing"
	"time"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

func TestConfigErrors(t *testing.T) {
	f := newFixture(t, sharedServer(t))
	m := f.manager(t)
	for _, tc := range []struct {
		raw  string
		is   error
		want string
	}{
		{"", subnet.ErrNoConfig, "no network configuration: etcd key " + f.prefix + "/config does not exist (it must be put with the etcd v3 API)"},
		{"{", subnet.ErrInvalidConfig, "etcd key " + f.prefix + "/config: invalid network configuration: byte 1: unexpected end of JSON input"},
		{
			`{"Network":"10.5.0.0/16","SubnetLen":31}`, subnet.ErrInvalidConfig,
			"etcd key " + f.prefix + "/config: invalid network configuration: SubnetLen must be less than /31, is 31",
		},
	} {
		if tc.raw != "" {
			f.put(t, "config", tc.raw)
		}
		_, err := m.Config(t.Context())
		if !errors.Is(err, tc.is) || err.Error() != tc.want {
			t.Errorf("%s: error is %v, want %q", tc.raw, err, tc.want)
		}
	}
}

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

	// A configuration that was put before the watch works again is reported after the outage. Only
	// the one before it may be reported again.
	f.put(t, "config", "before")
	expect("before")
	s.stop()
	s.start(t)
	f.put(t, "config", "after")
	expect("after")
	f.put(t, "config", "later")
	expect("later")
}
