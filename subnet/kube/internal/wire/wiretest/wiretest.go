// SPDX-License-Identifier: Apache-2.0

// Package wiretest encodes Nodes as an API server does, with the types and the encoders of the
// Kubernetes API, so that tests do not depend on the project's own idea of the format.
package wiretest

import (
	"bytes"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"

	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// Object returns an object in the form of the body of an answer.
func Object(t testing.TB, o runtime.Object) []byte {
	t.Helper()
	o = o.DeepCopyObject()
	o.GetObjectKind().SetGroupVersionKind(kindOf(t, o))
	var b bytes.Buffer
	if err := protobuf.NewSerializer(nil, nil).Encode(o, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func kindOf(t testing.TB, o runtime.Object) schema.GroupVersionKind {
	t.Helper()
	metadata := schema.GroupVersion{Group: metav1.GroupName, Version: "v1"}
	switch o.(type) {
	case *corev1.Node:
		return corev1.SchemeGroupVersion.WithKind("Node")
	case *corev1.NodeList:
		return corev1.SchemeGroupVersion.WithKind("NodeList")
	case *metav1.PartialObjectMetadata:
		return metadata.WithKind("PartialObjectMetadata")
	case *metav1.PartialObjectMetadataList:
		return metadata.WithKind("PartialObjectMetadataList")
	case *metav1.Status:
		return schema.GroupVersionKind{Version: "v1", Kind: "Status"}
	}
	t.Fatalf("%T has no kind in this package", o)
	return schema.GroupVersionKind{}
}

// List returns a list of Nodes at a resource version, in the form of the body of an answer. next is
// the token for the next page, or empty.
func List(t testing.TB, version, next string, nodes ...*corev1.Node) []byte {
	t.Helper()
	l := &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: version, Continue: next}}
	for _, n := range nodes {
		l.Items = append(l.Items, *n)
	}
	return Object(t, l)
}

// MetadataList is like List, for a request that asks only for metadata.
func MetadataList(t testing.TB, version, next string, nodes ...*corev1.Node) []byte {
	t.Helper()
	l := &metav1.PartialObjectMetadataList{ListMeta: metav1.ListMeta{ResourceVersion: version, Continue: next}}
	for _, n := range nodes {
		l.Items = append(l.Items, *Metadata(n))
	}
	return Object(t, l)
}

// Metadata returns the metadata of a Node, as an answer to a request that asks only for that.
func Metadata(n *corev1.Node) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{ObjectMeta: n.ObjectMeta}
}

// Event returns an event of a watch in the form in which a server sends it, with its length before
// it.
func Event(t testing.TB, kind string, o runtime.Object) []byte {
	t.Helper()
	e := &metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: Object(t, o)}}
	var b bytes.Buffer
	if err := protobuf.NewRawSerializer(nil, nil).Encode(e, protobuf.LengthDelimitedFramer.NewFrameWriter(&b)); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Decode returns a Node as d decodes it from a list. If metadata is true, the list contains only
// metadata.
func Decode(t testing.TB, d *wire.Decoder, n *corev1.Node, metadata bool) *wire.Node {
	t.Helper()
	list := List
	if metadata {
		list = MetadataList
	}

	var decoded *wire.Node
	if _, err := d.List(bytes.NewReader(list(t, "1", "", n)), func(n *wire.Node) { decoded = n }); err != nil {
		t.Fatal(err)
	}
	return decoded
}

// DecodeEvent returns the event of a Node as d decodes it. The Node has only metadata, as in the
// watches of flanneld.
func DecodeEvent(t testing.TB, d *wire.Decoder, kind string, n *corev1.Node) wire.Event {
	t.Helper()
	for e, err := range d.Events(bytes.NewReader(Event(t, kind, Metadata(n)))) {
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	t.Fatal("the watch has no event")
	return wire.Event{}
}
