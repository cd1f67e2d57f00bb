// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"

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
	kind   protowire.Type
	value  uint64 // with VarintType the number, with BytesType in a stream the length of the content, otherwise 0
	bytes  []byte // with BytesType the content, unless it is still in a stream; otherwise nil
}

// maxHeader is the length of the longest header, in bytes: a tag and a length.
const maxHeader = 2 * binary.MaxVarintLen64

// each calls on for each field of the message b. It returns ErrMalformed if b is not a message, and ends
// with an error of on.
func each(b []byte, on func(field) error) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return ErrMalformed
		}
		b = b[n:]

		f := field{number: int(number), kind: kind}
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

// last returns the content of the last field of the message b with that number, or nil if there is
// none.
func last(b []byte, number int) (content []byte, err error) {
	err = each(b, func(f field) error {
		if f.number == number {
			content = f.bytes
		}
		return nil
	})
	return content, err
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

// stream reads messages that are too large to be in memory as a whole, one field at a time.
type stream struct {
	*bufio.Reader
	read int64  // number of bytes that header, take and discard have read so far
	buf  []byte // memory for the result of take
}

func newStream(from io.Reader, bufferSize int) *stream {
	return &stream{Reader: bufio.NewReaderSize(from, bufferSize)}
}

// fields iterates over the fields of a message in the stream. length is the length of the message in bytes.
// A negative length means that the message ends with the stream. fields yields ErrMalformed if that is no
// message, or an error of the stream, and ends. The content of a field of BytesType stays in the stream: the caller
// must take or discard it before the next field.
func (s *stream) fields(length int64) iter.Seq2[field, error] {
	return func(yield func(field, error) bool) {
		for end := s.read + length; length < 0 || s.read < end; {
			f, err := s.header()
			switch {
			case errors.Is(err, io.EOF) && length < 0:
				return
			case err != nil:
				err = unexpected(err)
			case f.kind != protowire.VarintType && f.kind != protowire.BytesType:
				err = ErrMalformed
			case f.kind == protowire.BytesType && length >= 0 && f.value > uint64(max(0, end-s.read)):
				err = fmt.Errorf("%w: a field is longer than its message", ErrMalformed)
			}
			if err != nil {
				yield(field{}, err)
				return
			}
			if !yield(f, nil) {
				return
			}
		}
	}
}

// header reads the header of a field. It returns io.EOF if the stream ends before it.
func (s *stream) header() (field, error) {
	b, err := s.Peek(maxHeader)
	if len(b) == 0 {
		return field{}, err
	}

	number, kind, n := protowire.ConsumeTag(b)
	f := field{number: int(number), kind: kind}
	if n >= 0 && (kind == protowire.VarintType || kind == protowire.BytesType) {
		value, m := protowire.ConsumeVarint(b[n:])
		f.value = value
		n += m
		if m < 0 {
			n = m
		}
	}

	switch {
	case n >= 0:
		_, err = s.Discard(n)
		s.read += int64(n)
		return f, err
	case err != nil: // the header may be incomplete
		return field{}, unexpected(err)
	}
	return field{}, ErrMalformed
}

// take returns the next n bytes, which are valid until the next call of take. It returns an error if
// the stream has fewer bytes, or if n is more than MaxObject.
func (s *stream) take(n uint64) ([]byte, error) {
	if n > MaxObject {
		return nil, fmt.Errorf("%w: %d bytes in one object", ErrMalformed, n)
	}
	if uint64(cap(s.buf)) < n {
		s.buf = make([]byte, n+n/4)
	}
	b := s.buf[:n]
	m, err := io.ReadFull(s.Reader, b)
	s.read += int64(m)
	return b, unexpected(err)
}

// discard skips the next n bytes.
func (s *stream) discard(n uint64) error {
	m, err := io.CopyN(io.Discard, s.Reader, int64(min(n, 1<<62)))
	s.read += m
	return unexpected(err)
}

// unexpected converts io.EOF into io.ErrUnexpectedEOF: the stream has ended inside of a message.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
