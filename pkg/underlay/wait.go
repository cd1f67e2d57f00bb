package underlay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// recheck is how often Wait looks again without having been told of a change,
// should a notification get lost.
const recheck = time.Second

// Wait chooses the external interface as Select does, in the network
// namespace of the calling thread. While there is none it waits for links,
// addresses and routes to change, for at most timeout; zero or less means not
// at all. A link-local address that would be taken for want of a better one
// is taken only at the end of that time, because at boot it is the first to
// be there.
func Wait(ctx context.Context, o Options, timeout time.Duration) (Interface, error) {
	if err := o.check(); err != nil {
		return Interface{}, err
	}
	if timeout <= 0 {
		c, err := look(ctx, o)
		return c.Interface, err
	}
	return wait(ctx, o, timeout, recheck)
}

func wait(ctx context.Context, o Options, timeout, recheck time.Duration) (Interface, error) {
	changed, stop, err := subscribe(o)
	if err != nil {
		return Interface{}, err
	}
	defer stop()
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	tick := time.NewTicker(recheck)
	defer tick.Stop()

	for first := true; ; first = false {
		c, err := look(ctx, o)
		if err == nil && !c.lastResort {
			return c.Interface, nil
		}
		if first {
			reason := err
			if err == nil {
				reason = fmt.Errorf("%s has only a link-local address", c.Name)
			}
			klog.FromContext(ctx).Info("waiting for an external interface", "timeout", timeout, "reason", reason)
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-deadline.C:
			if err != nil {
				err = fmt.Errorf("waited %s: %w", timeout, err)
			}
			return c.Interface, err
		case <-ctx.Done():
			return Interface{}, fmt.Errorf("wait for an external interface: %w", context.Cause(ctx))
		}
	}
}

func look(ctx context.Context, o Options) (choice, error) {
	f, err := Gather(ctx, o)
	if err != nil {
		return choice{}, fmt.Errorf("choose external interface: %w", err)
	}
	return choose(f, o)
}

// subscribe returns a channel that is readable after a change of what Gather
// reads. One socket serves all groups and is open on return, so nothing is
// missed from then on. stop closes it and returns when the reader is gone.
func subscribe(o Options) (changed <-chan struct{}, stop func(), err error) {
	groups := []uint{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR}
	if !o.asksForInterface() || o.CanReach != "" {
		groups = append(groups, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	}
	s, err := nl.Subscribe(unix.NETLINK_ROUTE, groups...)
	if err != nil {
		return nil, nil, fmt.Errorf("subscribe to link, address and route changes: %w", err)
	}
	wake := make(chan struct{}, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		relay(wake, func() error { _, _, err := s.Receive(); return err })
	}()
	return wake, func() { s.Close(); <-done }, nil
}

// relay makes wake readable after every message that receive waits for. An
// overflow means changes too; any other error ends it (that is how a closed
// socket shows).
func relay(wake chan<- struct{}, receive func() error) {
	for {
		if err := receive(); err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) {
			return
		}
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}
