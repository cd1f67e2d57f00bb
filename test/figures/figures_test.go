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
	"github.com/flanneld/flanneld/test/must"
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
		if got := ReadCounts(strings.NewReader(page), "a_total", labels...); got.String() != want {
			t.Errorf("by %v: %v, want %s", labels, got, want)
		}
	}
	for what, page := range map[string]string{"no number": `a_total{method="Get"} x`, "another counter": `b_total{method="Get"} 1`} {
		if err := must.Catch(func() { ReadCounts(strings.NewReader(page), "a_total", "method") }); err == nil {
			t.Errorf("a page with %s gives no error", what)
		}
	}
}

func TestProcess(t *testing.T) {
	before := ProcessCPU(os.Getpid())
	for start := time.Now(); time.Since(start) < 10*time.Millisecond; {
		continue
	}
	if after := ProcessCPU(os.Getpid()); after <= before {
		t.Errorf("the CPU time went from %s to %s", before, after)
	}
	held := make([]byte, 64<<20)
	for i := 0; i < len(held); i += 4096 {
		held[i] = 1
	}
	m := ProcessMemory(os.Getpid())
	if m.Anonymous < 64<<20 || m.Peak < m.Anonymous || m.File <= 0 {
		t.Errorf("memory with 64 MB in use: %+v", m)
	}
	runtime.KeepAlive(held)
	ResetPeak(os.Getpid())
	const none = 1<<22 + 1 // larger than any process id
	for what, read := range map[string]func(){"memory": func() { ProcessMemory(none) }, "CPU time": func() { ProcessCPU(none) }} {
		if err := must.Catch(read); err == nil {
			t.Errorf("a process that does not exist has %s", what)
		}
	}
}

func TestThisMachine(t *testing.T) {
	m := ThisMachine()
	if m.Kernel == "" || m.CPU == "" || m.CPUs < 1 || m.SystemCall <= 0 || m.PageFault <= 0 {
		t.Errorf("got %+v", m)
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
	if got := EtcdMessages(t.Context(), etcd.Client(), etcd.URL); got.String() != "Range 3" {
		t.Errorf("%v, want Range 3", got)
	}
	if err := must.Catch(func() { EtcdMessages(t.Context(), etcd.Client(), etcd.URL+"/elsewhere") }); err == nil {
		t.Error("a server without metrics gives no error")
	}
}

// TestEach checks that Each calls f once for each number, and ends the measurement if a call fails.
func TestEach(t *testing.T) {
	var sum atomic.Int64
	Each(3, 100, func(i int) { sum.Add(int64(i)) })
	if sum.Load() != 99*100/2-3 {
		t.Errorf("the sum of all numbers is %d", sum.Load())
	}
	err := must.Catch(func() {
		Each(0, 100, func(i int) {
			if i == 42 {
				must.Do(io.EOF)
			}
		})
	})
	if !errors.Is(err, io.EOF) {
		t.Errorf("the error is %v, want that of a call", err)
	}
}

func TestSave(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "new")
	charts := map[string]chart.Chart{"one": {Title: "One", Bars: []chart.Bar{{Label: "bar", Median: 1}}}}
	Save(folder, map[string]int{"n": 3}, charts)
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
		err = must.Catch(func() {
			Insert(page, "make bench", func(w io.Writer) { _, _ = io.WriteString(w, "new\n") })
		})
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
