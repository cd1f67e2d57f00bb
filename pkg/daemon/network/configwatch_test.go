// SPDX-License-Identifier: Apache-2.0

package network

import (
	"errors"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
)

func TestConfigWatch(t *testing.T) {
	const used = `{"Network":"10.5.0.0/16"}`
	all, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	k := newConfigWatch(func(text []byte) (subnet.Config, error) {
		cfg, _, _, err := Validate("", text, true, all.Registry)
		return cfg, err
	})
	if k.used, _, err = subnet.ParseConfig([]byte(used)); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ text, want string }{
		{used, ""},
		{"", "there is no configuration any more"},
		{"{", "invalid"},
		{`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":99999}}`, "Backend.Port is 99999"},
		{`{"Network":"10.5.0.0/29"}`, "too small"},
		{used, ""},
	} {
		var text []byte
		if step.text != "" {
			text = []byte(step.text)
		}
		k.apply(t.Context(), text)
		if got := k.difference(); !strings.Contains(got, step.want) || (step.want == "") != (got == "") {
			t.Errorf("after %q: %q, want %q", step.text, got, step.want)
		}
		select {
		case <-k.changed:
			t.Fatalf("after %q the daemon would end", step.text)
		default:
		}
	}
	k.apply(t.Context(), []byte(`{"Network":"10.6.0.0/16"}`))
	if err := k.exit(t.Context()); !errors.Is(err, ErrConfigChanged) || !strings.Contains(err.Error(), "10.6.0.0/16") {
		t.Errorf("exit: %v", err)
	}
}
