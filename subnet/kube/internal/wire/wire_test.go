// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire/wiretest"
)

const prefix = "flannel.alpha.coreos.com/"

// annotations returns the keys of the annotations that the decoder of these tests keeps.
func annotations() []string {
	return []string{prefix + "kube-subnet-manager", prefix + "public-ip", prefix + "backend-type", prefix + "backend-data"}
}

func newDecoder() *wire.Decoder { return wire.NewDecoder(annotations(), "") }

// node returns a Node that has all fields that are decoded.
func node(name string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: "u1", ResourceVersion: "42", Generation: 3, CreationTimestamp: metav1.Unix(1700000000, 0),
			Labels:      map[string]string{"label": "x", wire.HostnameLabel: "host-of-" + name},
			Annotations: map[string]string{prefix + "public-ip": "192.0.2.1", prefix + "kube-subnet-manager": "true", prefix + "backend-type": "", "other": "x"},
		},
		Spec: corev1.NodeSpec{PodCIDR: "fd00::/64", PodCIDRs: []string{"fd00::/64", "10.5.1.0/24"}, ProviderID: "x"},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
			{Type: corev1.NodeReady, Status: corev1.ConditionTrue},
			{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionFalse, Reason: "FlannelIsUp", Message: "m"},
		}, Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeExternalIP, Address: "198.51.100.1"}, {Type: corev1.NodeInternalIP, Address: "192.0.2.1"},
			{Type: corev1.NodeInternalIP, Address: "fd00::1"}, {Type: corev1.NodeHostName, Address: name},
		}},
	}
}

// content is a wire.Node in a form that tests can compare.
type content struct {
	Name, UID, Hostname, PodCIDR string
	Revision, Created            int64
	Annotations                  map[string]string
	PodCIDRs, InternalIPs        []string
	Network                      string
}

func contentOf(n *wire.Node) content {
	c := content{
		Name: string(n.Name), UID: string(n.UID), Hostname: string(n.Hostname), PodCIDR: string(n.PodCIDR),
		Revision: n.Revision, Created: n.Created, Annotations: map[string]string{},
		Network: string(n.Network),
	}
	for i, value := range n.Annotations {
		if value != nil {
			c.Annotations[annotations()[i]] = string(value)
		}
	}
	for _, s := range n.PodCIDRs {
		c.PodCIDRs = append(c.PodCIDRs, string(s))
	}
	for _, s := range n.InternalIPs {
		c.InternalIPs = append(c.InternalIPs, string(s))
	}
	return c
}

// contentOfAPI returns the content that a decoder should decode from n.
func contentOfAPI(n *corev1.Node) content {
	c := content{
		Name: n.Name, UID: string(n.UID), Hostname: n.Labels[wire.HostnameLabel], PodCIDR: n.Spec.PodCIDR,
		Created: max(0, n.CreationTimestamp.Unix()), Annotations: map[string]string{},
	}
	if revision, err := strconv.ParseInt(n.ResourceVersion, 10, 64); err == nil {
		c.Revision = revision
	}
	for _, key := range annotations() {
		if value, ok := n.Annotations[key]; ok {
			c.Annotations[key] = value
		}
	}
	c.PodCIDRs = append(c.PodCIDRs, n.Spec.PodCIDRs...)
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			c.InternalIPs = append(c.InternalIPs, a.Address)
		}
	}
	for _, condition := range n.Status.Conditions {
		if condition.Type == corev1.NodeNetworkUnavailable {
			c.Network = string(condition.Status)
		}
	}
	return c
}

// TestLabel expects that a decoder keeps the label that it is given, even if that is HostnameLabel.
func TestLabel(t *testing.T) {
	for key, want := range map[string]string{"label": "x", wire.HostnameLabel: "host-of-n1", "other": "", "": ""} {
		n := wiretest.Decode(t, wire.NewDecoder(annotations(), key), node("n1"), false)
		if string(n.Label) != want || string(n.Hostname) != "host-of-n1" {
			t.Errorf("the label %q is %q, and the name of the host %q", key, n.Label, n.Hostname)
		}
	}
}

