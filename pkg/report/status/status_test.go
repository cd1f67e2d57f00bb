// SPDX-License-Identifier: Apache-2.0

package status_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/status"
)

func report() status.Report {
	now := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	subnet, peer := netip.MustParsePrefix("10.5.1.0/24"), netip.MustParsePrefix("10.5.2.0/24")
	return status.Report{
		Version: "v1", PID: 7, Started: now.Add(-time.Hour), Now: now, Reasons: []string{"data path: <b>kernel</b> says no"},
		Network:   status.Network{BackendType: "wireguard", Mode: "userspace", Prefixes: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}, MTU: 1450, SubnetFile: "/run/flannel/subnet.env"},
		Interface: status.Interface{Name: "eth0", Index: 2, MTU: 1500, Reason: "default route", Addresses: []status.Address{{Local: netip.MustParseAddr("192.168.77.1"), Public: netip.MustParseAddr("192.0.2.1")}}},
		Lease:     status.Lease{Key: "10.5.1.0-24", Subnets: []netip.Prefix{subnet}, Expires: now.Add(23 * time.Hour)},
		Datastore: status.Datastore{Kind: "etcd", Since: now.Add(-90 * time.Second), Error: "connection refused"},
		Kernel:    status.Kernel{LastSync: now.Add(-3 * time.Second), Objects: map[string]dataplane.Count{"route": {Wanted: 2, Present: 1}}},
		Peers: []status.Peer{
			{Lease: status.Lease{Key: "10.5.2.0-24", Subnets: []netip.Prefix{peer}, PublicIPs: []netip.Addr{netip.MustParseAddr("192.168.77.2")}, Type: "vxlan"}, State: status.Missing,
				Objects: []status.Object{{Text: "route 10.5.2.0/24 via 10.5.2.0 dev flannel.1"}, {Text: "neighbour 10.5.2.0", Present: true}}},
			{Lease: status.Lease{Key: "<script>alert(1)</script>", Type: "<script>alert(1)</script>"}, State: status.Refused, Error: "its type is <script>alert(1)</script>"},
		},
		SharedPublicIPs: []status.SharedPublicIP{{PublicIP: netip.MustParseAddr("192.168.77.9"), Leases: []string{"10.5.8.0-24", "<b>node</b>"}}},
		Events:          []status.Event{{Time: now, Text: "older"}, {Time: now, Error: true, Text: "newer <i>"}},
	}
}

func get(t *testing.T, source status.Source, path, accept string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	status.Handler(source).ServeHTTP(w, r)
	return w
}

func TestJSONIsTheReport(t *testing.T) {
	source := func(context.Context, status.Query) (status.Report, error) { return report(), nil }
	for _, ask := range [][2]string{{"/statusz", "application/json"}, {"/statusz.json", "*/*"}} {
		w := get(t, source, ask[0], ask[1])
		var got status.Report
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatalf("%v: %v in\n%s", ask, err, w.Body)
		}
		if diff := cmp.Diff(report(), got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
			t.Errorf("%v (-want +got):\n%s", ask, diff)
		}
	}
}

func TestPage(t *testing.T) {
	w := get(t, func(context.Context, status.Query) (status.Report, error) { return report(), nil }, "/statusz", "text/html")
	page := w.Body.String()
	for _, want := range []string{
		"<dd>wireguard, userspace</dd>", "not ready", "data path: &lt;b&gt;kernel&lt;/b&gt; says no", "10.5.1.0/24", "expires in 23h unless renewed", "192.168.77.1 (public 192.0.2.1)",
		"away</span> for 1m30s: connection refused", "3s ago", `class="bad">1 of 2`, "<li>192.168.77.9: 10.5.8.0-24, &lt;b&gt;node&lt;/b&gt;</li>", `title="missing">route 10.5.2.0/24 via 10.5.2.0 dev flannel.1`, "newer &lt;i&gt;",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Contains(page, "<script>alert") || strings.Contains(page, "<i>") {
		t.Error("text from peers is interpreted as markup")
	}
	if strings.Contains(page, "http://") || strings.Contains(page, "https://") || strings.Contains(page, "src=") {
		t.Error("the page loads external resources")
	}
	if strings.Index(page, " newer ") > strings.Index(page, " older") {
		t.Error("events are not newest first")
	}
	if w.Header().Get("Content-Security-Policy") == "" || !strings.HasPrefix(w.Header().Get("Content-Type"), "text/html") {
		t.Errorf("headers: %v", w.Header())
	}
}

// TestHeadline checks that the first line of the page, which has the color of what is worst, hides nothing.
func TestHeadline(t *testing.T) {
	for want, change := range map[string]func(*status.Report){
		`good">ready, 2 peers in place<`:                 func(*status.Report) {},
		`bad">ready, 1 peer refused, 1 peer in place<`:   func(r *status.Report) { r.Peers[1].State = status.Refused },
		`good">ready, 1 peer in place, 1 peer reserved<`: func(r *status.Report) { r.Peers[1].State = status.Reserved },
		`warn">ready, 1 peer held, 1 peer in place<`:     func(r *status.Report) { r.Peers[1].State = status.Held },
		`bad">ready, 2 peers in place, 3 paths network, 1 path ok<`: func(r *status.Report) {
			r.Paths = &paths.Outcome{Results: map[string]int{"ok": 1, "network": 3, "mtu": 0}}
		},
		`warn">ready, etcd away, 2 peers in place<`:                             func(r *status.Report) { r.Datastore = status.Datastore{Kind: "etcd", Since: time.Unix(1, 0)} },
		`warn">ready, 2 peers in place</p>` + "\n" + `<p class="state warn">re`: func(r *status.Report) { r.RestartNeeded = "VNI" },
		`bad">not ready, 2 peers in place<`:                                     func(r *status.Report) { r.Ready = false },
		"<title>host7: flanneld 10.5.1.0/24</title>":                            func(*status.Report) {},
		"<h1>host7 <": func(*status.Report) {},
	} {
		r := status.Report{Host: "host7", Ready: true, Peers: []status.Peer{{State: status.InPlace}, {State: status.InPlace}}}
		r.Lease.Subnets = []netip.Prefix{netip.MustParsePrefix("10.5.1.0/24")}
		change(&r)
		w := get(t, func(context.Context, status.Query) (status.Report, error) { return r, nil }, "/statusz", "text/html")
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("no %q in\n%.1500s", want, w.Body)
		}
	}
}

