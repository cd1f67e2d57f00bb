// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
)

func TestCheckRanges(t *testing.T) {
	tables := []Table{{ID: "t0"}, {ID: "t1", Routes: []Route{byCall("10.5.1.0/24", "me"), byCall("192.168.0.0/16", LocalTarget), byCall("fd00::/16", LocalTarget), byCall("0.0.0.0/0", LocalTarget)}}}
	for network, want := range map[string]string{
		"10.5.0.0/16": "", "192.168.7.0/24": "192.168.0.0/16", "192.0.0.0/8": "192.168.0.0/16", "fd00:10::/32": "fd00::/16",
	} {
		err := CheckRanges(tables, prefixtest.Parse("172.16.0.0/16", network), "the VPC", "Some Cloud")
		if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), "the network "+network+" overlaps "+want+" of the VPC, where Some Cloud allows") {
			t.Errorf("%s: error %v, want it to overlap %q", network, err, want)
		}
	}
}

// TestLook expects that only routes of flanneld in the network get a state, and that it is not better than before.
func TestLook(t *testing.T) {
	routes := []Route{
		byCall(own, "runs"), byCall(peer, "stopped"), byCall(free, "gone"), byCall("10.5.4.0/24", "runs").in(Idle),
		byCall("10.5.5.0/24", "left out"), byCall("10.6.1.0/24", "outside"), foreign(byCall("10.5.6.0/24", "theirs")), learned(byCall("10.5.7.0/24", "vgw")),
	}
	want := []State{Carrying, Idle, Gone, Idle, Carrying, Carrying, Carrying, Carrying}
	tables := []Table{{ID: "t1", Routes: routes}}
	is := func(r Route) bool { return r.Target != "left out" }
	err := Look(t.Context(), tables, prefixtest.Parse("10.5.0.0/16"), is, func(_ context.Context, targets []string) (map[string]bool, error) {
		if !slices.Equal(targets, []string{"gone", "runs", "stopped"}) {
			t.Errorf("targets %v, want each one once", targets)
		}
		return map[string]bool{"runs": true, "stopped": false}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range routes {
		if r.State != want[i] {
			t.Errorf("%s: state %v, want %v", r, r.State, want[i])
		}
	}
	failed := errors.New("failed")
	if err := Look(t.Context(), tables, nil, is, func(context.Context, []string) (map[string]bool, error) { return nil, failed }); !errors.Is(err, failed) {
		t.Errorf("error %v, want that of the cloud", err)
	}
}
