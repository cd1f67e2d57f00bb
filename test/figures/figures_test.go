// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/test/chart"
)

func TestCounts(t *testing.T) {
	added := Counts{"Range": 5, "Put": 2, "Watch": 1}.Since(Counts{"Range": 3, "Put": 2})
	if diff := cmp.Diff(Counts{"Range": 2, "Watch": 1}, added); diff != "" {
		t.Errorf("Since (-want +got):\n%s", diff)
	}
	added.Add(Counts{"Put": 4, "Watch": 1})
	if got, want := added.String(), "Put 4, Range 2, Watch 2"; got != want {
		t.Errorf("String returns %q, want %q", got, want)
	}
	if got := added.Total(); got != 8 {
		t.Errorf("Total returns %v, want 8", got)
	}
}

func TestReadCounts(t *testing.T) {
	const page = "# TYPE a_total counter\n" + `a_total{method="Get",code="OK"} 2` + "\n" + `a_total{method="Get",code="No"} 1` + "\n" +
		`a_total{method="Put",code="OK"} 5e+03` + "\n" + `a_totals{method="Get"} 9` + "\n"
	for want, labels := range map[string][]string{
		"Put 5000, Get 3":                 {"method"},
		"Put OK 5000, Get OK 2, Get No 1": {"method", "code"},
	} {
		if got, err := ReadCounts(strings.NewReader(page), "a_total", labels...); err != nil || got.String() != want {
			t.Errorf("by %v: %v, %v, want %s", labels, got, err, want)
		}
	}
	for what, page := range map[string]string{"no number": `a_total{method="Get"} x`, "another counter": `b_total{method="Get"} 1`} {
		if got, err := ReadCounts(strings.NewReader(page), "a_total", "method"); err == nil {
			t.Errorf("a page with %s gives %v and no error", what, got)
		}
	}
}

func TestProcess(t *testing.T) {
	before, err := ProcessCPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for start := time.Now(); time.Since(start) < 10*time.Millisecond; {
		continue
	}
	after, err := ProcessCPU(os.Getpid())
	if err != nil || after <= before {
		t.Errorf("the CPU time went from %s to %s, %v", before, after, err)
	}
	held := make([]byte, 64<<20)
	for i := 0; i < len(held); i += 4096 {
		held[i] = 1
	}
	m, err := ProcessMemory(os.Getpid())
	if err != nil || m.Anonymous < 64<<20 || m.Peak < m.Anonymous || m.File <= 0 {
		t.Errorf("memory with 64 MB in use: %+v, %v", m, err)
	}
	runtime.KeepAlive(held)
	if err := ResetPeak(os.Getpid()); err != nil {
		t.Error(err)
	}
	const none = 1<<22 + 1 // larger than any process id
	if _, err := ProcessMemory(none); err == nil {
		t.Error("a process that does not exist has memory")
	}
}

func TestThisMachine(t *testing.T) {
	m, err := ThisMachine()
	if err != nil || m.Kernel == "" || m.CPU == "" || m.CPUs < 1 || m.SystemCall <= 0 || m.PageFault <= 0 {
		t.Errorf("got %+v, %v", m, err)
	}
	if got, want := (Machine{Kernel: "6.1", CPU: "any", CPUs: 2}).String(), "Linux 6.1, 2 CPUs (any)"; got != want {
		t.Errorf("String returns %q, want %q", got, want)
	}
	m = Machine{Kernel: "6.1", CPU: "any", CPUs: 2, PageFault: 16_700, SystemCall: 1_090}
	if got, want := m.String(), "Linux 6.1, 2 CPUs (any), 16.7 µs for a page fault and 1.1 µs for a system call"; got != want {
		t.Errorf("String returns %q, want %q", got, want)
	}
}

// TestEtcdMessages checks that EtcdMessages reads the counter of a server that answers
// like etcd, and returns an error for one without metrics.
func TestEtcdMessages(t *testing.T) {
	etcd := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			_, _ = io.WriteString(w, `grpc_server_msg_received_total{grpc_method="Range",grpc_type="unary"} 3`+"\n")
		}
	}))
	defer etcd.Close()
	if got, err := EtcdMessages(t.Context(), etcd.Client(), etcd.URL); err != nil || got.String() != "Range 3" {
		t.Errorf("%v, %v, want Range 3", got, err)
	}
	if got, err := EtcdMessages(t.Context(), etcd.Client(), etcd.URL+"/elsewhere"); err == nil {
		t.Errorf("%v from a server without metrics", got)
	}
}

// TestEach checks that Each calls f once for each number, and returns the error of a
// call.
func TestEach(t *testing.T) {
	var sum atomic.Int64
	if err := Each(3, 100, func(i int) error { sum.Add(int64(i)); return nil }); err != nil || sum.Load() != 99*100/2-3 {
		t.Errorf("the sum of all numbers is %d, %v", sum.Load(), err)
	}
	if err := Each(0, 100, func(i int) error {
		if i == 42 {
			return io.EOF
		}
		return nil
	}); !errors.Is(err, io.EOF) {
		t.Errorf("the error is %v, want that of a call", err)
	}
}

func TestSave(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "new")
	charts := map[string]chart.Chart{"one": {Title: "One", Bars: []chart.Bar{{Label: "bar", Median: 1}}}}
	if err := Save(folder, map[string]int{"n": 3}, charts); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(folder, "results.json"))
	var report map[string]int
	if err != nil || json.Unmarshal(text, &report) != nil || report["n"] != 3 {
		t.Errorf("results.json has %q, %v", text, err)
	}
	if svg, err := os.ReadFile(filepath.Join(folder, "one.svg")); err != nil || !strings.Contains(string(svg), "<svg") {
		t.Errorf("one.svg has %.40q, %v", svg, err)
	}
}

// TestInsert checks that Insert replaces older results and keeps the rest of the page,
// and that it refuses a page without a place for results.
func TestInsert(t *testing.T) {
	page := filepath.Join(t.TempDir(), "page.md")
	const begin, end = "<!-- results: written by make bench -->\n", "<!-- end of results -->\n"
	insert := func(before string) (after string, err error) {
		t.Helper()
		if err := os.WriteFile(page, []byte(before), 0o600); err != nil {
			t.Fatal(err)
		}
		err = Insert(page, "make bench", func(w io.Writer) { _, _ = io.WriteString(w, "new\n") })
		text, readErr := os.ReadFile(page)
		if readErr != nil {
			t.Fatal(readErr)
		}
		return string(text), err
	}
	got, err := insert("before\n" + begin + "old\n" + end + "after\n")
	if want := "before\n" + begin + "\nnew\n\n" + end + "after\n"; err != nil || got != want {
		t.Errorf("the page is %q, want %q; %v", got, want, err)
	}
	for _, bad := range []string{"no place\n", begin, end, strings.ReplaceAll(begin+end, "bench", "storm")} {
		if got, err := insert(bad); err == nil || got != bad {
			t.Errorf("the page %q became %q, %v", bad, got, err)
		}
	}
}
