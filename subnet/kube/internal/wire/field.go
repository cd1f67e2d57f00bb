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
	value  uint64 // with VarintType the number, with BytesType the length of the content, otherwise 0
	bytes  []byte // with BytesType the content, unless it is still in a stream; otherwise nil
}

// maxHeader is the length of the longest header, in bytes: a tag and a length.
const maxHeader = 2 * binary.MaxVarintLen64

// header decodes the header of the field at the beginning of b: the tag, and the number or length
// behind it if the field has one. n is the length of the header in bytes. n is negative if the header is
// malformed or b ends inside of it.
func header(b []byte) (f field, n int) {
	number, kind, n := protowire.ConsumeTag(b)
	f = field{number: int(number), kind: kind}
	if n < 0 || f.kind != protowire.VarintType && f.kind != protowire.BytesType {
		return f, n
	}
	value, m := protowire.ConsumeVarint(b[n:])
	if m < 0 {
		return field{}, m
	}
	f.value = value
	return f, n + m
}

// fields iterates over the fields of the message b. It yields ErrMalformed and ends if b is not a
// message.
func fields(b []byte) iter.Seq2[field, error] {
	return func(yield func(field, error) bool) {
		for rest := b; len(rest) > 0; {
			f, n := header(rest)
			switch {
			case n < 0:
			case f.kind == protowire.BytesType:
				f.bytes, n = content(rest, n, f.value)
			case f.kind != protowire.VarintType:
				n = skip(rest, n, f)
			}
			if n < 0 {
				yield(field{}, ErrMalformed)
				return
			}

			rest = rest[n:]
			if !yield(f, nil) {
				return
			}
		}
	}
}

// content returns the part of b that begins at the index start and has the given length, and the index
// behind that part. The index is -1 if b is too short.
func content(b []byte, start int, length uint64) (c []byte, end int) {
	if length > uint64(len(b)-start) {
		return nil, -1
	}
	end = start + int(length)
	return b[start:end:end], end
}

// skip returns the index behind the field f, whose content begins at start and which is of another
// kind than VarintType and BytesType. The index is negative if the field is malformed.
func skip(b []byte, start int, f field) (end int) {
	n := protowire.ConsumeFieldValue(protowire.Number(f.number), f.kind, b[start:])
	if n < 0 {
		return n
	}
	return start + n
}

// last returns the content of the last field of the message b with that number, or nil if there is
// none.
func last(b []byte, number int) (content []byte, err error) {
	for f, err := range fields(b) {
		if err != nil {
			return nil, err
		}
		if f.number == number {
			content = f.bytes
		}
	}
	return content, nil
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

// fields is like the function fields, but reads the message from the stream. length is the length of
// the message in bytes. A negative length means that the message ends with the stream. fields can also
// yield an error of the stream. The content of a field of BytesType stays in the stream: the caller
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

	f, n := header(b)
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
