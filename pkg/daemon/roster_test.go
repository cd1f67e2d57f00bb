// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
)

func testFleet(t *testing.T) *fleet {
	dir := t.TempDir()
	o := options.Options{StateDir: dir, SubnetDir: filepath.Join(dir, "networks")}
	return newFleet(nil, Config{Options: o, Backends: builtin.New}, nil, klog.Background())
}

// withdraw takes back what was promised to m.
func withdraw(m *member) {
	defer m.announce(m.prefixes())
	m.promised = nil
	m.asked = nil
}

// TestRoster lets network red change its device, while network green asks for the former device after
// each step. green must not get the device while red is promised it or may still have it.
func TestRoster(t *testing.T) {
	on := func(network, device string) claims {
		return claims{networks: []netip.Prefix{netip.MustParsePrefix(network)}, names: []string{"device " + device}}
	}
	was, is, wants := on("10.5.0.0/16", "flannel.1"), on("10.5.0.0/16", "flannel.2"), on("10.6.0.0/16", "flannel.1")
	f := testFleet(t)
	red, green := f.join("red"), f.join("green")
	begin := func() {
		_ = red.promise(was)
		red.begin(nil)
		withdraw(red)
	}
	for _, step := range []struct {
		name string
		do   func()
		want string // part of the reason why green cannot have the device; empty if it can
	}{
		{"nothing", func() {}, ""},
		{"promised", func() { _ = red.promise(was) }, "it clashes with network red, which was there first: both have the device flannel.1"},
		{"withdrawn", func() { withdraw(red) }, ""},
		{"begun", begin, "clashes with network red"},
		{"begun again", begin, "clashes with network red"},
		{"claimed", func() { _ = red.replace([]claims{was}) }, "clashes with network red"},
		{"promised another", func() { _ = red.promise(is) }, "clashes with network red"},
		{"changed", func() { _ = red.replace([]claims{is, was}) }, "it waits until network red has removed what a former configuration left: both have the device flannel.1"},
		{"removed", func() { _ = red.replace([]claims{is}) }, ""},
		{"deleted", func() { withdraw(red); red.retired() }, ""},
	} {
		step.do()
		err := green.promise(wants)
		switch {
		case step.want == "" && err != nil:
			t.Errorf("%s: green cannot have its device: %v", step.name, err)
		case step.want != "" && (err == nil || !strings.Contains(err.Error(), step.want)):
			t.Errorf("%s: %v, want an error with %q", step.name, err, step.want)
		}
		withdraw(green)
	}
}

// TestRosterClaim withdraws the promise to network red, and then network green asks for something. If green
// gets a part of what was promised to red, red must not be able to claim that any more. In each case red
// must keep what it has.
func TestRosterClaim(t *testing.T) {
	on := func(network string, number int) claims {
		return claims{networks: []netip.Prefix{netip.MustParsePrefix(network)}, ports: map[string][]int{"udp": {number}}}
	}
	was, is := on("10.5.0.0/16", 8285), on("10.6.0.0/16", 8286)
	for name, tt := range map[string]struct {
		green claims
		want  string
	}{
		"a network":       {on("10.6.8.0/24", 1), "it clashes with network green, which was there first: its network 10.6.0.0/16 overlaps with 10.6.8.0/24"},
		"a port":          {on("10.7.0.0/16", 8286), "it clashes with network green, which was there first: both have UDP port 8286"},
		"something else":  {on("10.7.0.0/16", 1), ""},
		"the former port": {on("10.7.0.0/16", 8285), ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := testFleet(t)
			red, green := f.join("red"), f.join("green")
			red.claimed = []claims{was}
			_ = red.promise(is)
			withdraw(red)
			former := "it clashes with network red"
			if err := green.promise(tt.green); (err != nil) != (tt.green.clash(was) != "") || err != nil && !strings.Contains(err.Error(), former) {
				t.Fatal(err)
			}
			got := ""
			if err := red.replace([]claims{is, was}); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("red gets what was promised: %q, want %q", got, tt.want)
			}
			if err := red.replace([]claims{was}); err != nil {
				t.Errorf("red cannot go on with what it has: %v", err)
			}
		})
	}
}