// TestDecodeNode expects that a full Node and the metadata of a Node, both decoded from a list,
// have the fields that the Kubernetes API's own type has.
func TestDecodeNode(t *testing.T) {
	full := node("n1")
	want := contentOfAPI(full)
	if want.Name == "" || want.Revision == 0 || len(want.Annotations) != 3 || want.Network == "" {
		t.Fatalf("the test's own Node is not complete: %+v", want)
	}
	if diff := cmp.Diff(want, contentOf(wiretest.Decode(t, newDecoder(), full, false))); diff != "" {
		t.Errorf("a full Node (-want +got):\n%s", diff)
	}
	metadata := contentOfAPI(&corev1.Node{ObjectMeta: full.ObjectMeta})
	if diff := cmp.Diff(metadata, contentOf(wiretest.Decode(t, newDecoder(), full, true))); diff != "" {
		t.Errorf("metadata (-want +got):\n%s", diff)
	}
	many := node("n2")
	many.Spec.PodCIDRs = append(many.Spec.PodCIDRs, "fd01::/64")
	many.CreationTimestamp = metav1.NewTime(time.Time{})
	if diff := cmp.Diff(contentOfAPI(many), contentOf(wiretest.Decode(t, newDecoder(), many, false))); diff != "" {
		t.Errorf("three podCIDRs and no time (-want +got):\n%s", diff)
	}
}

// names decodes a list and returns the names of its Nodes, with spaces between them. After an error
// it returns the names before it.
func names(from io.Reader) (string, wire.ListMeta, error) {
	var names []string
	meta, err := newDecoder().List(from, func(n *wire.Node) { names = append(names, string(n.Name)) })
	return strings.Join(names, " "), meta, err
}

func TestDecodeList(t *testing.T) {
	large := node("a")
	large.Annotations["large"] = strings.Repeat("m", 100_000)
	list := wiretest.List(t, "17", "", large, node("b"))
	for name, from := range map[string]io.Reader{"at once": bytes.NewReader(list), "byte by byte": iotest.OneByteReader(bytes.NewReader(list))} {
		if got, meta, err := names(from); got != "a b" || meta.Revision != 17 || err != nil {
			t.Errorf("%s: got %q at %d, %v", name, got, meta.Revision, err)
		}
	}
	for _, cut := range []int{0, 3, 4, 20, len(list) / 2, len(list) - 5} {
		if got, _, err := names(bytes.NewReader(list[:cut])); err == nil {
			t.Errorf("cut off after %d of %d bytes: got %q and no error", cut, len(list), got)
		}
	}
	if _, _, err := names(bytes.NewReader(wiretest.List(t, "", ""))); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("without a resource version: %v", err)
	}
	if _, _, err := names(bytes.NewReader(wiretest.List(t, "1", "", node("")))); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("with a Node without a name: %v", err)
	}
	if _, _, err := names(strings.NewReader(`{"kind":"NodeList"}`)); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("JSON: %v", err)
	}
	if _, meta, err := names(bytes.NewReader(wiretest.MetadataList(t, "1", "token"))); err != nil || meta.Continue != "token" {
		t.Errorf("the first page of a list continues with %q, %v, want the token", meta.Continue, err)
	}
	broken := errors.New("broken")
	if _, _, err := names(io.MultiReader(bytes.NewReader(list[:20]), iotest.ErrReader(broken))); !errors.Is(err, broken) {
		t.Errorf("a connection that breaks: %v", err)
	}
}

