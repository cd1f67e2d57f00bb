// SPDX-License-Identifier: Apache-2.0

package subnet

import "testing"

// TestWayOutOfAMigration checks which configuration a host uses when the store has another one, and the steps
// after a finished migration.
func TestWayOutOfAMigration(t *testing.T) {
	const (
		network = `{"Network":"10.5.0.0/16","Backend":`
		before  = network + `{"Type":"vxlan"}}`
		during  = network + `{"Type":"vxlan"},"NextBackend":{"Type":"udp","Mode":"userspace"}}`
		edited  = network + `{"Type":"vxlan"},"NextBackend":{"Type":"udp","Port":8477}}`
		other   = `{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan"}`
		after   = network + `{"type":"UDP","Mode":"userspace"}}`
	)
	parse := func(text string) Config {
		t.Helper()
		cfg, err := ParseConfig([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	withdrawn := parse(edited)
	withdrawn.Stage = Withdrawn
	staged := func(s Stage) Config {
		cfg := parse(during)
		cfg.Stage = s
		return cfg
	}
	for _, tt := range []struct {
		name         string
		used, stored Config
		want         Config
	}{
		{"the first configuration", Config{}, parse(after), parse(after)},
		{"a migration starts", parse(before), parse(during), parse(during)},
		{"it goes on", parse(during), parse(during), parse(during)},
		{"it is aborted", parse(during), parse(before), parse(before)},
		{"it is finished", parse(during), parse(after), staged(Finished)},
		{"it stays finished", staged(Finished), parse(after), staged(Finished)},
		{"the host leaves", staged(Leaving), parse(after), staged(Leaving)},
		{"the end is taken back", staged(Leaving), parse(during), parse(during)},
		{"another next backend", parse(during), parse(network + `{"Type":"udp"}}`), parse(network + `{"Type":"udp"}}`)},
		{"the host has left", parse(after), parse(after), parse(after)},
		{"NextBackend is edited", parse(during), parse(edited), withdrawn},
		{"it is edited again", withdrawn, parse(during), func() Config { c := parse(during); c.Stage = Withdrawn; return c }()},
		{"it is aborted for another network", parse(during), parse(other + `}`), parse(before)},
		{"the network changes after that", parse(before), parse(other + `}`), parse(other + `}`)},
		{"a migration starts with another network", parse(before), parse(other + during[len(before)-1:]), parse(other + `}`)},
		{"it starts after that", parse(other + `}`), parse(other + during[len(before)-1:]), parse(other + during[len(before)-1:])},
		{"NextBackend is edited for another network", parse(during), parse(other + edited[len(before)-1:]), withdrawn},
		{"the network changes meanwhile", withdrawn, parse(other + edited[len(before)-1:]), func() Config { c := parse(other + edited[len(before)-1:]); c.Stage = Withdrawn; return c }()},
		{"it is edited and then aborted", withdrawn, parse(before), parse(before)},
		{"it is edited and then finished", withdrawn, parse(network + `{"Type":"udp","Port":8477}}`), func() Config { c := parse(edited); c.Stage = Finished; return c }()},
		{"it is edited again, with another network", withdrawn, parse(other + during[len(before)-1:]), func() Config { c := parse(other + during[len(before)-1:]); c.Stage = Withdrawn; return c }()},
		{"it is edited, and then the present backend changes", withdrawn, parse(network + `{"Type":"host-gw"},"NextBackend":{"Type":"ipip"}}`), parse(network + `{"Type":"host-gw"},"NextBackend":{"Type":"ipip"}}`)},
		{"it is finished, and the next one starts at once", parse(during), parse(after[:len(after)-1] + `,"NextBackend":{"Type":"ipip"}}`), parse(after[:len(after)-1] + `,"NextBackend":{"Type":"ipip"}}`)},
		{"a third backend that has no keys either", parse(network + `{"Type":"vxlan"},"NextBackend":{"Type":"host-gw"}}`), parse(network + `{"Type":"ipip"}}`), parse(network + `{"Type":"ipip"}}`)},
	} {
		if got := tt.used.Toward(tt.stored); len(Changes(got, tt.want)) > 0 || got.Stage != tt.want.Stage {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}

	changed := parse(`{"Network":"10.4.0.0/15","Backend":{"Type":"udp","Mode":"userspace"}}`)
	if got := parse(during).Toward(changed); got.Networks[0] != changed.Networks[0] || got.Stage != Finished {
		t.Errorf("with another network: %+v, want both backends, and the network of the store", got)
	}
	leaving := staged(Finished).Step()
	if leaving.Stage != Leaving || !leaving.Migrates() {
		t.Errorf("the first step leads to %+v", leaving)
	}
	if len(Changes(staged(Finished), leaving)) == 0 {
		t.Error("the step is no change")
	}
	if alone := leaving.Step(); len(Changes(alone, parse(after))) > 0 || len(Changes(alone, staged(Finished).Goal())) > 0 {
		t.Errorf("the second step leads to %+v", alone)
	}
	if withdrawn.Migrates() || len(Changes(withdrawn.Step(), parse(edited))) > 0 || len(Changes(withdrawn.Goal(), parse(edited))) > 0 {
		t.Errorf("the step from %+v leads to %+v", withdrawn, withdrawn.Step())
	}
}
