// SPDX-License-Identifier: Apache-2.0

package mesh_test

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/mesh"
	"github.com/flanneld/flanneld/pkg/report/status"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// key returns the key of the lease of host i. In helpers and comments of this file the first host is 0.
func key(i int) string { return fmt.Sprintf("10.5.%d.0-24", i+1) }

// hosts returns n hosts.
func hosts(n int) []mesh.Host {
	var all []mesh.Host
	for i := range n {
		all = append(all, mesh.Host{
			Key: key(i), Name: fmt.Sprintf("10.5.%d.0/24", i+1), PublicIPs: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})},
		})
	}
	return all
}

// path returns the status of the path to host i. The path works if broken is empty. rtt is in milliseconds.
func path(i int, broken string, rtt float64) paths.Result {
	return paths.Result{Peer: key(i), Path: paths.Path{Subnet: netip.MustParsePrefix("10.5.1.0/24")}, Verdict: paths.Verdict{OK: broken == "", Broken: paths.Part(broken), RTT: rtt}}
}

// answer returns the status of host i in JSON, with the given paths.
func answer(t testing.TB, i int, all ...paths.Result) []byte {
	t.Helper()
	text, err := json.Marshal(status.Report{Lease: status.Lease{Key: key(i)}, Paths: &paths.Outcome{Worst: all}})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// broken returns a mesh of n hosts in which host 0 does not reach host 1, and host 2 does not answer.
func broken(t testing.TB, n int) *mesh.Matrix {
	t.Helper()
	m := mesh.New(hosts(n))
	for i := range n {
		if i == 2 {
			m.Fail(i, errors.New("no route to host"))
			continue
		}
		var all []paths.Result
		for to := range n {
			p := path(to, "", []float64{0.21, 3, 42, 140}[(i+to)%4])
			if i == 0 && to == 1 {
				p = path(to, "network", 0)
				p.Advice = "a firewall <drops>\x1b[31m the packets"
			}
			all = append(all, p)
		}
		m.Answer(i, answer(t, i, all...))
	}
	return m
}

// TestAnswers expects the paths of each usable answer, and the reason for every other answer, as one line
// of limited length.
func TestAnswers(t *testing.T) {
	advised := path(1, "mtu", 0)
	advised.Advice = "set\nthe MTU"
	own := `"lease":{"key":"10.5.1.0-24"}`
	for _, tc := range []struct {
		name, body string
		want       mesh.Cell // from host 0 to host 1
		problem    string
	}{
		{"a path that works", string(answer(t, 0, path(1, "", 0.5))), mesh.Cell{Result: mesh.OK, RTT: 0.5}, ""},
		{"a broken path", string(answer(t, 0, advised)), mesh.Cell{Result: "mtu", Advice: `set\nthe MTU`}, ""},
		{"the slower path of two families", string(answer(t, 0, path(1, "", 2), path(1, "", 0.5))), mesh.Cell{Result: mesh.OK, RTT: 2}, ""},
		{"the broken path of two families", string(answer(t, 0, path(1, "", 2), path(1, "underlay", 0), path(1, "", 3))), mesh.Cell{Result: "underlay"}, ""},
		{"the worse of two broken paths", string(answer(t, 0, path(1, "underlay", 0), advised)), mesh.Cell{Result: "underlay"}, ""},
		{"a path that the host cannot judge", string(answer(t, 0, path(1, "unknown", 0))), mesh.Cell{Result: mesh.Unknown}, ""},
		{"a path to a host that is not in the mesh", string(answer(t, 0, path(8, "network", 0))), mesh.Cell{Result: mesh.Unknown}, ""},
		{"a path to itself", string(answer(t, 0, path(0, "network", 0))), mesh.Cell{Result: mesh.Unknown}, ""},
		{"fields of a later version", `{` + own + `,"new":1,"paths":{"new":2,"worst":[{"peer":"10.5.2.0-24","ok":true,"new":3}]}}`, mesh.Cell{Result: mesh.OK}, ""},

		{"no JSON", "<html>", mesh.Cell{}, "its answer is not a status: invalid character"},
		{"nothing", "", mesh.Cell{}, "its answer is not a status: unexpected end"},
		{"two values", string(answer(t, 0)) + "{}", mesh.Cell{}, "its answer is not a status: invalid character '{' after top-level value"},
		{"too large", strings.Repeat(" ", mesh.MaxAnswer(3)+1), mesh.Cell{}, "its answer is larger than 268288 bytes"},
		{"another host", string(answer(t, 1)), mesh.Cell{}, `the host that answers there has the lease "10.5.2.0-24"`},
		{"no probes", `{` + own + `}`, mesh.Cell{}, "it does not check paths: start it with --probe"},
		{"several networks", `{"networks":[{"name":"red"}],` + own + `}`, mesh.Cell{}, "it serves several networks: choose one of them with --network"},
		{"no list", `{` + own + `,"paths":{}}`, mesh.Cell{}, "its answer has no list of paths"},
		{"no list, but an object", `{` + own + `,"paths":{"worst":{}}}`, mesh.Cell{}, "its answer has no list of paths"},
		{"a wrong type", `{` + own + `,"paths":{"worst":[{"ok":true},{"ok":7}]}}`, mesh.Cell{}, "its answer has a wrong path 2: json:"},
		{"an invented part", string(answer(t, 0, path(1, "\x1b[2J", 0))), mesh.Cell{}, `its answer has a wrong path 1: the result is "\x1b[2J", expected one of [unknown ok checksum mtu network underlay]`},
		{"broken, but ok", `{` + own + `,"paths":{"worst":[{"ok":true,"broken":"mtu"}]}}`, mesh.Cell{}, `its answer has a wrong path 1: ok is true, and what is broken is "mtu"`},
		{"a broken part that is called ok", string(answer(t, 0, path(1, "ok", 0))), mesh.Cell{}, `its answer has a wrong path 1: ok is false, and what is broken is "ok"`},
		{"neither", `{` + own + `,"paths":{"worst":[{}]}}`, mesh.Cell{}, `its answer has a wrong path 1: ok is false, and what is broken is ""`},
		{"a negative round trip", string(answer(t, 0, path(1, "", -1))), mesh.Cell{}, "its answer has a wrong path 1: a round trip of -1 ms"},
		{"a text of two lines", `{"lease":{"key":"a\nb"}}`, mesh.Cell{}, `the host that answers there has the lease "a\nb"`},
		{"a long text", `{"lease":{"key":"` + strings.Repeat("ü", 5000) + `"}}`, mesh.Cell{}, "the host that answers there has the lease"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := mesh.New(hosts(3))
			m.Answer(0, []byte(tc.body))
			problem := m.Problem(0)
			if !strings.HasPrefix(problem, tc.problem) || (problem == "") != (tc.problem == "") || len(problem) > 500 || !utf8.ValidString(problem) || strings.ContainsFunc(problem, unicode.IsControl) {
				t.Errorf("the problem is %q, want one line that begins with %q", problem, tc.problem)
			}
			if got := m.Cell(0, 1); tc.problem == "" && got != tc.want {
				t.Errorf("the cell is %+v, want %+v", got, tc.want)
			}
			if got := m.Cell(0, 2); got.Result != mesh.Unknown {
				t.Errorf("the cell of another host is %+v, want unknown", got)
			}
		})
	}
}

