// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Reader lets several networks share one subscription to changes, and share reads of the facts about
// the host. Their options must select the interface in the same way. A Reader must be used in one
// network namespace only. The zero Reader is usable.
type Reader struct {
	facts   sync.Map // of *wait.Batch[gathered], by what is read
	changes wait.Shared
}

// gathered is the result of a read of the facts.
type gathered struct {
	facts Facts
	err   error
	cost  time.Duration // CPU time
}

// subscribe returns a channel that receives after a change of anything that gather reads. stop ends
// the use of the channel.
func (o Options) subscribe() (changed <-chan struct{}, stop func(), err error) {
	changes := &cmp.Or(o.Reader, &Reader{}).changes
	own, _, err := changes.Join(func(wake func()) (stop func(), err error) { return subscribe(o, wake) })
	if err != nil {
		return nil, nil, err
	}
	return own, func() { changes.Leave(own) }, nil
}

// subscribe calls wake after each change of anything that gather reads, from its return on. stop
// returns after the last call of wake.
func subscribe(o Options, wake func()) (stop func(), err error) {
	groups := []uint{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR}
	if !o.asksForInterface() || o.CanReach != "" {
		groups = append(groups, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	}

	s, err := nl.Subscribe(unix.NETLINK_ROUTE, groups...)
	if err != nil {
		return nil, fmt.Errorf("subscribe to link, address and route changes: %w", err)
	}
	if o.CanReach == "" { // default routes are sufficient
		const lengthOfPrefix = 1
		if err := FilterRoutes(s.GetFd(), lengthOfPrefix, true, 0); err != nil {
			s.Close()
			return nil, fmt.Errorf("subscribe to link, address and route changes: %w", err)
		}
	}

	done := make(chan struct{})
	go func() {
		defer close(done)
		relay(wake, func() error { _, _, err := s.Receive(); return err })
	}()
	return func() { s.Close(); <-done }, nil
}

// FilterRoutes makes the kernel drop announcements of routes on a socket of rtnetlink, of which a start of flanneld causes
// thousands. It keeps those in which the byte of struct rtmsg at offset is value, or if is is not set, those in which it is
// not.
func FilterRoutes(fd int, offset uint32, is bool, value uint8) error {
	const typeOfMessage = 4
	const load, equal, accept = unix.BPF_LD | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	compare := unix.SockFilter{Code: equal, Jt: 1, K: uint32(value)}
	if is {
		compare.Jt = 0
		compare.Jf = 1
	}
	program := []unix.SockFilter{
		{Code: load | unix.BPF_H, K: typeOfMessage},
		{Code: equal, Jt: 1, K: asLoaded(unix.RTM_NEWROUTE)},
		{Code: equal, Jf: 2, K: asLoaded(unix.RTM_DELROUTE)},
		{Code: load | unix.BPF_B, K: unix.SizeofNlMsghdr + offset},
		compare,
		{Code: accept, K: math.MaxUint32},
		{Code: accept, K: 0},
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
}

// asLoaded converts a message type: filters read all numbers as big-endian.
func asLoaded(typ uint16) uint32 {
	return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, typ)))
}

// relay calls wake after each message, until the socket is closed.
func relay(wake func(), receive func() error) {
	for {
		// An overflow may have hidden a change.
		if err := receive(); err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) {
			return
		}
		wake()
	}
}