// TestContrast checks that each color can be read on the background, and the background on it, as in bars, with a dark
// and with a light scheme.
func TestContrast(t *testing.T) {
	css, err := os.ReadFile("page.css")
	if err != nil {
		t.Fatal(err)
	}
	luminance := func(color string) float64 {
		var c [3]uint8
		if _, err := fmt.Sscanf(color, "#%02x%02x%02x", &c[0], &c[1], &c[2]); err != nil {
			t.Fatalf("%s: %v", color, err)
		}
		total := 0.0
		for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
			v := float64(c[i]) / 255
			if v > 0.03928 {
				v = math.Pow((v+0.055)/1.055, 2.4)
			} else {
				v /= 12.92
			}
			total += weight * v
		}
		return total
	}

	schemes := regexp.MustCompile(`:root \{[^}]*\}`).FindAllString(string(css), -1)
	if len(schemes) != 2 {
		t.Fatalf("%d schemes, want a light and a dark one", len(schemes))
	}
	for i, background := range []string{"#ffffff", "#1c1b22"} {
		colors := regexp.MustCompile(`--\w+: (#\w{6})`).FindAllStringSubmatch(schemes[i], -1)
		if len(colors) < 4 {
			t.Errorf("scheme %d has %d colors, want 4", i, len(colors))
		}
		for _, c := range colors {
			a, b := luminance(c[1]), luminance(background)
			if ratio := (max(a, b) + 0.05) / (min(a, b) + 0.05); ratio < 4.5 {
				t.Errorf("%s on %s has a contrast of %.1f, want 4.5", c[0], background, ratio)
			}
		}
	}
	if strings.Contains(strings.Join(strings.Split(string(css), ":root"), ""), "color: #") {
		t.Error("a rule has a color that is the same in both schemes")
	}
}

func TestPageOfTheCloud(t *testing.T) {
	now := time.Unix(1000, 0)
	r := status.Report{Now: now, Network: status.Network{Cloud: &status.Cloud{LastGood: now, Routes: []status.CloudRoute{
		{Table: "rtb-1", Destination: netip.MustParsePrefix("10.5.1.0/24"), Target: "eni-1", Present: true},
		{Table: "rtb-2", Destination: netip.MustParsePrefix("10.5.1.0/24"), Target: "eni-1"},
	}}}}
	r.Network.Cloud.Overflow = &status.Overflow{Tunnel: "vxlan", ByCloud: 2, ByTunnel: 1, Problem: "the <quota> is used up"}
	r.Peers = []status.Peer{{State: status.InPlace, Backend: "vxlan", Waiting: "no route to it"}}
	w := get(t, func(context.Context, status.Query) (status.Report, error) { return r, nil }, "/statusz", "text/html")
	for _, want := range []string{`2 peers by the cloud, 1 by vxlan<br><span class="bad">the &lt;quota&gt; is used up</span>`, " by vxlan: no route to it</td>", "<span>10.5.1.0/24 to eni-1 in table rtb-1</span>", `<span class="bad">10.5.1.0/24 to eni-1 in table rtb-2: missing</span>`} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("no %q in\n%s", want, w.Body)
		}
	}
}

