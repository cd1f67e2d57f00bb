package extension

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"flanneld/backend"
	"flanneld/pkg/oneline"
	"flanneld/subnet"
)

// Commands run one after the other, as scripts expect. One that takes longer
// than patience goes on beside those that follow, until CommandTimeout.
const patience = time.Second

// passTime is how long one Sync starts commands. What is left is for the next.
const passTime = time.Minute

// The pause before a failed command runs again doubles from minPause to
// maxPause.
const (
	minPause = time.Second
	maxPause = 5 * time.Minute
)

// removeTries is how often SubnetRemoveCommand is run: mostly it fails because
// there is nothing left to remove.
const removeTries = 5

// network implements backend.Network.
type network struct {
	*Backend
	setup   int                 // that subnets are added to
	held    *backend.Programmer // what the kernel holds without any command
	changed chan struct{}
	workers sync.WaitGroup
	closed  chan struct{}

	mu       sync.Mutex
	running  map[string]bool    // by subnet
	troubles map[string]trouble // by subnet
}

// trouble is what became of the last command for a subnet.
type trouble struct {
	hash  string // of what was to be; empty: the subnet was to go
	err   error
	tries int
	next  time.Time // when to try again
}

// target is a subnet that should be there.
type target struct {
	lease string // its key
	hash  string // of what it is added by
	input input
}

// job is to replace what was added for a subnet by what should be.
type job struct {
	subnet string
	old    *entry  // nil: nothing was added
	want   *target // nil: the subnet is to go
}

func newNetwork(b *Backend, setup int, held *backend.Programmer) *network {
	n := &network{
		Backend: b, setup: setup, held: held, changed: make(chan struct{}, 1), closed: make(chan struct{}),
		running: map[string]bool{}, troubles: map[string]trouble{},
	}
	n.workers.Go(func() {
		for {
			select {
			case <-held.Changed():
				n.wake()
			case <-n.closed:
				return
			}
		}
	})
	return n
}

func (n *network) wake() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// MTU implements backend.Network.
func (n *network) MTU() int { return n.env.Underlay.MTU }

// Changed implements backend.Network. It delivers when a command has ended
// that Sync did not wait for, and when the kernel may have drifted.
func (n *network) Changed() <-chan struct{} { return n.changed }

// Close implements backend.Network. Sync's context must have ended.
func (n *network) Close() error {
	close(n.closed)
	n.workers.Wait()
	return n.held.Close()
}

// Check implements backend.Network.
func (*network) Check(l subnet.Lease) ([]string, error) {
	_, err := data(l)
	return nil, err
}

// data is what a peer has published: one text, wherever it stands.
func data(l subnet.Lease) (text string, err error) {
	for _, e := range l.Endpoints {
		if e.Data == nil {
			continue
		}
		if e.Data[0] != '"' || json.Unmarshal(e.Data, &text) != nil {
			return "", fmt.Errorf("its backend data is %.40q, want a JSON string", e.Data)
		}
		return text, nil
	}
	return "", nil
}

// Sync implements backend.Network.
func (n *network) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	held, failed := n.held.Sync(ctx, peers)
	o, err := n.command(ctx, peers)
	o.Retry, o.Repaired = held.Retry, held.Repaired
	return o, oneline.Join(failed, err)
}

// command runs the commands that lead to these peers.
func (n *network) command(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	want := map[string]target{}
	for key, l := range peers.Leases {
		text, err := data(*l)
		if err != nil {
			return backend.Outcome{}, fmt.Errorf("lease %s: %w", key, err)
		}
		in := input{Env: peerVariables(*l), Stdin: text}
		want[l.Endpoints[0].Subnet.String()] = target{lease: key, hash: hash(n.setup, n.config.add, in), input: in}
	}
	jobs := n.due(want, peers.Complete)
	for _, j := range jobs {
		n.begin(j)
	}
	n.host.book.flush(ctx)
	left := n.work(ctx, jobs)
	n.host.book.flush(ctx)
	if left > 0 && ctx.Err() == nil {
		return n.outcome(want), fmt.Errorf("commands are slow: %d of %d subnets have to wait", left, len(jobs))
	}
	return n.outcome(want), nil
}

// due returns what is to be done now: first what goes, then what comes, then
// what has failed before.
func (n *network) due(want map[string]target, complete bool) []job {
	n.mu.Lock()
	defer n.mu.Unlock()
	var gone, fresh, again []job
	have, now := n.host.book.entries(), time.Now()
	add := func(to *[]job, j job) {
		if e, ok := have[j.subnet]; ok {
			j.old = &e
		}
		switch t, failed := n.troubles[j.subnet]; {
		case n.running[j.subnet]:
		case !failed || j.want == nil && t.hash != "" || j.want != nil && t.hash != j.want.hash:
			*to = append(*to, j)
		case !now.Before(t.next):
			again = append(again, j)
		}
	}
	for _, s := range slices.Sorted(maps.Keys(have)) {
		if _, ok := want[s]; !ok && complete {
			add(&gone, job{subnet: s})
		}
	}
	for _, s := range slices.Sorted(maps.Keys(want)) {
		t := want[s]
		if e, ok := have[s]; !ok || !e.Sure || e.Hash != t.hash {
			add(&fresh, job{subnet: s, want: &t})
		}
	}
	return slices.Concat(gone, fresh, again)
}

