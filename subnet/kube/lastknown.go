// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/flanneld/flanneld/subnet"
)

// lastKnown is the last known state of this node.
type lastKnown struct {
	own   subnet.Lease
	known subnet.LedgerState
}

// mark is what restore needs to recognize the store at the revision of the last known state:
// the uid of this host's Node, and the Node that had changed last. Nodes change all the time, so
// it is unlikely that another history of the store has that Node at that version.
type mark struct {
	uid string
	lastChange
}

// lastChange names the Node that changed last, of those that still exist. version is the revision
// of the store at which it changed.
type lastChange struct {
	name    string
	version int64
}

func (m mark) String() string { return fmt.Sprintf("%s %d %s", m.uid, m.version, m.name) }

// parseMark parses the text of a mark. It returns nil if the text is not one.
func parseMark(text string) *mark {
	var m mark
	parts := strings.Fields(text)
	if len(parts) != 3 {
		return nil
	}
	var err error
	if m.version, err = strconv.ParseInt(parts[1], 10, 64); err != nil || m.version < 1 {
		return nil
	}
	m.uid = parts[0]
	m.name = parts[2]
	return &m
}
