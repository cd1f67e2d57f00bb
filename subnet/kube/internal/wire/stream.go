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

// ListMeta is the metadata of a list.
type ListMeta struct {
	Revision  int64  // the revision of the store at which the list was read
	Continue  string // token for the request of the next page; empty if this is the last page
	Remaining int    // number of objects on later pages; 0 if the server does not say
}

// List decodes a list of Nodes while it arrives, and calls on for each Node. It keeps one Node in memory,
// which is valid until on returns. An error wraps ErrMalformed, or the reader from has failed or ended too
// early.
func (d *Decoder) List(from io.Reader, on func(*Node)) (ListMeta, error) {
	var meta ListMeta
	unknown := bufio.NewReader(from)
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(unknown, head); err != nil {
		return meta, fmt.Errorf("list: %w", unexpected(err))
	}
	if string(head) != magic {
		return meta, fmt.Errorf("list: %w", ErrMalformed)
	}

	var buf buffer
	n := d.newNode()
	item := func(number protowire.Number, content *io.LimitedReader) error {
		b, err := buf.read(content, content.N)
		switch {
		case err != nil:
			return err
		case number == 1:
			return meta.decode(b)
		case number != 2:
			return nil
		}

		if err := d.decode(b, n); err != nil {
			return err
		}
		if err := n.named(); err != nil {
			return err
		}
		on(n)
		return nil
	}

	err := eachIn(unknown, func(number protowire.Number, content *io.LimitedReader) error {
		if number != numberOfRaw {
			return nil
		}
		return eachIn(bufio.NewReaderSize(content, 64<<10), item)
	})
	if err == nil && meta.Revision == 0 {
		err = fmt.Errorf("%w: a list without a resource version", ErrMalformed)
	}
	return meta, err
}

func (m *ListMeta) decode(b []byte) error {
	return each(b, func(f field) error {
		switch f.number {
		case 2:
			m.Revision = revision(f.bytes)
		case 3:
			m.Continue = string(f.bytes)
		case 4:
			m.Remaining = int(f.value)
		}
		return nil
	})
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

// eventTypes has the types of events with a Node. A lookup does not copy the bytes of a type.
var eventTypes = map[string]string{Added: Added, Modified: Modified, Deleted: Deleted, Bookmark: Bookmark}

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
		from := bufio.NewReaderSize(from, 32<<10)
		n := d.newNode()
		var buf buffer
		var length [4]byte // the length of the next event, which is in the stream before it
		for {
			if _, err := io.ReadFull(from, length[:]); errors.Is(err, io.EOF) {
				return
			} else if err != nil {
				yield(Event{}, err)
				return
			}
			b, err := buf.read(from, int64(binary.BigEndian.Uint32(length[:])))
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
	kind, extension, err := pair(b)
	if err != nil {
		return Event{}, err
	}
	object, err := last(extension, 1) // of a RawExtension
	if err != nil {
		return Event{}, err
	}
	raw, err := unwrap(object.bytes)
	if err != nil {
		return Event{}, err
	}
	e := Event{Type: eventTypes[string(kind)], Node: n}
	switch {
	case string(kind) == failed:
		status, err := decodeStatus(raw)
		if err != nil {
			return Event{}, err
		}
		return Event{}, status
	case e.Type == "":
		return Event{}, fmt.Errorf("%w: a watch event of type %.64q", ErrMalformed, kind)
	}
	if err := d.decode(raw, n); err != nil || e.Type == Bookmark {
		return e, err
	}
	return e, n.named()
}