// TestDirection breaks the paths between hosts 0 and 1. If one of them knows which packets are lost, the cells of
// both must say so, and a path that works must not.
func TestDirection(t *testing.T) {
	oneWay := func(p paths.Result) paths.Result {
		p.OneWay = true
		return p
	}
	advised := path(0, "network", 0)
	advised.Advice = "look"
	const there = "packets from 10.5.1.0/24 to 10.5.2.0/24 are lost, 10.5.2.0/24 to 10.5.1.0/24 arrive"
	const back = "packets from 10.5.2.0/24 to 10.5.1.0/24 are lost, 10.5.1.0/24 to 10.5.2.0/24 arrive"
	for _, tc := range []struct {
		name        string
		first       paths.Result
		second      *paths.Result // nil if host 1 does not answer
		want, wants string        // advice of hosts 0 and 1
	}{
		{"neither knows", path(1, "network", 0), &advised, "", "look"},
		{"host 0 knows", oneWay(path(1, "network", 0)), &advised, there, there + "; look"},
		{"host 1 knows", path(1, "underlay", 0), new(oneWay(advised)), back, back + "; look"},
		{"host 1 does not answer", oneWay(path(1, "network", 0)), nil, there, ""},
		{"the way back works", oneWay(path(1, "network", 0)), new(path(0, "", 1)), there, ""},
		{"a path that works has a direction", oneWay(path(1, "", 0)), &advised, "", "look"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := mesh.New(hosts(2))
			m.Answer(0, answer(t, 0, tc.first))
			if tc.second != nil {
				m.Answer(1, answer(t, 1, *tc.second))
			}
			if got, gets := m.Cell(0, 1).Advice, m.Cell(1, 0).Advice; got != tc.want || gets != tc.wants {
				t.Errorf("the advice is\n%q,\n%q, want\n%q,\n%q", got, gets, tc.want, tc.wants)
			}
		})
	}
}

