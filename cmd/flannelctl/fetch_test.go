// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/flanneld/flanneld/subnet"
)

const escape = "vxlan\x1b[2J\nPEER\tforged\u202e"

// TestForeignTextIsPrintable checks that no text of another host reaches the terminal with line breaks
// or escape sequences.
func TestForeignTextIsPrintable(t *testing.T) {
	const want = "vxlan [2J PEER forged"
	if got := newLease(subnet.Entry{Lease: subnet.Lease{Key: escape}}).Key; got != want {
		t.Errorf("key of a lease: %q, want %q", got, want)
	}
	if got := newLease(subnet.Entry{Err: errors.New(escape)}).Error; got != want {
		t.Errorf("error of an entry: %q, want %q", got, want)
	}

	report := `{"peers":[{"type":"vxlan\u001b[2J\nPEER\tforged\u202e","pathMTU":{"a\nb":1400}}],"n":12345678901234567890}`
	cleaned := `{"n":12345678901234567890,"peers":[{"pathMTU":{"a b":1400},"type":"vxlan [2J PEER forged"}]}`
	if got, err := printable([]byte(report)); err != nil || string(got) != cleaned {
		t.Errorf("report: %s, %v, want %s", got, err, cleaned)
	}
}

func TestFetchFollowsNoRedirect(t *testing.T) {
	asked := false
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer other.Close()
	redirect := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusFound))
	defer redirect.Close()
	cmd := newStatusCommand(thisHost())
	cmd.SetArgs([]string{"--url", redirect.URL})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "302 Found") || asked {
		t.Errorf("error %v, asked the other server: %v, want the status 302 as an error", err, asked)
	}
}

// TestFetchErrors checks that an error says in one line why the daemon cannot be asked, without the words of Go.
func TestFetchErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, tc := range []struct {
			err  error // of the connection; nil if there is no answer
			want string
		}{
			{&net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: "/x"}, Err: os.NewSyscallError("connect", syscall.ENOENT)}, "/x: no such file or directory"},
			{&net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: "/x"}, Err: os.NewSyscallError("connect", syscall.EACCES)}, "/x: permission denied: run flannelctl as root"},
			{nil, "no answer within 10s"},
		} {
			_, err := fetch(t.Context(), &http.Client{Transport: failing{tc.err}}, socketURL, "")
			if want := "ask flanneld for its status: " + tc.want; err == nil || err.Error() != want {
				t.Errorf("%v, want %q", err, want)
			}
		}
	})
}

// failing fails all requests with err, or answers none.
type failing struct{ err error }

func (f failing) RoundTrip(r *http.Request) (*http.Response, error) {
	if f.err == nil {
		<-r.Context().Done()
	}
	return nil, cmp.Or(f.err, r.Context().Err())
}

// TestFetchIsBounded checks that an answer without end is given up at the limit of its size. The clock of the
// test stands while it is read, so that a slow machine does not reach the limit of time first.
func TestFetchIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, err := fetch(t.Context(), &http.Client{Transport: endless{}}, "http://192.0.2.1", "")
		if err == nil || !strings.Contains(err.Error(), "larger than 128 MiB") {
			t.Errorf("error %v, want one that names the limit", err)
		}
	})
}

// endless answers each request with zeros that do not end.
type endless struct{}

func (e endless) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(e)}, nil
}

func (endless) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
