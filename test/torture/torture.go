// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

const (
	// leaseTTL is so long that no lease expires during a fault, and so short that each host renews
	// its lease several times in a run.
	leaseTTL = 2 * time.Minute
	// longest is the longest time for which a fault lasts before it is ended.
	longest = 20 * time.Second
	// recovery is the time after the last fault within which every host must be ready and have all
	// routes.
	recovery = 60 * time.Second
	// flowRate is the number of packets per second of each flow. No fault affects packets between
	// pods, so none may be lost.
	flowRate = 20
	members  = 3
)

// torture is one run: a lab with a store, hosts that run flanneld, and flows between their pods.
type torture struct {
	opts     options
	out      io.Writer
	rnd      *rand.Rand
	lab      *lab.Lab
	hosts    []*lab.Host // hosts that run flanneld
	store    *store
	recorder *recorder
	programs []string // paths of the programs of etcd, from the first release to the last
	flows    map[string]*lab.Flow
}

func newTorture(ctx context.Context, o options, out io.Writer) (t *torture, err error) {
	t = &torture{opts: o, out: out, rnd: rand.New(rand.NewPCG(o.seed, 0)), flows: map[string]*lab.Flow{}}
	for path := range strings.SplitSeq(o.etcd, ",") {
		if path, err = filepath.Abs(path); err != nil {
			return nil, err
		}
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return nil, err
		}
		t.programs = append(t.programs, path)
	}
	if t.opts.flanneld, err = filepath.Abs(o.flanneld); err != nil {
		return nil, err
	}
	if t.lab, err = lab.New(ctx, lab.Config{Hosts: o.hosts + members, Flanneld: t.opts.flanneld, Etcd: lab.EtcdOptions{Disabled: true}}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			t.close()
		}
	}()
	t.hosts = t.lab.Hosts()[:o.hosts]
	if t.store, err = newStore(o.dir, t.programs[0], t.lab.Hosts()[o.hosts:]); err != nil {
		return nil, err
	}
	starting, cancel := context.WithTimeoutCause(ctx, 2*recovery, errors.New("the start takes too long"))
	defer cancel()
	network, err := lab.NetworkConfig([]prefix.Family{prefix.IPv4}, []byte(`{"Type":"vxlan"}`))
	if err != nil {
		return nil, err
	}
	if err = t.store.begin(starting, string(network)); err != nil {
		return nil, err
	}
	var g errgroup.Group
	for _, h := range t.hosts {
		g.Go(func() error { return t.startDaemon(starting, h) })
	}
	if err = g.Wait(); err != nil {
		return nil, err
	}
	for _, h := range t.hosts {
		if _, err = h.AddPod(starting, ""); err != nil {
			return nil, err
		}
	}
	if err = until(starting, "all hosts to be right", t.right); err != nil {
		return nil, err
	}
	return t, t.startFlows(ctx)
}

// startFlows starts a flow from the pod of each host to the pod of the next one.
func (t *torture) startFlows(ctx context.Context) error {
	for i, h := range t.hosts {
		from, to := h.Pods()[0], t.hosts[(i+1)%len(t.hosts)].Pods()[0]
		f, err := from.StartFlow(ctx, to, prefix.IPv4, flowRate)
		if err != nil {
			return err
		}
		t.flows[from.Name()+" to "+to.Name()] = f
	}
	return nil
}

// startDaemon starts flanneld and waits until it is ready. If flanneld was ready on this host
// before, it becomes ready even while the store is unavailable.
func (t *torture) startDaemon(ctx context.Context, h *lab.Host) error {
	args, env := t.store.flags()
	args = append(args, "--subnet-lease-ttl="+leaseTTL.String(), "--subnet-lease-renew-margin=1")
	d, err := h.StartFlanneld(ctx, lab.FlanneldOptions{Args: args, Env: env})
	if err != nil {
		return err
	}
	return d.Ready(ctx)
}

// restart stops flanneld on h if it runs, calls between unless that is nil, and starts flanneld
// again.
func (t *torture) restart(ctx context.Context, h *lab.Host, between func() error) error {
	if h.Daemon().Ended() == nil {
		if code, err := h.Daemon().Stop(ctx); err != nil || code != 0 {
			return fmt.Errorf("stop flanneld on %s: code %d: %w", h.Name(), code, err)
		}
	}
	if between != nil {
		if err := between(); err != nil {
			return err
		}
	}
	return t.startDaemon(ctx, h)
}