// TestHeld checks which hosts keep a migration from being finished. A host that does not check paths can be asked, too.
func TestHeld(t *testing.T) {
	const own = `"lease":{"key":"10.5.1.0-24"}`
	for name, tc := range map[string]struct{ body, want string }{
		"all peers have changed": {`{` + own + `,"network":{"waiting":0},"paths":{"worst":[]}}`, ""},
		"without --probe":        {`{` + own + `,"network":{"waiting":0}}`, ""},
		"a peer waits":           {`{` + own + `,"network":{"waiting":1}}`, "it sends to 1 peers by the present backend"},
		"it has not followed":    {`{` + own + `,"network":{}}`, "it does not run NextBackend yet"},
		"another host":           {`{"lease":{"key":"10.5.2.0-24"},"network":{"waiting":0}}`, `the host that answers there has the lease "10.5.2.0-24"`},
	} {
		m := mesh.New(hosts(2))
		m.Answer(0, []byte(tc.body))
		if got := m.Held(0); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
		if got := m.Held(1); got != "it was not asked" {
			t.Errorf("%s: the other host is held because %q", name, got)
		}
	}
}

// TestCutOff checks that a mesh whose paths work tells of a host whose pods do not reach others.
func TestCutOff(t *testing.T) {
	m := mesh.New(hosts(2))
	m.Answer(0, []byte(`{"lease":{"key":"10.5.1.0-24"},"reasons":["data path: late","pods: a rule\u001b drops them"],"paths":{"worst":[{"peer":"10.5.2.0-24","ok":true}]}}`))
	m.Answer(1, answer(t, 1, path(0, "", 1)))
	var b bytes.Buffer
	if err := m.Text(&b, false); err != nil {
		t.Fatal(err)
	}
	if want := "pods of 10.5.1.0/24 192.0.2.1 are cut off: a rule\\x1b drops them\n"; !strings.HasSuffix(b.String(), want) {
		t.Errorf("%s\nwant %q at its end", b.String(), want)
	}
	if s := m.Summary(); s.Broken != 0 || !slices.Equal(s.CutOff, []int{0}) || m.Data().Hosts[0].CutOff == "" {
		t.Errorf("%+v, %+v", s, m.Data())
	}
}

