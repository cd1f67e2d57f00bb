// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"slices"
	"strconv"
)

const (
	// NetworkUnavailable is the type of the condition of which Node.Network is the status.
	NetworkUnavailable = "NetworkUnavailable"
	// HostnameLabel is the key of the label that Node.Hostname has.
	HostnameLabel = "kubernetes.io/hostname"
)

// Node contains the fields of a Node that flanneld needs. Fields are empty if the Node does not
// have them, or if the server was asked for metadata only. All bytes are parts of the buffer that
// was decoded. They are valid until the next Node is decoded.
type Node struct {
	Name, UID   []byte
	Revision    int64    // its resource version: the revision of the store at which it changed last; 0 if that is no number
	Created     int64    // in seconds since 1970, never negative
	Annotations [][]byte // the values, indexed like the argument of NewDecoder; nil if the Node does not have the annotation
	Hostname    []byte   // value of the label HostnameLabel
	Label       []byte   // value of the other label of NewDecoder
	PodCIDR     []byte
	PodCIDRs    [][]byte
	InternalIPs [][]byte // in the order of the Node
	Network     []byte   // status of the condition of type NetworkUnavailable; nil if the Node does not have it
}

// Decoder decodes Nodes. It is safe for concurrent use.
type Decoder struct {
	annotations []string
	label       string
}

// NewDecoder returns a decoder of Nodes that keeps the annotations with these keys, and one more label.
func NewDecoder(annotations []string, label string) *Decoder {
	return &Decoder{slices.Clone(annotations), label}
}

func (d *Decoder) newNode() *Node { return &Node{Annotations: make([][]byte, len(d.annotations))} }

// reset makes n an empty Node. It keeps the memory of n for the next one.
func (n *Node) reset() {
	clear(n.Annotations)
	*n = Node{Annotations: n.Annotations, PodCIDRs: n.PodCIDRs[:0], InternalIPs: n.InternalIPs[:0]}
}

// decode decodes the message of a Node or of the PartialObjectMetadata of a Node into n.
func (d *Decoder) decode(b []byte, n *Node) error {
	n.reset()
	return each(b, func(f field) error {
		switch f.number {
		case 1:
			return d.metadata(f.bytes, n)
		case 2:
			return n.spec(f.bytes)
		case 3:
			return n.status(f.bytes)
		}
		return nil
	})
}

// metadata decodes an ObjectMeta.
func (d *Decoder) metadata(b []byte, n *Node) error {
	return each(b, func(f field) (err error) {
		switch f.number {
		case 1:
			n.Name = f.bytes
		case 5:
			n.UID = f.bytes
		case 6:
			n.Revision = revision(f.bytes)
		case 8:
			n.Created, err = seconds(f.bytes)
		case 11:
			err = d.keepLabel(f.bytes, n)
		case 12:
			err = d.annotation(f.bytes, n)
		}
		return err
	})
}

// revision decodes a resource version. It returns 0, which is older than any revision, if b is no
// number.
func revision(b []byte) int64 {
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// seconds decodes a Time to seconds since 1970. A time before that becomes 0.
func seconds(b []byte) (int64, error) {
	s, err := last(b, 1)
	return max(int64(s.value), 0), err
}

func (d *Decoder) annotation(b []byte, n *Node) error {
	key, value, err := pair(b)
	for i, known := range d.annotations {
		if string(key) == known {
			n.Annotations[i] = value
		}
	}
	return err
}

func (d *Decoder) keepLabel(b []byte, n *Node) error {
	key, value, err := pair(b)
	if string(key) == HostnameLabel {
		n.Hostname = value
	}
	if string(key) == d.label {
		n.Label = value
	}
	return err
}

// spec decodes a NodeSpec.
func (n *Node) spec(b []byte) error {
	return each(b, func(f field) error {
		switch f.number {
		case 1:
			n.PodCIDR = f.bytes
		case 7:
			n.PodCIDRs = append(n.PodCIDRs, f.bytes)
		}
		return nil
	})
}

// status decodes a NodeStatus.
func (n *Node) status(b []byte) error {
	return each(b, func(f field) error {
		if f.number != 4 && f.number != 5 {
			return nil
		}

		kind, value, err := pair(f.bytes)
		switch {
		case f.number == 4 && string(kind) == NetworkUnavailable: // a NodeCondition: its status
			n.Network = value
		case f.number == 5 && string(kind) == "InternalIP": // a NodeAddress
			n.InternalIPs = append(n.InternalIPs, value)
		}
		return err
	})
}

// named returns an error if n has no name. Every Node in a list or in an event must have a name,
// except the Node of a bookmark.
func (n *Node) named() error {
	if len(n.Name) == 0 {
		return fmt.Errorf("%w: an object without a name", ErrMalformed)
	}
	return nil
}
