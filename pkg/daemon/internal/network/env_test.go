// SPDX-License-Identifier: Apache-2.0

package network

import (
	"testing"

	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/options"
)

// TestLocation checks that the last known location counts only for the label that it comes from, and only
// until the label was read.
func TestLocation(t *testing.T) {
	west, none := "west", ""
	for name, tt := range map[string]struct {
		past lastknown.State
		opts options.Options
		read *string
		want string
	}{
		"an option":                          {lastknown.State{Location: "east"}, options.Options{Location: "west"}, nil, "west"},
		"no option any more":                 {lastknown.State{Location: "east"}, options.Options{}, nil, ""},
		"the same label":                     {lastknown.State{Location: "east", LocationLabel: "site"}, options.Options{LocationLabel: "site"}, nil, "east"},
		"the same label with another value":  {lastknown.State{Location: "east", LocationLabel: "site"}, options.Options{LocationLabel: "site"}, &west, "west"},
		"the same label that is gone":        {lastknown.State{Location: "east", LocationLabel: "site"}, options.Options{LocationLabel: "site"}, &none, ""},
		"another label":                      {lastknown.State{Location: "east", LocationLabel: "site"}, options.Options{LocationLabel: "zone"}, nil, ""},
		"a label, after an option":           {lastknown.State{Location: "east"}, options.Options{LocationLabel: "site"}, nil, ""},
		"a label that no longer is the flag": {lastknown.State{Location: "east", LocationLabel: "site"}, options.Options{}, nil, ""},
	} {
		p := &Network{past: tt.past, opts: tt.opts}
		p.labelled.Store(tt.read)
		if got := p.location(); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
