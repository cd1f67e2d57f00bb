// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"google.golang.org/protobuf/encoding/protowire"
)

// The encoder of the tests: messages of fields, as the API server writes them.

func bytesField(n protowire.Number, b []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, n, protowire.BytesType), b)
}

func text(n protowire.Number, s string) []byte { return bytesField(n, []byte(s)) }

func number(n protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, n, protowire.VarintType), v)
}

func message(fields ...[]byte) []byte { return slices.Concat(fields...) }

type wireNode struct {
	name, uid, revision string
	created             uint64
	annotations         map[string]string
	cidrs               []string
	unavailable         string
	host                string
	ballast             int // bytes of managed fields
}

func (n wireNode) metadata() []byte {
	meta := message(text(1, n.name), text(2, ""), text(3, ""), text(5, n.uid), text(6, n.revision), number(7, 3),
		bytesField(8, message(number(1, n.created), number(2, 0))), bytesField(11, message(text(1, "label"), text(2, "x"))),
		bytesField(11, message(text(1, hostLabel), text(2, n.host))))
	for key, value := range n.annotations {
		meta = append(meta, bytesField(12, message(text(1, key), text(2, value)))...)
	}
	return append(meta, text(17, strings.Repeat("m", n.ballast))...)
}

func (n wireNode) partial() []byte { return bytesField(1, n.metadata()) }

func (n wireNode) full() []byte {
	spec := message()
	if len(n.cidrs) > 0 {
		spec = append(spec, text(1, n.cidrs[0])...)
	}
	for _, c := range n.cidrs {
		spec = append(spec, text(7, c)...)
	}
	status := message(bytesField(4, message(text(1, "Ready"), text(2, "True"))))
	if n.unavailable != "" {
		status = append(status, bytesField(4, message(text(1, networkUnavailable), text(2, n.unavailable), text(5, "r"), text(6, "m")))...)
	}
	return message(n.partial(), bytesField(2, spec), bytesField(3, status))
}

func wrap(kind string, raw []byte) []byte {
	return message([]byte(magic), bytesField(1, message(text(1, "v1"), text(2, kind))), bytesField(2, raw), text(3, ""), text(4, ""))
}

func wireFrame(kind string, raw []byte) []byte {
	return message(text(1, kind), bytesField(2, text(1, string(wrap("Node", raw)))))
}

func wireList(revision string, items ...[]byte) []byte {
	list := bytesField(1, message(text(1, ""), text(2, revision), text(3, "")))
	for _, item := range items {
		list = append(list, bytesField(2, item)...)
	}
	return wrap("NodeList", list)
}

func testDecoder() *decoder { return &decoder{newKeys(DefaultAnnotationPrefix + "/")} }

func TestDecodeNode(t *testing.T) {
	n := wireNode{
		name: "n1", uid: "u1", revision: "42", created: 1700000000, cidrs: []string{"fd00::/64", "10.5.1.0/24"}, unavailable: "True",
		annotations: map[string]string{anno("public-ip"): "192.0.2.1", anno("kube-subnet-manager"): "true", anno("backend-type"): "", "other": "x"},
	}
	var o object
	if err := testDecoder().node(n.full(), &o); err != nil {
		t.Fatal(err)
	}
	s := newSelf(&o, 7)
	if string(o.name) != "n1" || s.uid != "u1" || string(o.revision) != "42" || s.created != 1700000000 || s.network != "True" {
		t.Errorf("got %+v", s)
	}
	if fmt.Sprint(s.cidrs) != "[10.5.1.0/24 fd00::/64]" {
		t.Errorf("podCIDRs are %v", s.cidrs)
	}
	want := [numAnnotations]note{managed: {"true", true}, publicIP: {"192.0.2.1", true}, backendType: {"", true}}
	if s.notes != want {
		t.Errorf("annotations are %v, want %v", s.notes, want)
	}
}

func TestDecodeList(t *testing.T) {
	a, b := wireNode{name: "a", ballast: 100_000}, wireNode{name: "b"}
	list := wireList("17", a.full(), b.full())
	names := func(from io.Reader) (string, listing, error) {
		var names []string
		l, err := testDecoder().list(from, func(o *object) error {
			names = append(names, string(o.name))
			return nil
		})
		return strings.Join(names, " "), l, err
	}
	for name, from := range map[string]io.Reader{"at once": bytes.NewReader(list), "byte by byte": iotest.OneByteReader(bytes.NewReader(list))} {
		if got, l, err := names(from); got != "a b" || l.revision != 17 || err != nil {
			t.Errorf("%s: got %q at %d, %v", name, got, l.revision, err)
		}
	}
	for _, cut := range []int{0, 3, 4, 20, len(list) / 2, len(list) - 5} {
		if got, _, err := names(bytes.NewReader(list[:cut])); err == nil {
			t.Errorf("cut off after %d of %d bytes: got %q and no error", cut, len(list), got)
		}
	}
	if _, _, err := names(bytes.NewReader(wireList(""))); !errors.Is(err, errWire) {
		t.Errorf("without a resource version: %v", err)
	}
	if _, _, err := names(strings.NewReader(`{"kind":"NodeList"}`)); !errors.Is(err, errWire) {
		t.Errorf("JSON: %v", err)
	}
	more := wrap("NodeList", message(bytesField(1, message(text(2, "1"), text(3, "token")))))
	if _, l, err := names(bytes.NewReader(more)); err != nil || l.more != "token" {
		t.Errorf("the first page of a list goes on with %q, %v, want the token", l.more, err)
	}
}