// run causes faults for the duration of the run, and returns a line for each broken promise. It
// returns an error if the run itself fails.
func (t *torture) run(ctx context.Context) (found []string, err error) {
	recording, stop := context.WithCancel(ctx)
	defer stop()
	t.recorder = newRecorder(t.hosts)
	for _, h := range t.hosts {
		if err := t.recorder.follow(recording, h); err != nil {
			return nil, err
		}
	}
	for _, m := range t.store.members {
		c, err := t.store.client(recording, m)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		t.recorder.watch(recording, c)
	}
	if err := t.causeFaults(ctx); err != nil {
		return nil, err
	}
	begin := time.Now()
	recovering, cancel := context.WithTimeoutCause(ctx, recovery, fmt.Errorf("not within %s", recovery))
	defer cancel()
	if err := until(recovering, "all hosts to be right after the last fault", t.right); err != nil {
		found = append(found, err.Error())
	} else {
		fmt.Fprintf(t.out, "  everything was right %s after the last fault\n", time.Since(begin).Round(time.Millisecond))
	}
	for name, f := range t.flows {
		// Only lost packets count. A gap means nothing, because the machine may be too busy to
		// send for seconds.
		if s := f.Stop(); len(s.Lost) > 0 {
			found = append(found, fmt.Sprintf("%d of %d packets from %s were lost, the first one %s after the start",
				len(s.Lost), s.Sent, name, time.Duration(s.Lost[0])*time.Second/flowRate))
		}
	}
	stop()
	h := t.recorder.finish(t.hosts)
	fmt.Fprintf(t.out, "  %d faults: %s\n", len(h.faults), h.byName())
	return append(found, h.violations()...), nil
}

// causeFaults causes one fault after the other, for the duration of the run. The upgrades of the
// members are spread evenly between them.
func (t *torture) causeFaults(ctx context.Context) error {
	end := time.Now().Add(t.opts.duration)
	upgrades := t.upgrades()
	all := kinds()
	var queue []kind // shuffled, so that each kind of fault comes once before one comes again
	for time.Now().Before(end) && ctx.Err() == nil {
		if len(queue) == 0 {
			queue = slices.Clone(all)
			t.rnd.Shuffle(len(queue), func(i, j int) { queue[i], queue[j] = queue[j], queue[i] })
		}
		k := queue[0]
		queue = queue[1:]
		if err := t.cause(ctx, k); err != nil {
			return err
		}
		if len(upgrades) > 0 && time.Until(end) < t.opts.duration*time.Duration(len(upgrades))/time.Duration(len(upgrades)+1) {
			if err := t.cause(ctx, kind{"member upgraded", upgrades[0]}); err != nil {
				return err
			}
			upgrades = upgrades[1:]
		}
	}
	return context.Cause(ctx)
}

// upgrades returns the steps of an upgrade of the store, as faults that are over at once: each
// upgrades one member to the next release.
func (t *torture) upgrades() (steps []func(context.Context, *torture) (func(context.Context) error, error)) {
	for _, program := range t.programs[1:] {
		for _, m := range t.store.members {
			steps = append(steps, func(context.Context, *torture) (func(context.Context) error, error) {
				return nil, m.upgrade(program)
			})
		}
	}
	return steps
}

// cause causes one fault, ends it after a random time, and records it. Then it waits for less than
// five seconds, so that the next fault may begin before the cluster has recovered.
func (t *torture) cause(ctx context.Context, k kind) error {
	f := fault{name: k.name, from: time.Now()}
	ctx, cancel := context.WithTimeoutCause(ctx, longest+2*recovery, fmt.Errorf("not within %s", longest+2*recovery))
	defer cancel()
	end, err := k.begin(ctx, t)
	if err == nil && end != nil {
		_ = wait.For(ctx, time.Duration(t.rnd.Int64N(int64(longest))))
	}
	if end != nil {
		err = errors.Join(err, end(ctx))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", k.name, err)
	}
	f.to = time.Now()
	t.recorder.change(func(h *history) { h.faults = append(h.faults, f) })
	fmt.Fprintf(t.out, "  %8s %-28s %s\n", t.recorder.history.since(f.from), f.name, f.to.Sub(f.from).Round(time.Millisecond))
	_ = wait.For(ctx, time.Duration(t.rnd.Int64N(int64(5*time.Second))))
	return nil
}

// right returns nil if every host is ready and has a route to the subnet of every other host.
// Otherwise it returns an error that names the first host for which this is not true.
func (t *torture) right(ctx context.Context) error {
	subnets := map[*lab.Host]string{}
	for _, h := range t.hosts {
		if _, reason, err := h.Daemon().Get(ctx, "/readyz"); err != nil {
			return fmt.Errorf("%s is not ready: %w: %s", h.Name(), err, strings.TrimSpace(reason))
		}
		subnet, err := servedSubnet(h)
		if err != nil {
			return fmt.Errorf("%s: %w", h.Name(), err)
		}
		subnets[h] = subnet.String()
	}
	for _, h := range t.hosts {
		routes, err := h.Routes(ctx)
		if err != nil {
			return err
		}
		for _, o := range t.hosts {
			has := slices.ContainsFunc(routes, func(r lab.Route) bool { return r.Dst.String() == subnets[o] })
			if o != h && !has {
				return fmt.Errorf("%s has no route to %s of %s", h.Name(), subnets[o], o.Name())
			}
		}
	}
	return nil
}

func (t *torture) close() {
	if t.store != nil {
		t.store.close()
	}
	t.lab.Close()
}
