// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"slices"
	"strconv"
)

const (
	// NetworkUnavailable is the type of the condition that Node.Network has.
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
	Label       []byte   // value of the label that WithLabel names
	PodCIDR     []byte
	PodCIDRs    [2][]byte // the first two podCIDRs
	NumPodCIDRs int       // the number of podCIDRs of the Node
	InternalIPs [][]byte  // in the order of the Node
	Network     Condition // the condition of type NetworkUnavailable
}

// Condition is a condition of a Node. Status is nil if the Node does not have the condition.
type Condition struct{ Status, Reason, Message []byte }

// Decoder decodes Nodes. It is safe for concurrent use.
type Decoder struct {
	annotations []string
	label       string
}

// NewDecoder returns a decoder of Nodes that keeps the annotations with these keys.
func NewDecoder(annotations []string) *Decoder {
	return &Decoder{annotations: slices.Clone(annotations)}
}

// WithLabel returns a decoder that also keeps the label with this key.
func (d *Decoder) WithLabel(key string) *Decoder { return &Decoder{d.annotations, key} }

func (d *Decoder) newNode() *Node { return &Node{Annotations: make([][]byte, len(d.annotations))} }

// reset makes n an empty Node. It keeps the memory of n for the next one.
func (n *Node) reset() {
	clear(n.Annotations)
	*n = Node{Annotations: n.Annotations, InternalIPs: n.InternalIPs[:0]}
}

// decode decodes the message of a Node or of the PartialObjectMetadata of a Node into n.
func (d *Decoder) decode(b []byte, n *Node) error {
	n.reset()
	for f, err := range fields(b) {
		if err != nil {
			return err
		}

		switch f.number {
		case 1:
			err = d.metadata(f.bytes, n)
		case 2:
			err = n.spec(f.bytes)
		case 3:
			err = n.status(f.bytes)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// metadata decodes an ObjectMeta.
func (d *Decoder) metadata(b []byte, n *Node) error {
	for f, err := range fields(b) {
		if err != nil {
			return err
		}

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
		if err != nil {
			return err
		}
	}
	return nil
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
func seconds(b []byte) (s int64, err error) {
	for f, err := range fields(b) {
		if err != nil {
			return 0, err
		}
		if f.number == 1 {
			s = int64(f.value)
		}
	}
	return max(s, 0), nil
}

func (d *Decoder) annotation(b []byte, n *Node) error {
	key, value, err := entry(b)
	if err != nil {
		return err
	}
	for i, known := range d.annotations {
		if string(key) == known {
			n.Annotations[i] = value
		}
	}
	return nil
}

func (d *Decoder) keepLabel(b []byte, n *Node) error {
	key, value, err := entry(b)
	if err != nil {
		return err
	}
	if string(key) == HostnameLabel {
		n.Hostname = value
	}
	if string(key) == d.label {
		n.Label = value
	}
	return nil
}

// entry decodes an entry of a map of texts. value is never nil.
func entry(b []byte) (key, value []byte, err error) {
	value = []byte{}
	for f, err := range fields(b) {
		if err != nil {
			return nil, nil, err
		}
		switch f.number {
		case 1:
			key = f.bytes
		case 2:
			value = f.bytes
		}
	}
	return key, value, nil
}

// spec decodes a NodeSpec.
func (n *Node) spec(b []byte) error {
	for f, err := range fields(b) {
		if err != nil {
			return err
		}
		switch f.number {
		case 1:
			n.PodCIDR = f.bytes
		case 7:
			if n.NumPodCIDRs < len(n.PodCIDRs) {
				n.PodCIDRs[n.NumPodCIDRs] = f.bytes
			}
			n.NumPodCIDRs++
		}
	}
	return nil
}

// status decodes a NodeStatus.
func (n *Node) status(b []byte) error {
	for f, err := range fields(b) {
		if err != nil {
			return err
		}
		switch f.number {
		case 4:
			err = n.condition(f.bytes)
		case 5:
			err = n.address(f.bytes)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// address decodes a NodeAddress into n if its type is InternalIP.
func (n *Node) address(b []byte) error {
	var kind, text []byte
	for f, err := range fields(b) {
		if err != nil {
			return err
		}
		switch f.number {
		case 1:
			kind = f.bytes
		case 2:
			text = f.bytes
		}
	}
	if string(kind) == "InternalIP" {
		n.InternalIPs = append(n.InternalIPs, text)
	}
	return nil
}

// condition decodes a NodeCondition into n if its type is NetworkUnavailable.
func (n *Node) condition(b []byte) error {
	var kind []byte
	var c Condition
	for f, err := range fields(b) {
		if err != nil {
			return err
		}

		switch f.number {
		case 1:
			kind = f.bytes
		case 2:
			c.Status = f.bytes
		case 5:
			c.Reason = f.bytes
		case 6:
			c.Message = f.bytes
		}
	}
	if string(kind) == NetworkUnavailable {
		n.Network = c
	}
	return nil
}

// named returns an error if n has no name. Every Node in a list or in an event must have a name,
// except the Node of a bookmark.
func (n *Node) named() error {
	if len(n.Name) == 0 {
		return fmt.Errorf("%w: an object without a name", ErrMalformed)
	}
	return nil
}