func TestPageOfLocations(t *testing.T) {
	for want, l := range map[string]status.Location{
		"<dt>Location</dt><dd>east<br>1 peer by vxlan, 2 by wireguard</dd>":  {Name: "east", Inside: "vxlan", Between: "wireguard", ByInside: 1, ByBetween: 2},
		"<dt>Location</dt><dd>none<br>0 peers by vxlan, 3 by wireguard</dd>": {Inside: "vxlan", Between: "wireguard", ByBetween: 3},
	} {
		r := status.Report{Network: status.Network{Location: &l}, Peers: []status.Peer{{State: status.InPlace, Backend: "wireguard", Waiting: "no <route>"}}}
		w := get(t, func(context.Context, status.Query) (status.Report, error) { return r, nil }, "/statusz", "text/html")
		for _, text := range []string{want, " by wireguard: no &lt;route&gt;</td>"} {
			if !strings.Contains(w.Body.String(), text) {
				t.Errorf("no %q in\n%s", text, w.Body)
			}
		}
	}
}

func TestPageOfTheFirewall(t *testing.T) {
	for want, f := range map[string]status.Firewall{
		"<dd>no rules configured</dd>": {},
		"<dd>nftables</dd>":            {Kind: "nftables"},
		`<dd>iptables: <span class="bad">no &lt;lock&gt;</span></dd>`: {Kind: "iptables", Error: "no <lock>"},
		`<dd><span class="bad">not up yet</span></dd>`:                {Error: "not up yet"},
	} {
		w := get(t, func(context.Context, status.Query) (status.Report, error) { return status.Report{Firewall: f}, nil }, "/statusz", "text/html")
		if !strings.Contains(w.Body.String(), "<dt>Firewall</dt>"+want) {
			t.Errorf("%+v: the page lacks %q", f, want)
		}
	}
}

func TestNoReport(t *testing.T) {
	w := get(t, func(context.Context, status.Query) (status.Report, error) {
		return status.Report{}, errors.New("stuck")
	}, "/statusz", "")
	if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "stuck") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestJournal(t *testing.T) {
	var logged []string
	j := status.NewJournal(3)
	log := j.Logger(funcr.New(func(prefix, args string) { logged = append(logged, prefix+" "+args) }, funcr.Options{}))
	log.Info("one")
	log.V(1).Info("detail")
	log.WithName("x").WithValues("lease", "a").Info("two", "subnet", netip.MustParsePrefix("10.5.1.0/24"), "n", 3)
	log.Error(errors.New("first\nsecond"), "three")
	log.Info("four")
	var got []string
	for _, e := range j.Events() {
		got = append(got, fmt.Sprint(e.Error, " ", e.Text))
	}
	want := []string{`false two lease="a" subnet="10.5.1.0/24" n=3`, `true three err="first\nsecond"`, "false four"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if len(logged) != 4 || !strings.HasPrefix(logged[1], "x ") || !strings.Contains(logged[1], `"lease"="a"`) {
		t.Errorf("logged %q", logged)
	}
}

// TestLongValues checks that the log and the journal get only the beginning of long values.
func TestLongValues(t *testing.T) {
	var logged []string
	j := status.NewJournal(4)
	log := j.Logger(funcr.New(func(_, args string) { logged = append(logged, args) }, funcr.Options{}))
	long := strings.Repeat("x", 300_000)
	log.Info("text", "backend", long)
	log.Info("list", "networks", slices.Repeat([]string{"10.5.0.0/16"}, 20_000))
	log.Error(errors.New(long), "error", "n", 3)
	log.WithValues("network", long).Error(nil, "values")
	for _, e := range j.Events() {
		logged = append(logged, e.Text)
	}
	if len(logged) != 8 {
		t.Errorf("%d lines, want each of 4 twice", len(logged))
	}
	for _, line := range logged {
		if len(line) > 1200 || !strings.Contains(line, " more bytes)") {
			t.Errorf("%d bytes: %.80s", len(line), line)
		}
	}
}

func TestJournalOfNoMessages(t *testing.T) {
	j := status.NewJournal(0)
	log := j.Logger(klog.Background())
	log.Info("one")
	log.Info("two")
	if events := j.Events(); len(events) != 1 || events[0].Text != "two" {
		t.Errorf("events %v, want only the last one", events)
	}
}

// TestJournalKeepsTheCaller checks that a log line that passes through the journal names the
// line of code that wrote it.
func TestJournalKeepsTheCaller(t *testing.T) {
	fs := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(fs)
	for name, value := range map[string]string{"logtostderr": "false", "legacy_stderr_threshold_behavior": "false", "stderrthreshold": "FATAL"} {
		if err := fs.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	klog.SetOutput(&out)
	defer klog.SetOutput(os.Stderr)
	log := status.NewJournal(1).Logger(klog.Background())
	log.Info("hello")
	log.WithValues("a", 1).Error(nil, "ouch")
	klog.Flush()
	for line := range strings.Lines(out.String()) {
		if !strings.Contains(line, "status_test.go:") {
			t.Errorf("the line does not name its caller: %s", line)
		}
	}
	if strings.Count(out.String(), "\n") < 2 {
		t.Errorf("logged %q", out.String())
	}
}

func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "flanneld.sock")
	ln, err := status.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v, want mode 0600", info.Mode(), err)
	}
	go http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }))
	r, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://flanneld/statusz", nil)
	answer, err := status.Client(path).Do(r)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", answer, err)
	}
	answer.Body.Close()
	if _, err := status.Listen(t.Context(), path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second daemon gets the socket: %v", err)
	}
}

