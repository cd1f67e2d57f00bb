// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"

	"google.golang.org/protobuf/encoding/protowire"
)

// ListMeta is the metadata of a list.
type ListMeta struct {
	Revision  int64  // the revision of the store at which the list was read
	Continue  string // token for the request of the next page; empty if this is the last page
	Remaining int    // number of objects on later pages; 0 if the server does not say
}

// List decodes a list of Nodes while it arrives, and iterates over the Nodes. It keeps one Node in
// memory, which is valid until the next one. meta is complete when the loop has ended without a
// break and without an error. List yields one error at most, and ends with it: the error wraps
// ErrMalformed, or the reader from has failed or ended too early.
func (d *Decoder) List(from io.Reader, meta *ListMeta) iter.Seq2[*Node, error] {
	return func(yield func(*Node, error) bool) {
		*meta = ListMeta{}
		ended, err := d.list(newStream(from, 64<<10), meta, func(n *Node) bool { return yield(n, nil) })
		if err == nil && !ended && meta.Revision == 0 {
			err = fmt.Errorf("%w: a list without a resource version", ErrMalformed)
		}
		if err != nil {
			yield(nil, err)
		}
	}
}

// list calls yield with the Nodes of the list in s. ended means that yield has returned false.
func (d *Decoder) list(s *stream, meta *ListMeta, yield func(*Node) bool) (ended bool, err error) {
	if head, err := s.take(uint64(len(magic))); err != nil {
		return false, fmt.Errorf("list: %w", err)
	} else if string(head) != magic {
		return false, fmt.Errorf("list: %w", ErrMalformed)
	}
	n := d.newNode()
	for f, err := range s.fields(-1) {
		switch {
		case err != nil:
			return false, err
		case f.kind != protowire.BytesType:
		case f.number != numberOfRaw:
			if err := s.discard(f.value); err != nil {
				return false, err
			}
		default:
			if ended, err = d.items(s, f.value, n, meta, yield); ended || err != nil {
				return ended, err
			}
		}
	}
	return false, nil
}

// items decodes the message of a NodeList, which is the next length bytes of s, and calls yield
// with its Nodes. ended means that yield has returned false.
func (d *Decoder) items(s *stream, length uint64, n *Node, meta *ListMeta, yield func(*Node) bool) (ended bool, err error) {
	if length > 1<<62 {
		return false, ErrMalformed
	}

	for f, err := range s.fields(int64(length)) {
		if err != nil {
			return false, err
		}
		if f.kind != protowire.BytesType {
			continue
		}

		b, err := s.take(f.value)
		if err != nil {
			return false, err
		}

		switch f.number {
		case 1:
			err = meta.decode(b)
		case 2:
			if err = d.decode(b, n); err == nil {
				err = n.named()
			}
			if err == nil && !yield(n) {
				return true, nil
			}
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}

func (m *ListMeta) decode(b []byte) error {
	for f, err := range fields(b) {
		if err != nil {
			return err
		}
		switch f.number {
		case 2:
			m.Revision = revision(f.bytes)
		case 3:
			m.Continue = string(f.bytes)
		case 4:
			m.Remaining = int(f.value)
		}
	}
	return nil
}

// The types of events.
const (
	Added    = "ADDED"
	Modified = "MODIFIED"
	Deleted  = "DELETED"
	// Bookmark is the type of an event that says how far the watch has come. Its Node has only a
	// Revision.
	Bookmark = "BOOKMARK"
	// failed is the type of an event with a Status instead of a Node.
	failed = "ERROR"
)

// Event is one event of a watch.
type Event struct {
	Type string // one of Added, Modified, Deleted and Bookmark
	Node *Node  // valid until the next event
}

// Events decodes the events of a watch while they arrive, and iterates over them. It yields one
// error at most, and ends with it: the error wraps ErrMalformed, is a *StatusError that the server
// has sent, or the reader from has failed. If the loop ends without an error, the watch has ended
// between two events.
func (d *Decoder) Events(from io.Reader) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		s := newStream(from, 32<<10)
		n := d.newNode()
		var length [4]byte // the length of the next event, which is in the stream before it
		for {
			if _, err := io.ReadFull(s.Reader, length[:]); errors.Is(err, io.EOF) {
				return
			} else if err != nil {
				yield(Event{}, err)
				return
			}
			b, err := s.take(uint64(binary.BigEndian.Uint32(length[:])))
			var e Event
			if err == nil {
				e, err = d.event(b, n)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// event decodes a WatchEvent, and its Node into n.
func (d *Decoder) event(b []byte, n *Node) (Event, error) {
	var kind, object []byte
	for f, err := range fields(b) {
		if err != nil {
			return Event{}, err
		}
		switch f.number {
		case 1:
			kind = f.bytes
		case 2:
			if object, err = last(f.bytes, 1); err != nil { // of a RawExtension
				return Event{}, err
			}
		}
	}

	raw, err := unwrap(object)
	if err != nil {
		return Event{}, err
	}
	e := Event{Node: n}
	switch string(kind) { // without a copy of kind
	case Added:
		e.Type = Added
	case Modified:
		e.Type = Modified
	case Deleted:
		e.Type = Deleted
	case Bookmark:
		return Event{Bookmark, n}, d.decode(raw, n)
	case failed:
		status, err := decodeStatus(raw)
		if err != nil {
			return Event{}, err
		}
		return Event{}, status
	default:
		return Event{}, fmt.Errorf("%w: a watch event of type %.64q", ErrMalformed, kind)
	}
	if err := d.decode(raw, n); err != nil {
		return Event{}, err
	}
	return e, n.named()
}
