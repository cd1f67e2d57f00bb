// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"google.golang.org/protobuf/encoding/protowire"
)

// ErrMalformed means that bytes do not have the form that an API server sends.
var ErrMalformed = errors.New("malformed protobuf")

// MaxObject is the size of the largest object that is decoded, in bytes. etcd stores no object
// that is larger than a few MB.
const MaxObject = 16 << 20

// field is one field of a protobuf message.
type field struct {
	number int
	value  uint64 // with VarintType the number, otherwise 0
	bytes  []byte // with BytesType the content, otherwise nil
}

// each calls on for each field of the message b. It returns ErrMalformed if b is not a message, and ends
// with an error of on.
func each(b []byte, on func(field) error) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return ErrMalformed
		}
		b = b[n:]

		f := field{number: int(number)}
		switch kind {
		case protowire.VarintType:
			f.value, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(b)
		default:
			n = protowire.ConsumeFieldValue(number, kind, b)
		}
		if n < 0 {
			return ErrMalformed
		}
		b = b[n:]
		if err := on(f); err != nil {
			return err
		}
	}
	return nil
}

// last returns the last field of the message b with that number, or the zero field if there is none.
func last(b []byte, number int) (found field, err error) {
	err = each(b, func(f field) error {
		if f.number == number {
			found = f
		}
		return nil
	})
	return found, err
}

// pair returns the contents of the first two fields of the message b, which are never nil.
func pair(b []byte) (first, second []byte, err error) {
	first = []byte{}
	second = []byte{}
	err = each(b, func(f field) error {
		switch f.number {
		case 1:
			first = f.bytes
		case 2:
			second = f.bytes
		}
		return nil
	})
	return first, second, err
}

// eachIn calls on for each field of a message that is too large to be in memory as a whole, as it arrives.
// The message ends with from. on may leave a part of the content. eachIn returns ErrMalformed if that is no
// message, or an error of from or of on.
func eachIn(from *bufio.Reader, on func(number protowire.Number, content *io.LimitedReader) error) error {
	content := &io.LimitedReader{R: from}
	for {
		tag, err := binary.ReadUvarint(from)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		value, err := binary.ReadUvarint(from)
		if err != nil {
			return unexpected(err)
		}

		number, kind := protowire.DecodeTag(tag)
		switch {
		case kind == protowire.VarintType:
			continue
		case kind != protowire.BytesType || number < protowire.MinValidNumber || value > math.MaxInt64:
			return ErrMalformed
		}

		content.N = int64(value)
		if err := on(number, content); err != nil {
			return err
		}
		if _, err := io.Copy(io.Discard, content); err != nil {
			return err
		}
		if content.N > 0 {
			return io.ErrUnexpectedEOF
		}
	}
}

// buffer is memory for one message at a time.
type buffer []byte

// read returns the next n bytes of from, which are valid until the next call of read. It returns an error if
// from has fewer bytes, or if n is more than MaxObject.
func (b *buffer) read(from io.Reader, n int64) ([]byte, error) {
	if n > MaxObject {
		return nil, fmt.Errorf("%w: %d bytes in one object", ErrMalformed, n)
	}
	if int64(len(*b)) < n {
		*b = make([]byte, n+n/4)
	}
	_, err := io.ReadFull(from, (*b)[:n])
	return (*b)[:n], unexpected(err)
}

// unexpected converts io.EOF into io.ErrUnexpectedEOF: the stream has ended inside of a message.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
