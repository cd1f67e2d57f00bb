// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/ownership"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
)

func TestLeftBehind(t *testing.T) {
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := &Network{host: &Host{}, catalog: catalog, store: silent{}, state: lastknown.NewStore(nil)}
	own := netip.MustParseAddr("192.168.77.1")
	eth0 := underlay.Interface{Name: "eth0", Index: 2, MTU: 1500, Addrs: []underlay.Address{{Local: own, Public: own}}}
	config := func(raw string) lastknown.Former {
		c, err := subnet.ParseConfig([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		return lastknown.Former{Config: c, Interface: eth0}
	}
	vxlan1, vxlan2 := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`), config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":2}}`)
	hostgw, alloc := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}`), config(`{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}`)
	narrow, other := config(`{"Network":"10.5.0.0/20","Backend":{"Type":"vxlan"}}`), config(`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}`)
	port := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":8473}}`)
	udp, moved := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}`), config(`{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Port":9285}}`)
	unknown := vxlan1
	unknown.Config.BackendType = "carrier-pigeon"
	for name, tc := range map[string]struct {
		before        []lastknown.Former
		last, present lastknown.Former
		want          []lastknown.Former
	}{
		"the first start":              {present: vxlan1},
		"no change":                    {last: vxlan1, present: vxlan1},
		"no other objects":             {last: port, present: vxlan1},
		"a VNI":                        {last: vxlan1, present: vxlan2, want: []lastknown.Former{vxlan1}},
		"there and back":               {before: []lastknown.Former{vxlan1}, last: vxlan2, present: vxlan1, want: []lastknown.Former{vxlan2}},
		"twice":                        {before: []lastknown.Former{vxlan1}, last: vxlan2, present: hostgw, want: []lastknown.Former{vxlan1, vxlan2}},
		"devices now":                  {last: hostgw, present: vxlan1},
		"no routes now":                {last: hostgw, present: alloc},
		"nothing before":               {last: alloc, present: hostgw},
		"a wider network":              {last: narrow, present: vxlan1},
		"a narrower one":               {last: vxlan1, present: narrow, want: []lastknown.Former{vxlan1}},
		"another one":                  {last: vxlan1, present: other, want: []lastknown.Former{vxlan1}},
		"a port of udp":                {last: udp, present: vxlan1, want: []lastknown.Former{udp}},
		"another port of udp":          {last: udp, present: moved},
		"a backend of a newer version": {last: unknown, present: vxlan1},
	} {
		t.Run(name, func(t *testing.T) {
			be, _, err := catalog.New(envOf(tc.present))
			if err != nil {
				t.Fatal(err)
			}
			got := p.leftBehind(lastknown.State{Config: tc.last.Config, Interface: tc.last.Interface, Former: tc.before}, be)
			describe := func(fs []lastknown.Former) (text []string) {
				for _, f := range fs {
					text = append(text, f.Config.BackendType+" "+string(f.Config.Backend)+" "+f.Config.Networks[0].Prefix.String())
				}
				return text
			}
			if diff := cmp.Diff(describe(tc.want), describe(got)); diff != "" {
				t.Errorf("leftBehind (-want +got):\n%s", diff)
			}
		})
	}
}

// TestSupersededChangeKeepsFormerDevices gives up a change that goes back to a former device. No other
// daemon may get the lock of that device before the retirement has removed the device.
func TestSupersededChangeKeepsFormerDevices(t *testing.T) {
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	config := func(raw string) subnet.Config {
		c, err := subnet.ParseConfig([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	present := config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":2}}`)
	former := lastknown.Former{Config: config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`), Interface: link(1500, "192.0.2.1")}
	now := lastknown.State{Config: present, Interface: former.Interface, Former: []lastknown.Former{former}, Own: peerOn("10.5.1.0/24", "192.0.2.1")}
	dir := t.TempDir()
	r := &Network{host: &Host{}, catalog: catalog, store: silent{}, state: lastknown.NewStore(nil), devices: ownership.NewLocks(dir)}
	r.state.Change(func(to *lastknown.State) { *to = now })
	be, _, err := catalog.New(r.env(now.Interface, present))
	if err != nil {
		t.Fatal(err)
	}
	s := &session{be: be}
	superseded := make(chan struct{})
	close(superseded)
	for _, pending := range []bool{true, false} {
		if !pending {
			r.state.Update(func(now *lastknown.State) { now.Former = nil })
		}
		back := config(`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}}`)
		if _, err := r.prepareUnless(t.Context(), superseded, s, back, make(chan struct{})); !errors.Is(err, errSuperseded) {
			t.Fatalf("%v, want errSuperseded", err)
		}
		other := ownership.NewLocks(dir)
		if err := other.Take("flannel.1"); errors.Is(err, ownership.ErrInUse) != pending {
			t.Errorf("another daemon that takes the former device gets %v, while it is to be removed: %v", err, pending)
		}
		other.Keep()
	}
}

func envOf(f lastknown.Former) backend.Env {
	return backend.Env{Underlay: f.Interface, Config: f.Config}
}

// TestRetirementKeepsPreparedDevices ends a retirement while a change waits for another lease. No other daemon may get
// the lock of the device that the change needs.
func TestRetirementKeepsPreparedDevices(t *testing.T) {
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	n := &Network{host: &Host{}, catalog: catalog, store: silent{}, state: lastknown.NewStore(nil), devices: ownership.NewLocks(dir)}
	n.progress = NewProgress(klog.Background())
	n.openKernel = func(linux.Options) (kernel, error) { return scriptedKernel{dataplanetest.New()}, nil }
	now := lastknown.State{
		Config: parseConfig(t, `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":2}}`), Interface: link(1500, "192.0.2.1"),
		Own: peerOn("10.5.1.0/24", "192.0.2.1"),
	}
	now.Former = []lastknown.Former{{Config: parseConfig(t, `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`), Interface: now.Interface}}
	n.state.Change(func(to *lastknown.State) { *to = now })
	be, _, err := catalog.New(n.env(now.Interface, now.Config))
	if err != nil {
		t.Fatal(err)
	}
	s := &session{be: be, retirement: n.newRetirement(now.Former, be), rules: wait.NewSignal()}

	ctx, cancel := context.WithCancel(t.Context())
	var preparing sync.WaitGroup
	defer preparing.Wait()
	defer cancel()
	preparing.Go(func() {
		other := parseConfig(t, `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":7}}`)
		for ctx.Err() == nil { // inUse may have the lock for a moment
			_, _ = n.prepareChange(ctx, s, other, make(chan struct{}))
		}
	})
	inUse := func(device string) bool {
		other := ownership.NewLocks(dir)
		defer other.Keep()
		return errors.Is(other.Take(device), ownership.ErrInUse)
	}
	waittest.Until(t, time.Minute, "the lock of the prepared device", func() bool { return inUse("flannel.7") })

	n.retire(ctx, s)
	if inUse("flannel.1") || !inUse("flannel.7") {
		t.Errorf("locked are flannel.1: %v, and flannel.7: %v; want only the latter", inUse("flannel.1"), inUse("flannel.7"))
	}
}