// begin notes that from now on nothing is sure about a subnet.
func (n *network) begin(j job) {
	switch {
	case j.old != nil:
		e := *j.old
		e.Sure = false
		n.host.book.setEntry(j.subnet, e)
	case j.want != nil:
		n.host.book.setEntry(j.subnet, n.entry(j.want))
	}
}

func (n *network) entry(t *target) entry {
	return entry{Hash: t.hash, Undo: n.config.remove, Input: t.input}
}

// work does the jobs, and returns how many it did not get to. It does not wait
// for commands that take long.
func (n *network) work(ctx context.Context, jobs []job) (left int) {
	end := time.Now().Add(passTime)
	for i, j := range jobs {
		if ctx.Err() != nil || time.Now().After(end) {
			return len(jobs) - i
		}
		n.mu.Lock()
		n.running[j.subnet] = true
		n.mu.Unlock()
		done := make(chan struct{})
		n.workers.Go(func() {
			defer close(done)
			n.finish(ctx, j, n.do(ctx, j))
		})
		timer := time.NewTimer(patience)
		select {
		case <-done:
		case <-timer.C:
			n.workers.Go(func() {
				<-done
				n.host.book.flush(ctx)
				n.wake()
			})
		}
		timer.Stop()
	}
	return 0
}

// do runs the commands of a job: remove what was added, add what should be. A
// second add of the same would fail with most commands, as with ip(8).
func (n *network) do(ctx context.Context, j job) error {
	log := klog.LoggerWithValues(klog.FromContext(ctx), "subnet", j.subnet)
	if n.failed(j.subnet) { // it is known what they say
		log = log.V(4)
	}
	if j.old != nil {
		if err := n.run(ctx, log, j.old.Undo, j.old.Input); err != nil {
			if j.want == nil || ctx.Err() != nil { // killed half-way: it is still what is to be removed
				return err
			}
			log.V(2).Info("not removed before it is added, maybe because it was not there", "err", err)
		}
	}
	if j.want == nil {
		n.host.book.removeEntry(j.subnet)
		return nil
	}
	e := n.entry(j.want)
	n.host.book.setEntry(j.subnet, e)
	if err := n.run(ctx, log, n.config.add, j.want.input); err != nil {
		return err
	}
	e.Sure = true
	n.host.book.setEntry(j.subnet, e)
	return nil
}

func (n *network) run(ctx context.Context, log klog.Logger, c command, in input) error {
	output, err := c.run(ctx, in, n.config.timeout)
	logOutput(log, c, output)
	if err == nil && c.configured() {
		log.V(4).Info("command has run", "command", c.Name)
	}
	return err
}

func (n *network) failed(subnet string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, failed := n.troubles[subnet]
	return failed
}

// finish takes in what became of a job.
func (n *network) finish(ctx context.Context, j job, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.running, j.subnet)
	if err == nil || ctx.Err() != nil {
		delete(n.troubles, j.subnet)
		return
	}
	t := trouble{err: err, tries: 1}
	if j.want != nil {
		t.hash = j.want.hash
	}
	if before, failed := n.troubles[j.subnet]; failed && before.hash == t.hash {
		t.tries += before.tries
	}
	t.next = time.Now().Add(min(minPause<<min(t.tries-1, 16), maxPause))
	n.troubles[j.subnet] = t
	if j.want != nil {
		return // the reason is returned with the lease
	}
	log := klog.FromContext(ctx)
	switch t.tries {
	case removeTries:
		delete(n.troubles, j.subnet)
		n.host.book.removeEntry(j.subnet)
		log.Error(err, "subnet may not be removed in full, giving up", "subnet", j.subnet, "tries", t.tries)
	case 1:
		log.Error(err, "subnet not removed, trying again", "subnet", j.subnet)
	}
}

// again is how long it is until the first of the failed commands is due, at least
// minPause if it is already; zero if none has failed.
func (n *network) again() (after time.Duration) {
	now := time.Now()
	for s, t := range n.troubles {
		if n.running[s] { // wakes the loop when it has ended
			continue
		}
		wait := t.next.Sub(now)
		if wait <= 0 { // it may be waiting for the store's answer
			wait = minPause
		}
		if after == 0 || wait < after {
			after = wait
		}
	}
	return after
}

var errRunning = errors.New("its command has not ended yet")

// outcome says which peers are not served.
func (n *network) outcome(want map[string]target) backend.Outcome {
	n.mu.Lock()
	defer n.mu.Unlock()
	o := backend.Outcome{Again: n.again()}
	for s, t := range want {
		reason := n.troubles[s].err
		if n.running[s] && reason == nil {
			reason = errRunning
		}
		if reason != nil {
			o.Refused = append(o.Refused, subnet.Refusal{Key: t.lease, Reason: reason.Error()})
		}
	}
	return o
}