// TestText compares what a terminal shows with golden files: words for few hosts, letters for more, and
// the worst hosts of many.
func TestText(t *testing.T) {
	for _, tc := range []struct {
		hosts int
		form  string
	}{{4, ""}, {12, ""}, {60, ""}, {12, "-wide"}} {
		var b bytes.Buffer
		if err := broken(t, tc.hosts).Text(&b, tc.form != ""); err != nil {
			t.Fatal(err)
		}
		golden(t, fmt.Sprintf("text-%d%s.golden", tc.hosts, tc.form), b.Bytes())
	}
	var b bytes.Buffer
	if err := broken(t, 60).Text(&b, true); err != nil || strings.Count(b.String(), "TO ") != 60 {
		t.Errorf("60 hosts with -o wide: %v\n%s", err, &b)
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	name = filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(name, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (go test -update rewrites it):\n%s", name, got)
	}
}

// picture is what a parser finds in a picture.
type picture struct {
	rects map[string]int // by class
	text  string         // outside of the style
}

// parse reads a picture as XML. It expects that the picture does not load anything from elsewhere.
func parse(t *testing.T, svg []byte) picture {
	t.Helper()
	p := picture{rects: map[string]int{}}
	var text strings.Builder
	d := xml.NewDecoder(bytes.NewReader(svg))
	style, depth := false, 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		switch e := token.(type) {
		case xml.StartElement:
			depth++
			style = e.Name.Local == "style"
			switch e.Name.Local {
			case "svg", "title", "style", "rect", "text", "g":
			default:
				t.Errorf("there is an element %s", e.Name.Local)
			}
			for _, a := range e.Attr {
				if strings.HasSuffix(a.Name.Local, "href") || strings.HasPrefix(a.Name.Local, "on") {
					t.Errorf("%s has an attribute %s", e.Name.Local, a.Name.Local)
				}
				if e.Name.Local == "rect" && a.Name.Local == "class" {
					p.rects[a.Value]++
				}
			}
		case xml.EndElement:
			depth--
			style = false
		case xml.CharData:
			if style && (strings.Contains(string(e), "url(") || strings.Contains(string(e), "@import")) {
				t.Error("the style loads something")
			}
			if !style {
				text.Write(e)
			}
		}
	}
	p.text = text.String()
	if depth != 0 {
		t.Errorf("%d elements are not closed", depth)
	}
	return p
}

// TestSet checks that paths count like those of an answer, and that a wrong one is the problem of its host.
func TestSet(t *testing.T) {
	m := mesh.New(hosts(3))
	m.Set(0, []paths.Result{path(1, "", 2), path(2, "mtu", 0)})
	m.Set(1, []paths.Result{path(0, "invented", 0)})
	if fast, broken := m.Cell(0, 1), m.Cell(0, 2); fast != (mesh.Cell{Result: mesh.OK, RTT: 2}) || broken != (mesh.Cell{Result: "mtu"}) || m.Problem(0) != "" {
		t.Errorf("%+v, %+v, problem %q", fast, broken, m.Problem(0))
	}
	if got := m.Problem(1); !strings.HasPrefix(got, `the result is "invented"`) {
		t.Errorf("the problem is %q", got)
	}
}

// TestSVG compares a picture with the golden file, and its cells with those of the mesh.
func TestSVG(t *testing.T) {
	var b bytes.Buffer
	if err := broken(t, 4).SVG(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "mesh.svg", b.Bytes())
	p := parse(t, b.Bytes())
	// Besides the cells there is one rectangle of each kind in the explanation, and four kinds of broken
	// ones.
	for class, want := range map[string]int{"page": 1, "broken": 1 + 4, "unknown": 3 + 1, "r0": 2 + 1, "r1": 2 + 1, "r2": 1 + 1, "r3": 3 + 1} {
		if p.rects[class] != want {
			t.Errorf("%d rectangles are %s, want %d: %v", p.rects[class], class, want, p.rects)
		}
	}
	for _, want := range []string{
		"4 hosts, paths: 8 ok, 1 broken, 3 unknown", "10.5.1.0/24 -> 10.5.2.0/24: network: a firewall <drops>\\x1b[31m the packets", "10.5.3.0/24 -> 10.5.1.0/24: unknown",
	} {
		if !strings.Contains(p.text, want) {
			t.Errorf("the picture does not say %q", want)
		}
	}
}

