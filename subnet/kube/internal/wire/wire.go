// SPDX-License-Identifier: Apache-2.0

// Package wire decodes Nodes from the protobuf form of the Kubernetes API. It reads only the fields
// that flanneld needs, and copies none of them, because a daemon receives every heartbeat of every
// Node. It does no I/O besides reading from the readers that it is given.
//
// The numbers of fields are those of k8s.io/api/core/v1/generated.proto and
// k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto. They never change.
//
// field.go iterates over the fields of a message, for all decoders. node.go decodes one Node, and
// stream.go decodes lists and watches.
package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// magic is the beginning of every protobuf object that is not inside of another object.
const magic = "k8s\x00"

// numberOfRaw is the number of the field raw of runtime.Unknown. An object that begins with magic
// is a runtime.Unknown, whose field raw contains the message of the object.
const numberOfRaw = 2

// unwrap returns the message of an object that begins with magic.
func unwrap(b []byte) ([]byte, error) {
	b, ok := bytes.CutPrefix(b, []byte(magic))
	if !ok {
		return nil, fmt.Errorf("%w: no object", ErrMalformed)
	}
	raw, err := last(b, numberOfRaw)
	return raw.bytes, err
}

// StatusError is an error that an API server has sent.
type StatusError struct{ metav1.Status }

// Error implements error.
func (e *StatusError) Error() string {
	return oneline.Collapse(fmt.Sprintf("status %d: %s", e.Code, e.Message))
}

// Has reports whether the server names that cause.
func (e *StatusError) Has(cause metav1.CauseType) bool {
	return e.Details != nil && slices.ContainsFunc(e.Details.Causes, func(c metav1.StatusCause) bool { return c.Type == cause })
}

// DecodeStatus decodes a Status, which is the body of an answer that refuses a request. An API server sends JSON
// instead of protobuf if the request asked for metadata, because a Status has no form of metadata. Proxies also send
// other bodies: the error then wraps ErrMalformed.
func DecodeStatus(body []byte) (*StatusError, error) {
	raw, err := unwrap(body)
	if err == nil {
		return decodeStatus(raw)
	}
	e := &StatusError{}
	if json.Unmarshal(body, &e.Status) != nil && e.Message == "" { // a field of another type does not hide the message
		return nil, err
	}
	return e, nil
}

func decodeStatus(b []byte) (*StatusError, error) {
	e := &StatusError{}
	if err := e.Unmarshal(b); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return e, nil
}
