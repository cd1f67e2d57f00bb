// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// The protobuf form of the Kubernetes API, of which only what is needed is
// read. Field numbers are those of k8s.io/api/core/v1/generated.proto and
// k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto.

// magic stands before every protobuf object outside a watch frame.
const magic = "k8s\x00"

var errWire = errors.New("malformed protobuf")

// object is what is read of a Node. All bytes are views into the buffer that
// was decoded, and good for as long as that is.
type object struct {
	name, uid, revision []byte
	created             int64                  // seconds since 1970
	notes               [numAnnotations][]byte // nil for one that is absent
	host                []byte                 // the label hostLabel
	podCIDR             []byte
	podCIDRs            [2][]byte
	numPodCIDRs         int // more than two are not kept
	network             condition
}

// condition is the one of type NetworkUnavailable; nil status if there is none.
type condition struct{ status, reason, message []byte }

// decoder decodes objects without allocating.
type decoder struct {
	keys keys // which annotations are of interest
}

// field is one field of a message.
type field struct {
	number   int
	kind     protowire.Type
	bytes    []byte // of kind BytesType
	number64 uint64 // of kind VarintType
}

// next splits the first field off b.
func next(b []byte) (f field, rest []byte, err error) {
	number, kind, n := protowire.ConsumeTag(b)
	if n < 0 {
		return field{}, nil, errWire
	}
	b = b[n:]
	f.number, f.kind = int(number), kind
	switch kind {
	case protowire.BytesType:
		f.bytes, n = protowire.ConsumeBytes(b)
	case protowire.VarintType:
		f.number64, n = protowire.ConsumeVarint(b)
	default:
		n = protowire.ConsumeFieldValue(number, kind, b)
	}
	if n < 0 {
		return field{}, nil, errWire
	}
	return f, b[n:], nil
}

// each calls on for every field of the message b that holds bytes or a number.
func each(b []byte, on func(field) error) error {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		if err := on(f); err != nil {
			return err
		}
		b = rest
	}
	return nil
}

// unwrap returns the message in an object with its magic.
func unwrap(b []byte) (raw []byte, err error) {
	b, ok := bytes.CutPrefix(b, []byte(magic))
	if !ok {
		return nil, fmt.Errorf("%w: no object", errWire)
	}
	return stringOf(b, 2)
}

// stringOf returns the last field of the message b with that number.
func stringOf(b []byte, number int) (s []byte, err error) {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return nil, err
		}
		if f.number == number {
			s = f.bytes
		}
		b = rest
	}
	return s, nil
}

// node decodes a Node or the PartialObjectMetadata of one.
func (d *decoder) node(b []byte, o *object) error {
	*o = object{}
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		switch f.number {
		case 1:
			err = d.metadata(f.bytes, o)
		case 2:
			err = o.spec(f.bytes)
		case 3:
			err = o.status(f.bytes)
		}
		if err != nil {
			return err
		}
		b = rest
	}
	if len(o.name) == 0 {
		return fmt.Errorf("%w: an object without a name", errWire)
	}
	return nil
}

func (d *decoder) metadata(b []byte, o *object) error {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		switch f.number {
		case 1:
			o.name = f.bytes
		case 5:
			o.uid = f.bytes
		case 6:
			o.revision = f.bytes
		case 8:
			o.created, err = seconds(f.bytes)
		case 11:
			err = o.label(f.bytes)
		case 12:
			err = d.annotation(f.bytes, o)
		}
		if err != nil {
			return err
		}
		b = rest
	}
	return nil
}

func seconds(b []byte) (s int64, err error) {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return 0, err
		}
		if f.number == 1 {
			s = int64(f.number64)
		}
		b = rest
	}
	return max(s, 0), nil
}

func (d *decoder) annotation(b []byte, o *object) error {
	key, value, err := pair(b)
	if err != nil {
		return err
	}
	if i, ok := d.keys.index(key); ok {
		o.notes[i] = value
	}
	return nil
}

func (o *object) label(b []byte) error {
	key, value, err := pair(b)
	if err == nil && string(key) == hostLabel {
		o.host = value
	}
	return err
}

// pair returns key and value of one entry of a map.
func pair(b []byte) (key, value []byte, err error) {
	value = []byte{}
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return nil, nil, err
		}
		switch f.number {
		case 1:
			key = f.bytes
		case 2:
			value = f.bytes
		}
		b = rest
	}
	return key, value, nil
}

func (o *object) spec(b []byte) error {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		switch f.number {
		case 1:
			o.podCIDR = f.bytes
		case 7:
			if o.numPodCIDRs < len(o.podCIDRs) {
				o.podCIDRs[o.numPodCIDRs] = f.bytes
			}
			o.numPodCIDRs++
		}
		b = rest
	}
	return nil
}

func (o *object) status(b []byte) error {
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		if f.number == 4 {
			if err := o.condition(f.bytes); err != nil {
				return err
			}
		}
		b = rest
	}
	return nil
}

func (o *object) condition(b []byte) error {
	var kind []byte
	var c condition
	for len(b) > 0 {
		f, rest, err := next(b)
		if err != nil {
			return err
		}
		switch f.number {
		case 1:
			kind = f.bytes
		case 2:
			c.status = f.bytes
		case 5:
			c.reason = f.bytes
		case 6:
			c.message = f.bytes
		}
		b = rest
	}
	if string(kind) == networkUnavailable {
		o.network = c
	}
	return nil
}

// listMeta returns resource version and continue token of a list's ListMeta.
func listMeta(b []byte) (revision, more []byte, err error) {
	if revision, err = stringOf(b, 2); err != nil {
		return nil, nil, err
	}
	more, err = stringOf(b, 3)
	return revision, more, err
}

// frame is one frame of a watch.
type frame struct {
	kind []byte // ADDED, MODIFIED, DELETED, BOOKMARK, ERROR
	raw  []byte // the message of the object
}

func decodeFrame(b []byte) (f frame, err error) {
	var wrapped []byte
	for len(b) > 0 {
		part, rest, err := next(b)
		if err != nil {
			return frame{}, err
		}
		switch part.number {
		case 1:
			f.kind = part.bytes
		case 2:
			if wrapped, err = stringOf(part.bytes, 1); err != nil {
				return frame{}, err
			}
		}
		b = rest
	}
	f.raw, err = unwrap(wrapped)
	return f, err
}

// decodeStatus returns the error that a Status says; b is the message.
func decodeStatus(b []byte) (e apiError, err error) {
	err = each(b, func(f field) error {
		switch f.number {
		case 3:
			e.message = string(f.bytes)
		case 4:
			e.reason = string(f.bytes)
		case 5:
			return each(f.bytes, func(f field) error {
				if f.number != 4 {
					return nil
				}
				cause, err := stringOf(f.bytes, 1)
				e.takeCause(string(cause))
				return err
			})
		case 6:
			e.code = int(int32(f.number64))
		}
		return nil
	})
	return e, err
}