// TestSVGOfManyHosts expects the worst hosts in a picture of limited size.
func TestSVGOfManyHosts(t *testing.T) {
	m := mesh.New(hosts(250))
	m.Answer(248, answer(t, 248, path(0, "", 0.1), path(249, "underlay", 0)))
	var b bytes.Buffer
	if err := m.SVG(&b); err != nil {
		t.Fatal(err)
	}
	p := parse(t, b.Bytes())
	unknown, cells := p.rects["unknown"]-1, mesh.MaxCells*(mesh.MaxCells-1)
	if p.rects["broken"] != 1+4 || unknown < cells-2 || unknown >= cells {
		t.Errorf("%v, want %d cells, one of them broken", p.rects, cells)
	}
	for _, want := range []string{"250 hosts, paths: 1 ok, 1 broken, 62248 unknown; the 200 worst hosts", "10.5.249.0/24 -> 10.5.250.0/24: underlay"} {
		if !strings.Contains(p.text, want) {
			t.Errorf("the picture does not say %q", want)
		}
	}
}

// TestData checks the data of few hosts, and the data of more than MaxCells hosts, which must contain the
// broken paths, but no cells.
func TestData(t *testing.T) {
	d := broken(t, 4).Data()
	if d.Paths != (mesh.Counts{OK: 8, Broken: 1, Unknown: 3}) || len(d.Cells) != 9 || len(d.Hosts) != 4 {
		t.Errorf("%+v", d)
	}
	if len(d.Broken) != 1 || d.Broken[0].From != "10.5.1.0/24" || d.Broken[0].To != "10.5.2.0/24" || d.Broken[0].Result != "network" {
		t.Errorf("the broken paths are %+v", d.Broken)
	}
	if h := d.Hosts[2]; h.Problem != "no route to host" || h.From != (mesh.Counts{Unknown: 3}) || h.To != (mesh.Counts{OK: 3}) {
		t.Errorf("the host that does not answer is %+v", h)
	}
	if h := d.Hosts[1]; h.From != (mesh.Counts{OK: 3}) || h.To != (mesh.Counts{OK: 1, Broken: 1, Unknown: 1}) {
		t.Errorf("the host that one does not reach is %+v", h)
	}
	m := mesh.New(hosts(220))
	m.Answer(0, answer(t, 0, path(1, "mtu", 0), path(2, "", 1)))
	if many := m.Data(); many.Cells != nil || len(many.Broken) != 1 || len(many.Hosts) != 220 {
		t.Errorf("of 220 hosts there are %d cells, %d broken ones and %d hosts", len(many.Cells), len(many.Broken), len(many.Hosts))
	}
	none, err := json.Marshal(mesh.New(nil).Data())
	if want := `{"paths":{"ok":0,"broken":0,"unknown":0},"hosts":[],"broken":[]}`; err != nil || string(none) != want {
		t.Errorf("without hosts: %s, %v; want %s", none, err, want)
	}
}

