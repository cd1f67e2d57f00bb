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
	"fmt"

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
	return last(b, numberOfRaw)
}

// StatusError is an error that an API server has sent, as a Status.
type StatusError struct {
	Code    int // the HTTP status
	Message string
	Causes  []string // the reason of each cause
}

// Error implements error.
func (e *StatusError) Error() string {
	return oneline.Collapse(fmt.Sprintf("status %d: %s", e.Code, e.Message))
}

// DecodeStatus decodes a Status, which is the body of an answer that refuses a request. Servers
// also send other bodies, for example in JSON: the error then wraps ErrMalformed.
func DecodeStatus(body []byte) (*StatusError, error) {
	raw, err := unwrap(body)
	if err != nil {
		return nil, err
	}
	return decodeStatus(raw)
}

func decodeStatus(b []byte) (*StatusError, error) {
	e := &StatusError{}
	err := each(b, func(f field) error {
		switch f.number {
		case 3:
			e.Message = string(f.bytes)
		case 5:
			return e.details(f.bytes)
		case 6:
			e.Code = int(int32(f.value))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// details adds the causes in a StatusDetails to e.
func (e *StatusError) details(b []byte) error {
	return each(b, func(f field) error {
		if f.number != 4 {
			return nil
		}
		cause, err := last(f.bytes, 1)
		e.Causes = append(e.Causes, string(cause))
		return err
	})
}