// TestRosterOthers checks the addresses that others returns for network green. Its channel must be
// closed when a step changes them, and only then.
func TestRosterOthers(t *testing.T) {
	of := func(network string) claims {
		return claims{networks: []netip.Prefix{netip.MustParsePrefix(network)}}
	}
	f := testFleet(t)
	green, red, pink, grey := f.join("green"), f.join("red"), f.join("pink"), f.join("grey")
	for _, step := range []struct {
		name  string
		do    func()
		want  []string
		moves bool
	}{
		{"join", func() { f.join("blue") }, nil, false},
		{"promise", func() { _ = red.promise(of("10.4.0.0/16")) }, []string{"10.4.0.0/16"}, true},
		{"claim", func() { _ = red.replace([]claims{of("10.4.0.0/16")}) }, []string{"10.4.0.0/16"}, false},
		{"neighbour", func() { _ = pink.promise(of("10.5.0.0/16")) }, []string{"10.4.0.0/15"}, true},
		{"former", func() { _ = red.replace([]claims{of("10.4.0.0/16"), of("10.9.0.0/16")}) }, []string{"10.4.0.0/15", "10.9.0.0/16"}, true},
		{"refused", func() { _ = grey.promise(of("10.9.8.0/24")) }, []string{"10.4.0.0/15", "10.9.0.0/16"}, false},
		{"withdraw", func() { withdraw(red) }, []string{"10.4.0.0/15", "10.9.0.0/16"}, false},
		{"delete", func() { red.retired() }, []string{"10.5.0.0/16"}, true},
	} {
		_, moved := green.others()
		step.do()
		moves := false
		select {
		case <-moved:
			moves = true
		default:
		}
		var got []string
		all, _ := green.others()
		for _, p := range all {
			got = append(got, p.String())
		}
		if !slices.Equal(got, step.want) || moves != step.moves {
			t.Errorf("%s: %v, the channel is closed: %v, want %v, %v", step.name, got, moves, step.want, step.moves)
		}
	}
	if own, _ := pink.others(); len(own) > 0 {
		t.Errorf("the only network has others: %v", own)
	}
}

