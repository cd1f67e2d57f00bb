// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	restwatch "k8s.io/client-go/rest/watch"

	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire/wiretest"
)

// largeNode returns a Node of the size that Nodes of a cloud have. Most of the bytes are names of
// images.
func largeNode(i int) *corev1.Node {
	n := node(fmt.Sprintf("node-%d", i))
	n.UID = types.UID(fmt.Sprintf("0b3f6e0e-6f3d-4a0e-9a39-%012x", i))
	n.Annotations[prefix+"backend-data"] = `{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}`
	n.Annotations["volumes.kubernetes.io/controller-managed-attach-detach"] = "true"
	for l := range 24 {
		n.Labels[fmt.Sprintf("topology.example.com/some-label-%d", l)] = fmt.Sprintf("value-%d", l)
	}
	for _, manager := range []string{"kubelet", "flanneld", "kube-controller-manager"} {
		n.ManagedFields = append(n.ManagedFields, metav1.ManagedFieldsEntry{
			Manager: manager, Operation: "Update", APIVersion: "v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(strings.Repeat(`{"f:a":{}}`, 60)),
		})
	}
	n.Status.Capacity = corev1.ResourceList{}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourcePods, corev1.ResourceEphemeralStorage} {
		n.Status.Capacity[name] = resource.MustParse("16")
	}
	for image := range 40 {
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{SizeBytes: 100 << 20, Names: []string{
			fmt.Sprintf("registry.example.com/team/component-%d@sha256:%064x", image, image), fmt.Sprintf("registry.example.com/team/component-%d:v1.%d.0", image, image),
		}})
	}
	return n
}

// kinds returns a Scheme of the types that client-go decodes in the benchmarks.
func kinds(b *testing.B) *apiruntime.Scheme {
	s := apiruntime.NewScheme()
	if err := corev1.AddToScheme(s); err != nil {
		b.Fatal(err)
	}
	if err := metav1.AddMetaToScheme(s); err != nil {
		b.Fatal(err)
	}
	return s
}

// BenchmarkList decodes a list of 1,000 Nodes, as a start does.
func BenchmarkList(b *testing.B) {
	const nodes = 1000
	var all []*corev1.Node
	for i := range nodes {
		all = append(all, largeNode(i))
	}
	list := wiretest.List(b, "1", "", all...)
	b.Run("wire", func(b *testing.B) {
		measure(b, len(list), func() {
			n := 0
			if _, err := newDecoder().List(bytes.NewReader(list), func(*wire.Node) { n++ }); err != nil {
				b.Fatal(err)
			}
			if n != nodes {
				b.Fatalf("got %d Nodes", n)
			}
		})
	})
	b.Run("client-go", func(b *testing.B) {
		s := kinds(b)
		decoder := protobuf.NewSerializer(s, s)
		measure(b, len(list), func() {
			body, err := io.ReadAll(bytes.NewReader(list)) // as rest.Request does
			if err != nil {
				b.Fatal(err)
			}
			got, _, err := decoder.Decode(body, nil, &corev1.NodeList{})
			if err != nil || len(got.(*corev1.NodeList).Items) != nodes {
				b.Fatalf("got %T, %v", got, err)
			}
		})
	})
}

// BenchmarkHeartbeats decodes 1,000 events of a watch that delivers only the metadata of Nodes.
func BenchmarkHeartbeats(b *testing.B) {
	const events = 1000
	stream := bytes.Repeat(wiretest.Event(b, wire.Modified, wiretest.Metadata(largeNode(1))), events)
	b.Run("wire", func(b *testing.B) {
		measure(b, len(stream), func() {
			n := 0
			for _, err := range newDecoder().Events(bytes.NewReader(stream)) {
				if err != nil {
					b.Fatal(err)
				}
				n++
			}
			if n != events {
				b.Fatalf("got %d events", n)
			}
		})
	})
	b.Run("client-go", func(b *testing.B) {
		s := kinds(b)
		serializer := protobuf.NewRawSerializer(s, s)
		object := protobuf.NewSerializer(s, s)
		measure(b, len(stream), func() {
			frames := protobuf.LengthDelimitedFramer.NewFrameReader(io.NopCloser(bytes.NewReader(stream)))
			d := restwatch.NewDecoder(streaming.NewDecoder(frames, serializer), object)
			for range events {
				kind, got, err := d.Decode()
				if _, ok := got.(*metav1.PartialObjectMetadata); !ok || kind != watch.Modified || err != nil {
					b.Fatalf("got %s of %T, %v", kind, got, err)
				}
			}
		})
	})
}

// measure reports the costs of decode, which decodes size bytes. The CPU time includes that of the
// garbage collector, and on a busy machine it is more exact than the elapsed time.
func measure(b *testing.B, size int, decode func()) {
	b.ReportAllocs()
	b.SetBytes(int64(size))
	before := cpuTime(b)
	for b.Loop() {
		decode()
	}
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
}

// cpuTime returns the CPU time of this process.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
