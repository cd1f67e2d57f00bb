// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
)

// TestSend expects that Send returns an answer, and a redirect without following it. It expects a transient
// error, without the parameters of the URL, if the connection ends in the middle of an answer, the answer
// is too large, or there is no server.
func TestSend(t *testing.T) {
	answers := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot); fmt.Fprint(w, "text") })
	for name, test := range map[string]struct {
		address string
		status  int
		body    string
	}{
		"an answer":  {cloudtest.Serve(t, answers), http.StatusTeapot, "text"},
		"a redirect": {cloudtest.Serve(t, http.RedirectHandler(cloudtest.Serve(t, answers), http.StatusTemporaryRedirect)), http.StatusTemporaryRedirect, ""},
		"half an answer": {cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, "text")
		})), 0, ""},
		"an endless answer": {cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for sent := 0; sent <= maxAnswer; sent += 1 << 20 {
				_, _ = w.Write(make([]byte, 1<<20)) // the client may leave
			}
		})), 0, ""},
		"no server": {"http://127.0.0.1:1", 0, ""},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, test.address+"/?Secret=very-secret", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		status, body, err := Send(newHTTP(), req)
		if status != test.status || string(body) != test.body || cloud.Transient(err) != (test.status == 0) || strings.Contains(fmt.Sprint(err), "very-secret") {
			t.Errorf("%s: status %d, answer %q, error %v, want %d and %q", name, status, body, err, test.status, test.body)
		}
	}
}

func TestClean(t *testing.T) {
	for text, want := range map[string]string{
		"":                             "",
		"no\nplace \u001b[2J":          "no place [2J",
		strings.Repeat("ü", 151):       strings.Repeat("ü", 150) + "…",
		strings.Repeat("a", 299) + "ü": strings.Repeat("a", 299) + "…",
	} {
		if got := Clean(text); got != want {
			t.Errorf("%.20q: %q, want %q", text, got, want)
		}
	}
}

func TestAddresses(t *testing.T) {
	got := Addresses("", "192.168.77.1", "nonsense", "fd00::1", "10.0.0.0/8")
	if want := []netip.Addr{netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00::1")}; !slices.Equal(got, want) {
		t.Errorf("addresses %v, want %v", got, want)
	}
	if got := Addresses(); len(got) > 0 {
		t.Errorf("addresses %v, want none", got)
	}
}

// TestPages expects one call for each page, and an error if a page refers to itself.
func TestPages(t *testing.T) {
	for _, tt := range []struct {
		tokens []string // that the calls return
		want   []string // that they get
		fails  bool
	}{
		{[]string{""}, []string{""}, false},
		{[]string{"a", "b", ""}, []string{"", "a", "b"}, false},
		{[]string{"a", "b", "b", ""}, []string{"", "a", "b"}, true},
	} {
		params := url.Values{}
		var got []string
		err := Pages(params, "Token", func() (string, error) {
			got = append(got, params.Get("Token"))
			return tt.tokens[len(got)-1], nil
		})
		if !slices.Equal(got, tt.want) || (err != nil) != tt.fails {
			t.Errorf("%q: pages %q, error %v, want %q, an error: %v", tt.tokens, got, err, tt.want, tt.fails)
		}
	}
	if err := Pages(url.Values{}, "Token", func() (string, error) { return "a", cloud.ErrThrottled }); !errors.Is(err, cloud.ErrThrottled) {
		t.Errorf("error %v, want that of the call", err)
	}
}
