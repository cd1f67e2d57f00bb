// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
)

// TestKernelWatch checks which changes are announced: those that flanneld does not undo, and not those of routes like its own.
func TestKernelWatch(t *testing.T) {
	enterNamespace(t)
	shell(t, "ip link set lo up; ip link add eth0 type veth peer name eth1; ip link set eth1 up; ip link set eth0 up")
	changed := make(chan struct{}, 100)
	stop, err := Watch(func() { changed <- struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		change string
		want   bool
	}{
		{"ip route add 10.5.1.0/24 dev eth0; ip route del 10.5.1.0/24", false},
		{"ip route add local 10.5.2.0/24 dev lo", true},
		{"ip route add blackhole 10.5.2.0/25", true},
		{"ip route del blackhole 10.5.2.0/25", true},
		{"ip rule del lookup main", true},
		{"ip rule add pref 5 goto 32767", true},
	} {
		<-time.After(50 * time.Millisecond) // until earlier announcements have come
		for len(changed) > 0 {
			<-changed
		}
		shell(t, tt.change)
		if tt.want {
			waittest.Receive(t, 10*time.Second, tt.change, changed)
		} else if <-time.After(50 * time.Millisecond); len(changed) > 0 {
			t.Errorf("%s is announced", tt.change)
		}
	}
	stop()
	for len(changed) > 0 {
		<-changed
	}
	shell(t, "ip rule add from 10.5.0.0/16 lookup 7")
	if len(changed) > 0 {
		t.Error("a signal after the end")
	}
}
