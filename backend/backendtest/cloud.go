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
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// Cloud returns the backend for a cloud with that Backend object, on a host with the given families.
// Only objects with keys may cause warnings.
func Cloud(t *testing.T, factory backend.Factory, raw string, families ...prefix.Family) *backend.CloudBackend {
	t.Helper()
	b, warnings, err := factory([]byte(raw), Env(1500, families...))
	if err != nil || len(warnings) > 0 && !strings.Contains(raw, "AccessKey") {
		t.Fatalf("warnings %q, error %v", warnings, err)
	}
	return b.(*backend.CloudBackend)
}

// CloudOn returns the backend for a cloud, on an IPv4 host of that network.
func CloudOn(t *testing.T, factory backend.Factory, network string) *backend.CloudBackend {
	t.Helper()
	env := Env(1500, prefix.IPv4)
	env.Config.Networks = []subnet.Network{{Prefix: netip.MustParsePrefix(network)}}
	b, _, err := factory([]byte(`{}`), env)
	if err != nil {
		t.Fatal(err)
	}
	return b.(*backend.CloudBackend)
}

// Complaint is a part of the error or of the warnings about a Backend object. Empty means that there
// are none.
type Complaint struct{ Err, Warning string }

// Config checks what a factory says about Backend objects. It must not show the text very-secret.
func Config(t *testing.T, factory backend.Factory, tests map[string]Complaint) {
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

// Redirect makes the API at the address in a variable redirect calls, and expects that they go to no
// other server. calls returns the number of calls that the API has got.
func Redirect(t *testing.T, factory backend.Factory, variable string, calls func() int) {
	t.Helper()
	t.Setenv(variable, cloudtest.Serve(t, http.RedirectHandler(os.Getenv(variable), http.StatusTemporaryRedirect)))
	cloudtest.CheckFails(t, "a redirect", Cloud(t, factory, `{}`, prefix.IPv4).Cloud, "307", false)
	if n := calls(); n > 0 {
		t.Errorf("%d calls went to another server", n)
	}
}

// Leaks are calls that fail in many ways, for a search for secrets in errors and log. S is the server
// of a cloud.
type Leaks[S any] struct {
	New     backend.Factory
	Open    func(*testing.T) S // makes this process a host of a new cloud
	Faults  []Fault[S]
	Secrets []string
	Shown   []string // parts of errors that the faults cause
}

// Fault makes calls of a host fail.
type Fault[S any] struct {
	Raw string // Backend object
	Set func(S)
}

// Run makes the calls, and searches for the secrets.
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
		c := b.(*backend.CloudBackend)
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