func TestDecodeFrame(t *testing.T) {
	d, o := testDecoder(), &object{}
	for _, kind := range []string{added, modified, deleted} {
		got, err := d.frame(wireFrame(kind, wireNode{name: "n", revision: "5"}.partial()), o)
		if got != kind || err != nil || string(o.name) != "n" || string(o.revision) != "5" {
			t.Errorf("%s: got %s of %s at %s, %v", kind, got, o.name, o.revision, err)
		}
	}
	if got, err := d.frame(wireFrame(bookmark, wireNode{revision: "9"}.partial()), o); got != bookmark || err != nil || string(o.revision) != "9" {
		t.Errorf("bookmark: got %s at %s, %v", got, o.revision, err)
	}
	gone := message(text(2, "Failure"), text(3, "too old"), text(4, "Expired"), number(6, 410))
	_, err := d.frame(wireFrame(failed, gone), o)
	if !hasCode(err, 410) {
		t.Errorf("error: got %v", err)
	}
	if _, err := d.frame(wireFrame("NONSENSE", nil), o); !errors.Is(err, errWire) {
		t.Errorf("unknown type: %v", err)
	}
	if _, err := d.frame(wireFrame(added, wireNode{}.partial()), o); !errors.Is(err, errWire) {
		t.Errorf("no name: %v", err)
	}
}

// TestHeartbeatsAllocateNothing holds the whole way of an event that changes
// nothing, from the bytes to the view, to no allocation.
func TestHeartbeatsAllocateNothing(t *testing.T) {
	d := testDecoder()
	v := &view{keys: &d.keys, entries: map[string]*entry{}}
	n := wireNode{
		name: "node-4711", uid: "0b3f6e0e-6f3d-4a0e-9a39-000000004711", revision: "5", created: 1, cidrs: []string{"10.5.1.0/24"}, ballast: 2000,
		annotations: map[string]string{
			anno("kube-subnet-manager"): "true", anno("public-ip"): "192.0.2.1", anno("backend-type"): "vxlan",
			anno("backend-data"): `{"VtepMAC":"02:00:00:00:00:01"}`, "volumes.kubernetes.io/controller-managed-attach-detach": "true",
		},
	}
	var o object
	if err := d.node(n.full(), &o); err != nil {
		t.Fatal(err)
	}
	v.take(&o, true, &view{})
	n.revision = "1000000"
	frame := wireFrame(modified, n.partial())
	allocs := testing.AllocsPerRun(1000, func() {
		kind, err := d.frame(frame, &o)
		if err != nil {
			t.Fatal(err)
		}
		if name, err := v.advance(happened{kind, &o}); name != "" || err != nil {
			t.Fatalf("something changed about %q, %v", name, err)
		}
	})
	if allocs > 0 {
		t.Errorf("%v allocations for a heartbeat", allocs)
	}
	if v.revision != 1000000 {
		t.Errorf("the view is at %d", v.revision)
	}
}

// FuzzWire checks that no bytes make the decoder panic, hang, or say anything
// of more than one line.
func FuzzWire(f *testing.F) {
	n := wireNode{name: "n", uid: "u", revision: "1", cidrs: []string{"10.5.1.0/24"}, annotations: map[string]string{anno("public-ip"): "1.2.3.4"}, unavailable: "True"}
	f.Add(wireFrame(added, n.full()))
	f.Add(wireList("1", n.full(), n.partial()))
	f.Add(wrap("Status", message(text(3, "x\ny"), number(6, 410), bytesField(5, bytesField(4, text(1, "ResourceVersionTooLarge"))))))
	f.Add(binary.BigEndian.AppendUint32(nil, 1<<31))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, o := testDecoder(), &object{}
		c := &client{host: "h"}
		check := func(err error) {
			if err != nil && strings.ContainsAny(c.explain(err).Error(), "\r\n") {
				t.Errorf("error is not one line: %q", c.explain(err))
			}
		}
		_, err := d.frame(b, o)
		check(err)
		if err == nil {
			_, _ = o.cidrs()
		}
		items := 0
		_, err = d.list(bytes.NewReader(b), func(o *object) error {
			items++
			if len(o.name) > len(b) {
				t.Errorf("a name longer than all")
			}
			return nil
		})
		check(err)
		if items > len(b) {
			t.Errorf("%d items in %d bytes", items, len(b))
		}
		check(c.frames(bytes.NewReader(b), d, func(string, *object) error { return nil }))
	})
}