// TestManyBrokenPaths lets all hosts but the last one report every path as broken, each with another long
// text. The last host reports one path. The list must be limited, and must contain this path if the limit
// is at least the number of hosts.
func TestManyBrokenPaths(t *testing.T) {
	const n = 110
	m := mesh.New(hosts(n))
	for i := range n {
		var all []paths.Result
		for to := range n {
			p := path(to, "network", 0)
			p.Advice = fmt.Sprint(i, to, strings.Repeat("x", 300))
			all = append(all, p)
		}
		if i == n-1 {
			all = []paths.Result{path(0, "mtu", 0)}
		}
		m.Answer(i, answer(t, i, all...))
		if p := m.Problem(i); p != "" {
			t.Fatal(p)
		}
	}
	d := m.Data()
	if all := (n-1)*(n-1) + 1; len(d.Broken) != mesh.MaxBroken || d.BrokenOmitted != all-len(d.Broken) || d.Paths.Broken != all {
		t.Errorf("%d broken paths and %d omitted, want at most %d of %d", len(d.Broken), d.BrokenOmitted, mesh.MaxBroken, all)
	}
	for _, limit := range []int{0, 1, n - 1, n, n + 1, 10 * n} {
		pairs := m.Broken(limit)
		if len(pairs) != limit {
			t.Errorf("%d paths, want %d", len(pairs), limit)
		}
		if last := pairs[max(0, len(pairs)-1):]; limit >= n && last[0].Result != "mtu" {
			t.Errorf("of %d paths the last is %+v, want the only one of the last host", limit, last)
		}
	}
}

// TestAdviceIsLimited lets a host send a different text for each of 400 paths. The matrix must keep only
// the texts of 256 paths.
func TestAdviceIsLimited(t *testing.T) {
	m := mesh.New(hosts(400))
	var all []paths.Result
	for to := range 400 {
		p := path(to, "network", 0)
		p.Advice = fmt.Sprint(to)
		all = append(all, p)
	}
	m.Answer(0, answer(t, 0, all...))
	advised, broken := 0, 0
	for to := range 400 {
		c := m.Cell(0, to)
		if c.Result.Broken() {
			broken++
		}
		if c.Advice != "" {
			advised++
		}
	}
	if broken != 399 || advised != 256 {
		t.Errorf("%d broken paths, %d with an advice, want 399 and 256: %s", broken, advised, m.Problem(0))
	}
}

// TestHostsAreSorted expects subnets in the order of their numbers, before other names, and hostile names as
// visible text.
func TestHostsAreSorted(t *testing.T) {
	m := mesh.New([]mesh.Host{{Name: "10.5.10.0/24"}, {Name: "10.5.5x"}, {Name: "10.5.9.0/24"}})
	if m.Hosts[0].Name != "10.5.9.0/24" || m.Hosts[1].Name != "10.5.10.0/24" {
		t.Errorf("the hosts are %v", m.Hosts)
	}
	m = mesh.New([]mesh.Host{{Name: "b\x1b]0;"}, {Name: "a\u202eb"}})
	if m.Hosts[0].Name != `a\u202eb` || m.Hosts[1].Name != `b\x1b]0;` {
		t.Errorf("the hosts are %q", m.Hosts)
	}
}

// FuzzAnswer lets hosts answer anything. The output must be valid, and have only visible characters.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte(`{"lease":{"key":"10.5.1.0-24"},"paths":{"worst":[{"peer":"10.5.2.0-24","ok":true,"rttMilliseconds":1e308}]}}`), "name")
	f.Add(answer(f, 0, path(1, "mtu", 0), path(2, "", 0.3)), "\x00\xff<")
	f.Add([]byte(`{"paths":{"worst":[`), "")
	f.Fuzz(func(t *testing.T, body []byte, name string) {
		all := hosts(3)
		all[2].Name = name
		m := mesh.New(all)
		for i := range m.Hosts {
			m.Answer(i, body)
		}
		var text, svg bytes.Buffer
		if err := errors.Join(m.Text(&text, false), m.SVG(&svg)); err != nil {
			t.Fatal(err)
		}
		parse(t, svg.Bytes())
		for _, r := range text.String() {
			if r != '\n' && !unicode.IsPrint(r) {
				t.Fatalf("%q in %q", r, text.String())
			}
		}
		if _, err := json.Marshal(m.Data()); err != nil {
			t.Fatal(err)
		}
	})
}