func TestDecodeEvents(t *testing.T) {
	for _, kind := range []string{wire.Added, wire.Modified, wire.Deleted} {
		e := wiretest.DecodeEvent(t, newDecoder(), kind, node("n"))
		if e.Type != kind || string(e.Node.Name) != "n" || e.Node.Revision != 42 {
			t.Errorf("%s: got %s of %s at %d", kind, e.Type, e.Node.Name, e.Node.Revision)
		}
	}
	bookmark := &corev1.Node{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "9"}}
	if e := wiretest.DecodeEvent(t, newDecoder(), wire.Bookmark, bookmark); e.Type != wire.Bookmark || e.Node.Revision != 9 {
		t.Errorf("bookmark: got %s at %d", e.Type, e.Node.Revision)
	}

	// A watch whose last event is an error.
	gone := &metav1.Status{Status: "Failure", Message: "too\nold", Reason: metav1.StatusReasonExpired, Code: 410}
	watch := slices.Concat(wiretest.Event(t, wire.Added, node("a")), wiretest.Event(t, wire.Modified, wiretest.Metadata(node("b"))), wiretest.Event(t, "ERROR", gone))
	var got []string
	for e, err := range newDecoder().Events(iotest.OneByteReader(bytes.NewReader(watch))) {
		if err == nil {
			got = append(got, e.Type+" "+string(e.Node.Name))
			continue
		}
		status, ok := errors.AsType[*wire.StatusError](err)
		if !ok || status.Code != 410 || strings.ContainsAny(err.Error(), "\n") {
			t.Errorf("the last event is %v", err)
		}
		got = append(got, "error")
	}
	if diff := cmp.Diff([]string{"ADDED a", "MODIFIED b", "error"}, got); diff != "" {
		t.Errorf("events of one watch (-want +got):\n%s", diff)
	}

	for name, watch := range map[string][]byte{
		"unknown type":    wiretest.Event(t, "NONSENSE", node("n")),
		"no name":         wiretest.Event(t, wire.Added, node("")),
		"very long":       binary.BigEndian.AppendUint32(nil, wire.MaxObject+1),
		"not an object":   append(binary.BigEndian.AppendUint32(nil, 4), "\x0a\x02xx"...),
		"not of protobuf": append(binary.BigEndian.AppendUint32(nil, 1), 0xff),
	} {
		for e, err := range newDecoder().Events(bytes.NewReader(watch)) {
			if !errors.Is(err, wire.ErrMalformed) {
				t.Errorf("%s: got %+v, %v", name, e, err)
			}
		}
	}
}

func TestDecodeStatus(t *testing.T) {
	status := &metav1.Status{Message: "Timeout: x", Reason: metav1.StatusReasonTimeout, Code: 504, Details: &metav1.StatusDetails{
		Name: "nodes", Causes: []metav1.StatusCause{{Type: "ResourceVersionTooLarge", Message: "m"}, {Type: "Other"}}, RetryAfterSeconds: 1,
	}}
	got, err := wire.DecodeStatus(wiretest.Object(t, status))
	if diff := cmp.Diff(&wire.StatusError{Status: *status}, got); err != nil || diff != "" {
		t.Fatalf("%v (-want +got):\n%s", err, diff)
	}
	if !got.Has("ResourceVersionTooLarge") || !got.Has("Other") || got.Has("x") || (&wire.StatusError{}).Has("x") {
		t.Errorf("the causes of %+v", got)
	}
	text, err := json.Marshal(status)
	if err != nil {
		t.Fatal(err)
	}
	got, err = wire.DecodeStatus(text)
	if diff := cmp.Diff(&wire.StatusError{Status: *status}, got); err != nil || diff != "" {
		t.Errorf("in JSON: %v (-want +got):\n%s", err, diff)
	}
	if _, err := wire.DecodeStatus([]byte("<html>")); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("HTML: %v", err)
	}
}

// TestEventsAllocateNothing expects that a watch makes no more allocations for a thousand events
// than for one.
func TestEventsAllocateNothing(t *testing.T) {
	event := wiretest.Event(t, wire.Modified, wiretest.Metadata(node("node-4711")))
	d := newDecoder()
	allocations := func(events int) float64 {
		watch := bytes.Repeat(event, events)
		return testing.AllocsPerRun(10, func() {
			n := 0
			for e, err := range d.Events(bytes.NewReader(watch)) {
				if err != nil || string(e.Node.Name) != "node-4711" {
					t.Fatalf("got %+v, %v", e, err)
				}
				n++
			}
			if n != events {
				t.Fatalf("got %d events, want %d", n, events)
			}
		})
	}
	if one, thousand := allocations(1), allocations(1000); thousand > one {
		t.Errorf("1000 events make %v allocations, and one makes %v", thousand, one)
	}
}