// TestRecalledClaims starts with the state file of a network that had not removed its former device
// when the last process ended. Another network must get neither that device nor the present one.
func TestRecalledClaims(t *testing.T) {
	config := func(text string) subnet.Config {
		cfg, err := subnet.ParseConfig([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	f := testFleet(t)
	own := netip.MustParseAddr("192.0.2.1")
	eth0 := underlay.Interface{Name: "eth0", MTU: 1500, Addrs: []underlay.Address{{Local: own, Public: own}}}
	unknown := config(`{"Network":"10.7.0.0/16","Backend":{"Type":"vxlan"}}`)
	unknown.BackendType = "carrier-pigeon"
	red := f.join("red")
	if err := red.recall(lastknown.State{
		Config: config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":2}}`), Interface: eth0,
		Former: []lastknown.Former{
			{Config: config(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":1}}`), Interface: eth0},
			{Config: unknown, Interface: eth0},
		},
	}); err != nil {
		t.Fatal(err)
	}
	green := f.join("green")
	for text, want := range map[string]string{
		`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":1}}`: "flannel.1",
		`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":2}}`: "flannel.2",
		`{"Network":"10.7.8.0/24","Backend":{"Type":"vxlan","VNI":3}}`: "10.7.0.0/16",
		`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":3}}`: "",
	} {
		green.offer([]byte(text))
		green.admit(t.Context())
		refused := ""
		if why := green.refused; why != nil {
			refused = why.Error()
		}
		if !strings.Contains(refused, want) || (refused == "") != (want == "") {
			t.Errorf("%s: refused because of %q, want %q", text, refused, want)
		}
	}
}

// TestRefusedConfigurationAfterAFailure has a network that uses one configuration. A second one is
// admitted and a third one refused. The network must begin again with the first configuration, and
// change to the third one when that is admitted.
func TestRefusedConfigurationAfterAFailure(t *testing.T) {
	f := testFleet(t)
	config := func(vni int) []byte {
		return fmt.Appendf(nil, `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":%d}}`, vni)
	}
	red, green := f.join("red"), f.join("green")
	given := func() []byte {
		if red.promised == nil {
			return nil
		}
		return red.text
	}
	green.offer([]byte(`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":3}}`))
	green.admit(t.Context())
	red.offer(config(1))
	red.admit(t.Context())
	first := red.config
	if !red.serves() || !red.begin(nil) {
		t.Fatalf("%+v cannot begin", first)
	}
	red.offer(config(2))
	red.admit(t.Context())
	if red.promised == nil || !bytes.Equal(given(), config(2)) || len(subnet.Changes(red.config, first)) == 0 {
		t.Errorf("the second configuration leads to %+v after %+v", red.config, first)
	}
	red.offer(config(3))
	red.admit(t.Context())
	if text := given(); text != nil {
		t.Errorf("the network gets %s, which was refused", text)
	}
	red.offer(config(2))
	red.admit(t.Context())
	if text := given(); !bytes.Equal(text, config(2)) {
		t.Errorf("the network gets %q when the second configuration is there again", text)
	}
	red.offer(config(3))
	red.admit(t.Context())
	if !red.serves() || red.promised != nil || red.refused == nil || len(subnet.Changes(red.used, first)) > 0 {
		t.Errorf("after the third configuration was refused: %+v, want to go on with %+v", red.used, first)
	}
	if !red.begin(nil) || len(subnet.Changes(red.used, first)) > 0 {
		t.Error("the network cannot go on with the first configuration")
	}
	close(f.answered)
	if cfg, err := (networkStore{member: red}).Config(t.Context()); err != nil || len(subnet.Changes(cfg, first)) > 0 {
		t.Errorf("the network begins with %+v, %v, want the first configuration", cfg, err)
	}
	green.offer(nil)
	red.admit(t.Context())
	if red.promised == nil || !bytes.Equal(given(), config(3)) || len(subnet.Changes(red.config, first)) == 0 {
		t.Errorf("when the third configuration is admitted: %+v, want a change", red.config)
	}
	red.offer(nil)
	if red.serves() || !red.retires() {
		t.Errorf("when it is deleted: %+v, want that it retires", red)
	}
}

// TestRosterKnot lets networks change to what others have, in any order of joining. If they wait for each other, the one
// with the last name must release what it has. After that all must get what they want.
func TestRosterKnot(t *testing.T) {
	on := func(network string, number int) claims {
		return claims{networks: []netip.Prefix{netip.MustParsePrefix(network)}, ports: map[string][]int{"udp": {number}}, names: []string{fmt.Sprint("device flannel-", number)}}
	}
	type change struct{ from, to claims }
	a, b, c := on("10.1.0.0/16", 1), on("10.2.0.0/16", 2), on("10.3.0.0/16", 3)
	portOf := func(c claims, of claims) claims {
		return claims{networks: c.networks, ports: of.ports, names: of.names}
	}
	for name, tt := range map[string]struct {
		changes map[string]change
		want    string
	}{
		"two swap their ports":          {map[string]change{"green": {a, portOf(a, b)}, "red": {b, portOf(b, a)}}, "red"},
		"two swap their ranges":         {map[string]change{"green": {a, portOf(b, a)}, "red": {b, portOf(a, b)}}, "red"},
		"three in a circle":             {map[string]change{"blue": {a, b}, "green": {b, c}, "red": {c, a}}, "red"},
		"one more waits for the circle": {map[string]change{"blue": {a, b}, "green": {b, a}, "red": {c, portOf(c, a)}}, "green"},
		"only one changes":              {map[string]change{"green": {a, b}, "red": {b, b}}, ""},
		"a chain":                       {map[string]change{"blue": {a, b}, "green": {b, c}, "red": {c, c}}, ""},
		"both want the same":            {map[string]change{"green": {a, portOf(b, c)}, "red": {b, portOf(a, c)}}, ""},
		"one also waits for a third":    {map[string]change{"blue": {a, portOf(a, b)}, "green": {b, claims{networks: c.networks, ports: a.ports, names: a.names}}, "red": {c, c}}, ""},
	} {
		for _, reversed := range []bool{false, true} {
			names := slices.Sorted(maps.Keys(tt.changes))
			if reversed {
				slices.Reverse(names)
			}
			f := testFleet(t)
			for _, n := range names {
				f.join(n).claimed = []claims{tt.changes[n].from}
			}
			for range 2 {
				for _, n := range names {
					_ = f.join(n).promise(tt.changes[n].to)
				}
			}
			got := ""
			if m := f.knot(); m != nil {
				got = m.name
			}
			if got != tt.want {
				t.Errorf("%s, in the order %v: %q must release what it has, want %q", name, names, got, tt.want)
			}
			if got == "" {
				continue
			}
			if err := f.join(got).promise(tt.changes[got].to); err == nil || !strings.Contains(err.Error(), "it waits until network ") {
				t.Errorf("%s, in the order %v: refused because %v", name, names, err)
			}
			f.join(got).claimed = nil
			for range names {
				for _, n := range names {
					if f.join(n).promise(tt.changes[n].to) == nil {
						_ = f.join(n).replace([]claims{tt.changes[n].to})
					}
				}
			}
			for _, n := range names {
				if err := f.join(n).promise(tt.changes[n].to); err != nil && n <= got && name != "one more waits for the circle" { // the order of joining decides then
					t.Errorf("%s, in the order %v: %s still waits: %v", name, names, n, err)
				}
			}
		}
	}
}
