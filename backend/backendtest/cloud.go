// SPDX-License-Identifier: Apache-2.0

package backendtest

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// Cloud returns the backend that factory creates from the Backend object raw, on a host with
// the given families. The test fails on an error, and on a warning. It ignores warnings if raw
// contains an access key, because that key causes one.
func Cloud(t *testing.T, factory backend.Factory, raw string, families ...prefix.Family) *cloudnet.Backend {
	t.Helper()
	return cloudIn(t, factory, raw, Env(1500, families...))
}

func cloudIn(t *testing.T, factory backend.Factory, raw string, env backend.Env) *cloudnet.Backend {
	t.Helper()
	b, warnings, err := factory([]byte(raw), env)
	if err != nil || len(warnings) > 0 && !strings.Contains(raw, "AccessKey") {
		t.Fatalf("warnings %q, error %v", warnings, err)
	}
	return b.(*cloudnet.Backend)
}

// CloudOn returns the backend that factory creates from an empty Backend object, on an IPv4
// host. network is the range of pod addresses, such as 10.5.0.0/16.
func CloudOn(t *testing.T, factory backend.Factory, network string) *cloudnet.Backend {
	t.Helper()
	env := Env(1500, prefix.IPv4)
	env.Config.Networks = []subnet.Network{{Prefix: netip.MustParsePrefix(network)}}
	return cloudIn(t, factory, `{}`, env)
}

// CloudAt returns the cloud of the IPv4 host with that address, after Join.
func CloudAt(t *testing.T, factory backend.Factory, address netip.Addr) cloud.Cloud {
	t.Helper()
	env := Env(1500, prefix.IPv4)
	env.Underlay.Addrs[0] = underlay.Address{Local: address, Public: address}
	c := cloudIn(t, factory, `{}`, env).Cloud
	if _, err := c.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c
}

// Want contains a part of the error and a part of the warnings that are expected about a Backend
// object. An empty part means that none are expected.
type Want struct{ Err, Warning string }

// Config checks the error and the warnings of factory for each Backend object. The objects are
// the keys of tests. Objects with a secret contain the text very-secret, which neither the
// error nor a warning may contain.
func Config(t *testing.T, factory backend.Factory, tests map[string]Want) {
	t.Helper()
	for raw, want := range tests {
		_, warnings, err := factory([]byte(raw), Env(1500, prefix.IPv4))
		all := strings.Join(warnings, "; ")
		if want.Err == "" && err != nil || want.Err != "" && (err == nil || !strings.Contains(err.Error(), want.Err)) ||
			!strings.Contains(all, want.Warning) || want.Warning == "" && all != "" || strings.Contains(all+fmt.Sprint(err), "very-secret") {
			t.Errorf("%s: warnings %q, error %v, want %+v", raw, warnings, err, want)
		}
	}
}

// Redirect checks that a call that is redirected fails with an error that contains the status
// 307, and that the call does not reach the API. variable is the environment variable with the
// address of the API. Redirect replaces its value by the address of a server that redirects to
// the API. calls returns the number of calls that have reached the API.
func Redirect(t *testing.T, factory backend.Factory, variable string, calls func() int) {
	t.Helper()
	t.Setenv(variable, cloudtest.Serve(t, http.RedirectHandler(os.Getenv(variable), http.StatusTemporaryRedirect)))
	cloudtest.CheckFails(t, "a redirect", Cloud(t, factory, `{}`, prefix.IPv4).Cloud, "307", false)
	if n := calls(); n > 0 {
		t.Errorf("%d calls went to another server", n)
	}
}

// Leaks describes calls that fail in many ways, and the secrets that errors and log must not
// contain. S is the type of the server of a cloud.
type Leaks[S any] struct {
	New     backend.Factory
	Open    func(*testing.T) S // makes this process a host of a new cloud
	Faults  []Fault[S]
	Secrets []string
	Shown   []string // parts of the errors that must be in the log, so that each fault is known to have an effect
}

// Fault is a way to make the calls of a host fail.
type Fault[S any] struct {
	Raw string  // Backend object
	Set func(S) // makes the calls fail
}

// Run calls Claim and Join with each fault, and logs their results. It checks that the log
// contains no secret, and all texts in Shown.
func (l Leaks[S]) Run(t *testing.T) {
	t.Helper()
	var out bytes.Buffer
	log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&out), textlogger.Verbosity(10)))
	for _, fault := range l.Faults {
		fault.Set(l.Open(t))
		ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), log), 2*time.Second)
		b, warnings, err := l.New([]byte(fault.Raw), Env(1500, prefix.IPv4))
		if err != nil {
			t.Fatal(err)
		}
		c := b.(*cloudnet.Backend)
		_, err = c.Claim(ctx, subnet.Claim{})
		_, joined := c.Cloud.Join(ctx)
		cancel()
		log.Info("results", "warnings", warnings, "claim", err, "join", joined, "calls", c.Calls.Counts())
	}

	for _, secret := range l.Secrets {
		if strings.Contains(out.String(), secret) {
			t.Errorf("the log contains %q:\n%s", secret, out.String())
		}
	}

	for _, text := range l.Shown {
		if !strings.Contains(out.String(), text) {
			t.Errorf("the log does not contain %q:\n%s", text, out.String())
		}
	}
}