// FuzzNode compares the decoder with the Kubernetes API's own decoder on arbitrary messages that
// the latter accepts. The decoder must accept the form in which an API server sends such a Node. It
// may refuse another form, with ErrMalformed, because the API's decoder also accepts invalid
// protobuf: it ignores the high bits of numbers, and the numbers of groups.
func FuzzNode(f *testing.F) {
	for _, n := range []*corev1.Node{node("n"), {ObjectMeta: metav1.ObjectMeta{Name: "n"}}} {
		b, err := n.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var want corev1.Node
		if want.Unmarshal(b) != nil {
			return
		}
		sent, err := want.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		for _, tc := range []struct {
			message []byte
			refuses bool // the decoder may refuse the message
		}{{b, true}, {sent, want.Name == ""}} {
			got, err := decodeInList(tc.message)
			switch {
			case err == nil:
				if diff := cmp.Diff(contentOfAPI(&want), got); diff != "" {
					t.Errorf("the content of %x (-want +got):\n%s", tc.message, diff)
				}
			case !tc.refuses || !errors.Is(err, wire.ErrMalformed):
				t.Errorf("the decoder does not accept %x: %v", tc.message, err)
			}
		}
	})
}

// decodeInList decodes a list that contains only the Node with this message.
func decodeInList(node []byte) (got content, err error) {
	item := append(binary.AppendUvarint([]byte{2<<3 | 2}, uint64(len(node))), node...)
	list := append([]byte{1<<3 | 2, 3, 2<<3 | 2, 1, '7'}, item...)
	body := append(binary.AppendUvarint([]byte("k8s\x00\x12"), uint64(len(list))), list...)
	nodes := 0
	meta, err := newDecoder().List(bytes.NewReader(body), func(n *wire.Node) {
		got = contentOf(n)
		nodes++
	})
	if err != nil {
		return content{}, err
	}
	if nodes != 1 || meta.Revision != 7 {
		return content{}, fmt.Errorf("the list has %d Nodes and revision %d, want 1 and 7", nodes, meta.Revision)
	}
	return got, nil
}

// FuzzStreams checks that arbitrary bytes do not make the decoders panic or hang. The decoders must
// not return more than the bytes contain, or an error of more than one line.
func FuzzStreams(f *testing.F) {
	f.Add(wiretest.Event(f, wire.Added, node("n")))
	f.Add(wiretest.List(f, "1", "", node("n"), node("m")))
	f.Add(wiretest.MetadataList(f, "1", "x", node("n")))
	f.Add(wiretest.Object(f, &metav1.Status{Message: "x\ny", Code: 410, Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "x"}}}}))
	f.Add(binary.BigEndian.AppendUint32(nil, 1<<31))
	f.Fuzz(func(t *testing.T, b []byte) {
		check := func(what string, n int, err error) {
			if err != nil && strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("%s: the error is not one line: %q", what, err)
			}
			if n > len(b) {
				t.Errorf("%s: %d in %d bytes", what, n, len(b))
			}
		}
		items := 0
		_, err := newDecoder().List(bytes.NewReader(b), func(n *wire.Node) {
			check("name", len(n.Name), nil)
			items++
		})
		check("list", 0, err)
		check("Nodes", items, nil)
		events := 0
		for e, err := range newDecoder().Events(bytes.NewReader(b)) {
			check("watch", 0, err)
			if err == nil {
				check("name", len(e.Node.Name), nil)
				events++
			}
		}
		check("events", events, nil)
		status, err := wire.DecodeStatus(b)
		check("status", 0, err)
		if err == nil {
			check("message", len(status.Message), status)
		}
	})
}
