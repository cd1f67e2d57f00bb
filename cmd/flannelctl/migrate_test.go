// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
)

// TestMigrationSteps checks the configurations that start, finish and abort return, and their
// errors.
func TestMigrationSteps(t *testing.T) {
	const before = `{"Network":"10.5.0.0/16","backend":{"Type":"vxlan"}}`
	during, err := startMigration([]byte(before), `{"Type":"wireguard"}`)
	if want := `{"Backend":{"Type":"vxlan"},"Network":"10.5.0.0/16","NextBackend":{"Type":"wireguard"}}`; err != nil || string(during) != want {
		t.Errorf("start gives %s, %v, want %s", during, err, want)
	}
	after, err := finishMigration(during)
	if want := `{"Backend":{"Type":"wireguard"},"Network":"10.5.0.0/16"}`; err != nil || string(after) != want {
		t.Errorf("finish gives %s, %v, want %s", after, err, want)
	}
	back, err := abortMigration(during)
	if want := `{"Backend":{"Type":"vxlan"},"Network":"10.5.0.0/16"}`; err != nil || string(back) != want {
		t.Errorf("abort gives %s, %v, want %s", back, err, want)
	}
	repeated, err := abortMigration([]byte(`{"backend":{"Type":"udp"},"NETWORK":"10.6.0.0/16","Network":"10.5.0.0/16","Backend":{"Type":"vxlan"},"NextBackend":null}`))
	if want := `{"Backend":{"Type":"vxlan"},"Network":"10.5.0.0/16"}`; err != nil || string(repeated) != want {
		t.Errorf("abort with repeated keys gives %s, %v, want %s", repeated, err, want)
	}
	for want, err := range map[string]error{
		"a migration is in progress": second(startMigration(during, `{"Type":"udp"}`)),
		"is not JSON":                second(startMigration([]byte(before), "wireguard")),
		"no NextBackend to finish":   second(finishMigration([]byte(before))),
		"no NextBackend to remove":   second(abortMigration([]byte(before))),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

func second(_ []byte, err error) error { return err }

func entriesOf(leases ...subnet.Lease) (all []subnet.Entry) {
	for _, l := range leases {
		all = append(all, subnet.Entry{Lease: l})
	}
	return all
}

// TestMigrationState checks the phases of hosts in a migration between two VNIs, and what the output
// says about this host.
func TestMigrationState(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"},"NextBackend":{"Type":"vxlan","VNI":7}}`))
	if err != nil {
		t.Fatal(err)
	}
	lease := func(key, data, nextData string) subnet.Lease {
		l := subnet.Lease{Key: key, BackendType: "vxlan", Endpoints: []subnet.Endpoint{{
			Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr("192.0.2.1"), Data: []byte(data),
		}}}
		if nextData != "" {
			l.NextType, l.Endpoints[0].NextData = "vxlan", []byte(nextData)
		}
		return l
	}
	reserved := lease("reserved", "", "")
	reserved.Permanent, reserved.Endpoints[0].PublicIP = true, netip.IPv4Unspecified()
	const one, seven = `{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}`, `{"VNI":7,"VtepMAC":"02:00:00:00:00:02"}`
	m, err := migrationOf(cfg, entriesOf(lease("old", one, ""), lease("both", one, seven), lease("new", seven, ""), reserved, subnet.Lease{Key: "unreadable"}))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]int{phaseBefore: 2, phaseBoth: 1, phaseFinished: 1}, m.Phases); diff != "" {
		t.Errorf("phases (-want +got):\n%s", diff)
	}
	m.addHost(status.Report{Network: status.Network{NextBackendType: "vxlan", MTU: 1450}, Peers: []status.Peer{
		{Lease: status.Lease{Key: "old"}, Backend: "vxlan", Waiting: "it does not publish data for vxlan"},
		{Lease: status.Lease{Key: "new"}, Backend: "vxlan"},
		{Lease: status.Lease{Key: "rival"}, Error: "its subnet is that of another lease"},
		{Lease: status.Lease{Key: "reserved"}, State: status.Reserved},
	}})
	if len(m.Host.Refused) != 1 {
		t.Errorf("%v are refused, want only rival", m.Host.Refused)
	}
	var text strings.Builder
	m.print(&text)
	for _, want := range []string{"old does not publish data", "unreadable does not publish data", "from vxlan (flannel.1) to vxlan (flannel.7)", "by vxlan (flannel.7): 1, by vxlan (flannel.1): 1", "rival is refused: its subnet is that of another lease", "MTU of new pods: 1450"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
}

// TestMigrationToUserSpace checks that the output says if this host runs wireguard in user space.
func TestMigrationToUserSpace(t *testing.T) {
	for mode, want := range map[string]bool{"userspace": true, "kernel": false, "": false} {
		m := migration{From: "vxlan", To: "wireguard"}
		m.addHost(status.Report{Network: status.Network{NextBackendType: "wireguard", NextMode: mode}})
		var text strings.Builder
		m.print(&text)
		if strings.Contains(text.String(), "wireguard runs in user space on this host") != want {
			t.Errorf("mode %q:\n%s", mode, text.String())
		}
	}
}

// TestMigrationEnd checks which hosts delay the end of a migration: those with data for a backend
// that the configuration does not have any more.
func TestMigrationEnd(t *testing.T) {
	lease := func(key, backendType, nextType, data, nextData string) subnet.Lease {
		return subnet.Lease{Key: key, BackendType: backendType, NextType: nextType, Endpoints: []subnet.Endpoint{{
			Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr("192.0.2.1"), Data: []byte(data), NextData: []byte(nextData),
		}}}
	}
	const one, seven = `{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}`, `{"VNI":7,"VtepMAC":"02:00:00:00:00:02"}`
	for _, tt := range []struct {
		name, backend        string
		leases               []subnet.Lease
		ended                bool
		before, both, finish int
		want                 []string
	}{
		{"all have finished", `{"Type":"host-gw"}`, []subnet.Lease{lease("a", "host-gw", "", "", ""), {Key: "unreadable"}}, false, 0, 0, 1, nil},
		{
			"finished", `{"Type":"host-gw"}`,
			[]subnet.Lease{lease("old", "vxlan", "", one, ""), lease("both", "vxlan", "host-gw", one, ""), lease("new", "host-gw", "", "", "")},
			true, 1, 1, 1, []string{"old does not publish data for host-gw", "both still publishes data for vxlan", "to host-gw alone"},
		},
		{
			"aborted", `{"Type":"vxlan"}`,
			[]subnet.Lease{lease("both", "vxlan", "host-gw", one, ""), lease("old", "vxlan", "", one, "")},
			true, 0, 1, 1, []string{"both still publishes data for host-gw"},
		},
		{
			"another VNI", `{"Type":"vxlan","VNI":7}`,
			[]subnet.Lease{lease("old", "vxlan", "", one, ""), lease("both", "vxlan", "vxlan", one, seven), lease("new", "vxlan", "", seven, "")},
			true, 1, 1, 1, []string{"old does not publish data for vxlan", "both still publishes data for the former vxlan"},
		},
		{
			"finished, from udp", `{"Type":"host-gw"}`,
			[]subnet.Lease{lease("old", "", "", "", ""), lease("both", "", "host-gw", "", ""), lease("new", "host-gw", "", "", "")},
			true, 1, 1, 1, []string{"old does not publish data for host-gw", "both still publishes data for udp"},
		},
		{
			"aborted, from udp", `{"Type":"udp"}`,
			[]subnet.Lease{lease("both", "", "host-gw", "", ""), lease("old", "", "", "", "")},
			true, 0, 1, 1, []string{"both still publishes data for host-gw"},
		},
	} {
		cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16","Backend":` + tt.backend + `}`))
		if err != nil {
			t.Fatal(err)
		}
		m, err := migrationOf(cfg, entriesOf(tt.leases...))
		ended := err == nil
		if err != nil && !errors.Is(err, errNoMigration) {
			t.Fatal(err)
		}
		if diff := cmp.Diff(map[string]int{phaseBefore: tt.before, phaseBoth: tt.both, phaseFinished: tt.finish}, m.Phases); ended != tt.ended || diff != "" {
			t.Errorf("%s: ended %v, want %v; phases (-want +got):\n%s", tt.name, ended, tt.ended, diff)
		}
		var text strings.Builder
		m.print(&text)
		for _, want := range tt.want {
			if !strings.Contains(text.String(), want) {
				t.Errorf("%s: no %q in\n%s", tt.name, want, text.String())
			}
		}
	}
}

// editedStore is a store in memory. Like etcd it refuses to write if the revision has changed.
type editedStore struct {
	store

	text     string
	revision int64
}

func (s *editedStore) Config(context.Context) ([]byte, int64, error) {
	return []byte(s.text), s.revision, nil
}

func (s *editedStore) SetConfig(_ context.Context, text []byte, revision int64) error {
	if revision != s.revision {
		return etcd.ErrChanged
	}
	s.text, s.revision = string(text), revision+1
	return nil
}

// TestMigrationKeepsOtherEdits checks that a step of a migration does not undo a change that another
// program makes between the reading and the writing.
func TestMigrationKeepsOtherEdits(t *testing.T) {
	const before, other = `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`, `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":4789}}`
	s := &editedStore{text: before, revision: 7}
	cmd := newMigrateCommand(thisHost())
	cmd.SetContext(t.Context())
	cmd.SetOut(io.Discard)
	step := func(meanwhile string) error {
		return replaceConfig(cmd, s, false, func(text []byte) ([]byte, error) {
			if meanwhile != "" {
				s.text, s.revision = meanwhile, s.revision+1
			}
			return startMigration(text, `{"Type":"host-gw"}`)
		})
	}
	if err := step(other); !errors.Is(err, etcd.ErrChanged) || s.text != other {
		t.Errorf("error %v, and the store has %s, want ErrChanged and the change of the other program", err, s.text)
	}
	if err := step(""); err != nil || !strings.Contains(s.text, `"Port":4789`) || !strings.Contains(s.text, "NextBackend") {
		t.Errorf("error %v, and the store has %s, want both changes", err, s.text)
	}
}
