// SPDX-License-Identifier: Apache-2.0

package status_test

import (
	"context"
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/report/status"
)

// driver uses the page like an operator: it reads, filters, selects and sorts, on a wide
// screen and on a phone.
const driver = `<!doctype html><iframe id="page" width="1200" height="800"></iframe><pre id="seen"></pre><script>
"use strict";
const frame = document.getElementById("page"), seen = {};
frame.onload = () => {
  const d = frame.contentDocument, shown = () => [...d.querySelectorAll("#peers tbody tr")].filter(r => !r.hidden);
  const put = (id, value, event) => { d.getElementById(id).value = value; d.getElementById(id).dispatchEvent(new Event(event)); };
  const sort = name => [...d.querySelectorAll("#peers th button")].find(b => b.textContent === name).click();
  const wide = () => d.documentElement.scrollWidth - d.documentElement.clientWidth;
  seen.Rows = shown().length;
  put("filter", "10.19.135.", "input");
  seen.Filtered = shown().map(r => r.cells[0].textContent);
  put("filter", "", "input");
  put("state", "refused", "change");
  seen.Refused = shown().length;
  seen.Count = d.getElementById("shown").textContent;
  put("state", "", "change");
  sort("Subnet");
  seen.First = shown()[0].cells[0].textContent;
  sort("Subnet");
  seen.Last = shown()[0].cells[0].textContent;
  seen.TooWide = wide();
  frame.width = 390;
  seen.TooWideForAPhone = wide();
  seen.SortsOnAPhone = d.querySelector("#peers th button").getBoundingClientRect().height > 0;
  seen.Headline = d.querySelector("#headline p").textContent;
  put("filter", "10.19.135.", "input");
  new MutationObserver(() => {
    seen.Refreshed = d.querySelector("#headline p").textContent;
    setTimeout(() => {
      seen.FilteredStill = shown().map(r => r.cells[0].textContent);
      document.getElementById("seen").textContent = JSON.stringify(seen);
    });
  }).observe(d.body, {childList: true});
};
frame.src = "/statusz";
</script>`

// TestBrowser opens the page of a host with 5,000 peers in a browser. The page must filter,
// select and sort the peers, fit the screen, follow changes, and request nothing else.
//
//stages:rest it starts a browser
func TestBrowser(t *testing.T) {
	r := report()
	r.Peers = nil
	for i := range 5000 {
		p := status.Peer{State: status.InPlace, Lease: status.Lease{
			Type: "vxlan", Subnets: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.%d.%d.0/24", i>>8, i&255))},
			PublicIPs: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("192.0.%d.%d", i>>8, i&255))},
		}}
		p.Objects = []status.Object{{Text: fmt.Sprintf("route %s via %s dev flannel.1 onlink", p.Subnets[0], p.Subnets[0].Addr()), Present: true}}
		if i%100 == 99 {
			p.State, p.Error = status.Refused, `its backend type is "host-gw", ours "vxlan"`
		}
		r.Peers = append(r.Peers, p)
	}
	page := status.Handler(func(context.Context, status.Query) (status.Report, error) {
		defer func() { r.Ready = true }() // the page asks again, and finds that
		return r, nil
	})
	var mu sync.Mutex
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked = append(asked, r.URL.Path)
		mu.Unlock()
		switch r.URL.Path {
		case "/":
			_, _ = w.Write([]byte(driver))
		case "/statusz":
			page.ServeHTTP(framed{w}, r)
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()

	out, err := exec.CommandContext(t.Context(), "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
		"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--user-data-dir="+t.TempDir(),
		"--virtual-time-budget=60000", "--dump-dom", server.URL+"/").Output()
	if err != nil {
		t.Fatalf("chromium: %v", err)
	}
	text := regexp.MustCompile(`(?s)<pre id="seen">(.*?)</pre>`).FindSubmatch(out)
	if text == nil {
		t.Fatalf("the browser shows\n%.2000s", out)
	}
	type view struct {
		Rows, Refused             int
		Filtered                  []string
		Count, First, Last        string
		Headline, Refreshed       string
		FilteredStill             []string
		TooWide, TooWideForAPhone int
		SortsOnAPhone             bool
	}
	var got view
	if err := json.Unmarshal([]byte(html.UnescapeString(string(text[1]))), &got); err != nil {
		t.Fatalf("%v in %q", err, text[1])
	}
	want := view{
		Rows: 5000, Refused: 50, Count: "50 of 5000", Filtered: []string{"10.19.135.0/24"},
		First: "10.0.0.0/24", Last: "10.19.135.0/24", SortsOnAPhone: true,
		Headline: "not ready, etcd away, 50 peers refused, 4950 peers in place", Refreshed: "ready, etcd away, 50 peers refused, 4950 peers in place",
		FilteredStill: []string{"10.19.135.0/24"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("in the browser (-want +got):\n%s", diff)
	}
	mu.Lock()
	defer mu.Unlock()
	for _, path := range asked {
		if path != "/" && path != "/statusz" && path != "/favicon.ico" {
			t.Errorf("the page requests %s", path)
		}
	}
}

// framed changes the header that forbids frames, so that the driver can open the page in a
// frame.
type framed struct{ http.ResponseWriter }

func (f framed) WriteHeader(code int) {
	const policy = "Content-Security-Policy"
	f.Header().Set(policy, strings.Replace(f.Header().Get(policy), "frame-ancestors 'none'", "frame-ancestors 'self'", 1))
	f.ResponseWriter.WriteHeader(code)
}

func (f framed) Write(b []byte) (int, error) {
	f.WriteHeader(http.StatusOK)
	return f.ResponseWriter.Write(b)
}
