// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// quiet is the pause after a call of wake. All changes during the pause together cause one more
// call at its end, because programs often rewrite rules in many steps.
const quiet = 200 * time.Millisecond

// listenPause is the pause after a failure to listen.
const listenPause = time.Second

// listenBuffer is the size of the socket's receive buffer in bytes. An overflow does no
// harm, because it counts as a change.
const listenBuffer = 1 << 20

// OwnPlaces returns the chains that Apply creates.
func OwnPlaces() []firewall.Place {
	var places []firewall.Place
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		for _, s := range specs {
			places = append(places, firewall.Place{Table: tableName(f), Chain: s.name})
		}
	}
	return places
}

// Watch calls wake when the rules of one of places may have changed, or the chain or table
// itself. It returns when ctx ends. It also calls wake each time that it begins to listen.
// If it cannot listen, it tries again.
func Watch(ctx context.Context, places []firewall.Place, wake func()) {
	failing := false
	for ctx.Err() == nil {
		err := listen(ctx, places, wake)
		if err != nil && ctx.Err() == nil && !failing {
			klog.FromContext(ctx).Error(err, "not listening to changes of nftables, trying again")
		}
		failing = err != nil
		_ = wait.For(ctx, listenPause) // the loop notices the end of ctx
	}
}

func listen(ctx context.Context, places []firewall.Place, wake func()) error {
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)})
	if err != nil {
		return fmt.Errorf("listen to nftables: %w", err)
	}
	if err := nl.SetReadBuffer(listenBuffer); err != nil {
		return oneline.Join(fmt.Errorf("set receive buffer: %w", err), nl.Close())
	}

	// Reading continues during the pauses. A program that has written thousands of rules would otherwise
	// cause a wake for every few of them, long after it has finished.
	changed := wait.NewSignal()
	failed := make(chan error, 1)
	var reading sync.WaitGroup
	reading.Go(func() { failed <- relay(nl, places, changed.Send) })
	defer func() {
		_ = nl.Close()
		reading.Wait()
	}()

	wake()
	for {
		select {
		case <-changed:
			wake()
			_ = wait.For(ctx, quiet) // the loop notices the end of ctx
		case err := <-failed:
			return fmt.Errorf("listen to nftables: %w", err)
		case <-ctx.Done():
			return nil
		}
	}
}

// relay calls changed after each message about one of places, until it cannot read.
func relay(nl *netlink.Conn, places []firewall.Place, changed func()) error {
	for {
		messages, err := nl.Receive()
		lost := errors.Is(err, unix.ENOBUFS)
		if err != nil && !lost {
			return err
		}
		if lost || slices.ContainsFunc(messages, func(m netlink.Message) bool { return concerns(m, places) }) {
			changed()
		}
	}
}

func concerns(m netlink.Message, places []firewall.Place) bool {
	var table, chain uint16 // attributes
	switch uint16(m.Header.Type) & 0xff {
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		table = unix.NFTA_TABLE_NAME
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		table = unix.NFTA_CHAIN_TABLE
		chain = unix.NFTA_CHAIN_NAME
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		table = unix.NFTA_RULE_TABLE
		chain = unix.NFTA_RULE_CHAIN
	default:
		return false
	}
	if uint16(m.Header.Type)>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < 4 {
		return false
	}

	a, err := parse(m.Data[4:])
	is := firewall.Place{Table: a.text(table), Chain: a.text(chain)}
	return err == nil && slices.ContainsFunc(places, func(p firewall.Place) bool {
		return p.Table == is.Table && (chain == 0 || p.Chain == is.Chain)
	})
}
