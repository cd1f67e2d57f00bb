// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
)

func TestKeysShowNoSecret(t *testing.T) {
	k := Keys{"id", "very-secret", "very-secret"}
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		if text := fmt.Sprintf(format, k) + fmt.Sprintf(format, &k) + fmt.Sprintf(format, struct{ K Keys }{k}); strings.Contains(text, "very-secret") {
			t.Errorf("%s shows %s", format, text)
		}
	}
}

// TestSession reads values from three services. If a service has forgotten its sessions, Read must return a
// transient error, and the next Read must open a new session. From a service without sessions, Read must
// return the values. If a service is away, Read must return a transient error.
func TestSession(t *testing.T) {
	sessions := map[string]bool{}
	opened := 0
	address := cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPut && r.Header.Get("X-Session-ttl-seconds") != "":
			opened++
			id := fmt.Sprint(opened)
			sessions[id] = true
			fmt.Fprintln(w, id)
		case !sessions[r.Header.Get("X-Session")]:
			http.Error(w, "no session", http.StatusUnauthorized)
		default:
			fmt.Fprintln(w, "value of "+r.URL.Path)
		}
	}))
	m := &Metadata{Cloud: "Some Cloud", URL: address, Session: "X-Session"}
	for range 2 {
		if text, err := m.Read(t.Context(), "a/b"); err != nil || text != "value of /latest/meta-data/a/b" {
			t.Errorf("have %q, %v", text, err)
		}
	}
	clear(sessions)
	if _, err := m.Read(t.Context(), "a"); !cloud.Transient(err) || !strings.Contains(err.Error(), "read a from the metadata service of Some Cloud") {
		t.Errorf("error %v, want one that may end by itself", err)
	}
	if _, err := m.Read(t.Context(), "a"); err != nil || opened != 2 {
		t.Errorf("error %v, %d sessions, want a second one", err, opened)
	}

	without := cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || r.Header.Get("X-Session") != "" {
			http.NotFound(w, r)
		}
		if strings.HasSuffix(r.URL.Path, "/missing") {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, "[192.168.1.1/, \"fd00::1\"]\nnonsense")
	}))
	m = &Metadata{Cloud: "Some Cloud", URL: without + "/", Session: "X-Session"}
	if got, err := m.ReadAddresses(t.Context(), "ips"); err != nil || !slices.Equal(got, []netip.Addr{netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("fd00::1")}) {
		t.Errorf("addresses %v, error %v", got, err)
	}
	if got, err := m.ReadAddresses(t.Context(), "missing"); err != nil || got != nil {
		t.Errorf("addresses %v, error %v, want none", got, err)
	}
	if _, err := m.Read(t.Context(), "missing"); !errors.Is(err, ErrUndefined) || cloud.Transient(err) {
		t.Errorf("error %v, want ErrUndefined", err)
	}
	m = &Metadata{Cloud: "Some Cloud", URL: "http://127.0.0.1:1"}
	if _, err := m.Read(t.Context(), "a"); !cloud.Transient(err) {
		t.Errorf("error %v, want one that may end by itself", err)
	}
}

// TestKeysAreKept expects that Keys keeps the keys, and reads them again after Renew and shortly before they
// end.
func TestKeysAreKept(t *testing.T) {
	asked, left := 0, time.Hour
	m := &Metadata{Cloud: "Some Cloud", Roles: "roles/", URL: cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/roles/") {
			fmt.Fprint(w, "some-role")
			return
		}
		asked++
		fmt.Fprintf(w, `{"TmpSecretId":"id-%d","TmpSecretKey":"s","Token":"t","ExpiredTime":1,"Expiration":%q,"Code":"Success"}`, asked, time.Now().Add(left).UTC().Format(time.RFC3339))
	}))}
	for i, want := range []string{"id-1", "id-1", "id-2", "id-3", "id-4"} {
		switch i {
		case 2:
			m.Renew()
			left = time.Minute // less than the reserve
		case 3:
			m.Renew()
		}
		if k, err := m.Keys(t.Context()); err != nil || k != (Keys{want, "s", "t"}) {
			t.Errorf("%d: keys %v, error %v, want %s", i, k, err, want)
		}
	}
}

func FuzzMetadata(f *testing.F) {
	f.Add(`{"AccessKeyId":"a","AccessKeySecret":"b","Expiration":"2100-01-01T00:00:00Z"}`)
	f.Add(`{"access_token":"a","expires_in":3599,"token_type":"Bearer"}`)
	f.Add(`["192.168.1.1","fd00::1"]`)
	f.Fuzz(func(t *testing.T, text string) {
		for _, a := range addresses(text) {
			if !a.IsValid() {
				t.Errorf("%q has an invalid address", text)
			}
		}
		if k, _, ok := decodeKeys(text); ok && (k.ID == "" || k.Secret == "") && k.Token == "" {
			t.Errorf("%q has keys without a secret and a token", text)
		}
	})
}