// unlinker is what a net.UnixListener can do beside a net.Listener.
type unlinker interface{ SetUnlinkOnClose(unlink bool) }

// TestSocketThatIsFreedLater stands for the start after a crash, when a child of the former process still
// has its socket.
func TestSocketThatIsFreedLater(t *testing.T) {
	path := filepath.Join(t.TempDir(), "flanneld.sock")
	former, err := status.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	former.(unlinker).SetUnlinkOnClose(false)
	time.AfterFunc(100*time.Millisecond, func() { former.Close() })

	ln, err := status.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
}

func TestSocketLeftBehindIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "flanneld.sock")
	ln, err := status.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ln.(unlinker).SetUnlinkOnClose(false)
	ln.Close()
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	again, err := status.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := status.Listen(t.Context(), path); err == nil {
		t.Error("a file that is not a socket was replaced")
	}
}

func TestSocketPath(t *testing.T) {
	for file, want := range map[string]string{
		"/run/flannel/subnet.env":  "/run/flannel/flanneld.sock",
		"/run/flannel/second.env":  "/run/flannel/flanneld-second.sock",
		"/run/flannel//subnet2":    "/run/flannel/flanneld-subnet2.sock",
		"/run/flannel2/subnet.env": "/run/flannel2/flanneld.sock",
	} {
		if got := status.SocketPath(file); got != want {
			t.Errorf("SocketPath(%q) = %q, want %q", file, got, want)
		}
	}
}

// TestQuery checks that the query has the parameters of the URL. An answer with all paths must not be
// indented, because only programs read it.
func TestQuery(t *testing.T) {
	for params, want := range map[string]status.Query{
		"":                        {},
		"?network=red":            {Network: "red"},
		"?paths=all":              {AllPaths: true},
		"?paths=some":             {},
		"?paths=all&network=blue": {Network: "blue", AllPaths: true},
	} {
		var got status.Query
		w := get(t, func(_ context.Context, q status.Query) (status.Report, error) {
			got = q
			return report(), nil
		}, "/statusz.json"+params, "")
		if got != want {
			t.Errorf("%q asks for %+v, want %+v", params, got, want)
		}
		if indented := strings.Contains(w.Body.String(), "\n "); indented == want.AllPaths {
			t.Errorf("%q: indented is %v", params, indented)
		}
	}
}

// TestOverviewOfNetworks checks the page and the JSON of a daemon with several networks, and of one
// network of that daemon.
func TestOverviewOfNetworks(t *testing.T) {
	source := func(_ context.Context, q status.Query) (status.Report, error) {
		switch q.Network {
		case "":
			return status.Report{Networks: []status.NetworkSummary{
				{Name: "green<b>", Phase: "refused", Reasons: []string{"it clashes with network red"}},
				{Name: "red", Phase: "serving", Ready: true, BackendType: "vxlan", Subnets: []netip.Prefix{netip.MustParsePrefix("10.5.1.0/24")}},
			}}, nil
		case "red":
			return report(), nil
		}
		return status.Report{}, fmt.Errorf("%w: %s", status.ErrNoNetwork, q.Network)
	}
	page := get(t, source, "/statusz", "text/html").Body.String()
	for _, want := range []string{`<a href="?network=red">red</a>`, "serving", "10.5.1.0/24", "it clashes with network red", "green&lt;b&gt;"} {
		if !strings.Contains(page, want) {
			t.Errorf("no %q in\n%s", want, page)
		}
	}
	if strings.Contains(page, "green<b>") || strings.Contains(page, `id="peers"`) {
		t.Errorf("the overview has a name as HTML, or peers:\n%s", page)
	}
	if one := get(t, source, "/statusz.json?network=red", "*/*"); !strings.Contains(one.Body.String(), `"key": "10.5.1.0-24"`) {
		t.Errorf("the report about red: %s", one.Body)
	}
	if none := get(t, source, "/statusz?network=blue", "text/html"); none.Code != http.StatusNotFound || !strings.Contains(none.Body.String(), "blue") {
		t.Errorf("an unknown network: %d %s", none.Code, none.Body)
	}
}
