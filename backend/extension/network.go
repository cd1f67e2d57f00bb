// SPDX-License-Identifier: Apache-2.0

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

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/subnet"
)

// commandWait is the time for which a job holds up the next ones. Jobs run one after another,
// because scripts rely on that. A job that takes longer than commandWait continues in parallel
// to the following ones. CommandTimeout limits each of its commands.
const commandWait = time.Second

// passLimit is the time for which one Sync starts jobs. The remaining jobs wait for the next
// Sync.
const passLimit = time.Minute

// The pause before a failed command runs again doubles from minPause to maxPause.
const (
	minPause = time.Second
	maxPause = 5 * time.Minute
)

// removeTries limits how often SubnetRemoveCommand runs for a subnet if it fails: the usual
// cause is that there is nothing left to remove.
const removeTries = 5

// network implements backend.Network.
//
// Each Sync compares the wanted subnets with those in the state file, and runs a job for each
// difference: dueJobs finds the jobs, runJobs starts them one after another, runJob runs the
// commands of one, and finish records its result. From the start of a job to its success,
// entry.Sure is false in the state file, so that an interrupted job runs again.
type network struct {
	*Backend
	*backend.Notifier
	setup   int                 // setup.Number of the setup to which this network adds subnets
	kernel  *backend.Programmer // for kernel objects that do not depend on commands
	workers sync.WaitGroup      // goroutines that run jobs

	mu       sync.Mutex
	running  map[string]bool    // whether a job runs, by subnet
	failures map[string]failure // failures of the last jobs, by subnet
}

type failure struct {
	hash  string // of the job
	err   error
	tries int
	next  time.Time // time of the next try
}

// target is the wanted state of a subnet.
type target struct {
	lease string // key of the lease
	hash  string // of the command and input that add the subnet
	input input
}

// job describes the commands to run for one subnet: first the one that removes old, then the
// one that adds want.
type job struct {
	subnet string
	// old contains what has to be removed first, by its subnet in the state file. Besides an entry for
	// subnet itself, these are others with one of its subnets, as of the same host with other address
	// families: their commands would otherwise remove later what want adds.
	old  map[string]entry
	want *target // nil if the subnet must only be removed
	hash string  // of want, to find out whether the same was tried before
	// again is set if the last job for the subnet has failed, which has been logged.
	again bool
}

// Report implements backend.Network.
func (*network) Report() backend.NetworkReport { return backend.NetworkReport{} }

// Close implements backend.Network. It waits for commands that run. The caller must first end
// the context of Sync, which kills these commands.
func (n *network) Close() error {
	n.workers.Wait()
	return n.kernel.Close()
}

// Check implements backend.Network.
func (*network) Check(l subnet.Lease) ([]string, error) {
	_, err := data(l)
	return nil, err
}

// data returns the text that a peer has published. It is in the first endpoint that has data.
func data(l subnet.Lease) (text string, err error) {
	for _, e := range l.Endpoints {
		if e.Data == nil {
			continue
		}
		if e.Data[0] != '"' || json.Unmarshal(e.Data, &text) != nil {
			return "", fmt.Errorf("backend data is %.40q, want a JSON string", e.Data)
		}
		return text, nil
	}
	return "", nil
}

// Sync implements backend.Network.
func (n *network) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	kernel, failed := n.kernel.Sync(ctx, peers)
	o, err := n.runCommands(ctx, peers)
	o.Retry = kernel.Retry
	o.Repaired = kernel.Repaired
	return o, oneline.Join(failed, err)
}

// runCommands also returns an error if there was no time to start all jobs. The end of ctx is none.
func (n *network) runCommands(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	want := map[string]target{}
	for key, l := range peers.Leases {
		text, err := data(*l)
		if err != nil {
			return backend.Outcome{}, fmt.Errorf("lease %s: %w", key, err)
		}
		in := input{Env: peerVariables(*l), Stdin: text}
		want[l.Endpoints[0].Subnet.String()] = target{lease: key, hash: hash(n.setup, n.config.add, in), input: in}
	}

	jobs := n.dueJobs(want, peers.Complete)
	for _, j := range jobs {
		n.markUnsure(j)
	}

	n.host.store.flush(ctx)
	left := n.runJobs(ctx, jobs)
	n.host.store.flush(ctx)
	if left > 0 && ctx.Err() == nil {
		return n.outcome(want), fmt.Errorf("commands are slow: %d of %d subnets are waiting", left, len(jobs))
	}
	return n.outcome(want), nil
}

// dueJobs returns the jobs to do now: first removals, but only if complete is set, then additions and
// changes, then jobs that failed before and whose pause is over.
func (n *network) dueJobs(want map[string]target, complete bool) []job {
	n.mu.Lock()
	defer n.mu.Unlock()
	have := n.host.store.entries()
	owners := map[string][]string{} // keys in have that are not wanted, by all subnets of their entries
	for s, e := range have {
		if _, ok := want[s]; !ok {
			for _, one := range e.Input.subnets() {
				owners[one] = append(owners[one], s) // several, if a session has ended before it ran its job
			}
		}
	}

	var gone, fresh, again []job
	now := time.Now()
	add := func(to *[]job, j job) {
		running := n.running[j.subnet]
		for s := range j.old {
			running = running || n.running[s]
		}
		if e, ok := have[j.subnet]; ok {
			j.old[j.subnet] = e
		}

		if running {
			return
		}
		last, failed := n.failures[j.subnet]
		j.again = failed
		if !failed || last.hash != j.hash {
			*to = append(*to, j)
		} else if !now.Before(last.next) {
			again = append(again, j)
		}
	}

	replaced := map[string]bool{}
	for _, s := range slices.Sorted(maps.Keys(want)) {
		t := want[s]
		if e, ok := have[s]; ok && e.Sure && e.Hash == t.hash {
			continue
		}
		j := job{subnet: s, want: &t, hash: t.hash, old: map[string]entry{}}
		for _, one := range t.input.subnets() {
			for _, owner := range owners[one] {
				j.old[owner] = have[owner]
				replaced[owner] = true
			}
		}
		add(&fresh, j)
	}

	for _, s := range slices.Sorted(maps.Keys(have)) {
		if _, ok := want[s]; !ok && complete && !replaced[s] {
			add(&gone, job{subnet: s, old: map[string]entry{}})
		}
	}
	return slices.Concat(gone, fresh, again)
}

// markUnsure records that the state of a subnet is unknown until the job has succeeded, in case this
// process is killed before.
func (n *network) markUnsure(j job) {
	for s, e := range j.old {
		e.Sure = false
		n.host.store.setEntry(s, e)
	}
	if _, added := j.old[j.subnet]; !added && j.want != nil {
		n.host.store.setEntry(j.subnet, n.entry(j.want))
	}
}

func (n *network) entry(t *target) entry {
	return entry{Hash: t.hash, Undo: n.config.remove, Input: t.input}
}

// runJobs runs the jobs one after another, and returns how many are left when passLimit is over or
// ctx ends.
func (n *network) runJobs(ctx context.Context, jobs []job) (left int) {
	end := time.Now().Add(passLimit)
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
			n.finish(ctx, j, n.runJob(ctx, j))
		})

		timer := time.NewTimer(commandWait)
		select {
		case <-done:
		case <-timer.C:
			n.workers.Go(func() {
				<-done
				n.host.store.flush(ctx)
				n.Notify()
			})
		}
		timer.Stop()
	}
	return 0
}

// runJob removes what was added before, and adds what is wanted, even if the removal has failed. It
// returns the error of the last command.
func (n *network) runJob(ctx context.Context, j job) error {
	log := klog.LoggerWithValues(klog.FromContext(ctx), "subnet", j.subnet)
	if j.again {
		log = log.V(4)
	}

	// Even what is added again at once is removed first: most commands, like ip(8), fail to add a
	// thing twice.
	for _, s := range slices.Sorted(maps.Keys(j.old)) {
		if err := n.run(ctx, log, j.old[s].Undo, j.old[s].Input); err != nil {
			if j.want == nil || ctx.Err() != nil { // if the command was killed half-way, the removal must be repeated
				return err
			}
			log.V(2).Info("remove before add failed, the subnet may not have been there", "err", err)
		}
		n.host.store.removeEntry(s)
	}
	if j.want == nil {
		return nil
	}

	e := n.entry(j.want)
	n.host.store.setEntry(j.subnet, e)
	if err := n.run(ctx, log, n.config.add, j.want.input); err != nil {
		return err
	}
	e.Sure = true
	n.host.store.setEntry(j.subnet, e)
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

// finish records the result of a job, and the time of the next try.
func (n *network) finish(ctx context.Context, j job, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.running, j.subnet)
	if err == nil || ctx.Err() != nil { // the end of ctx may be the cause of err
		delete(n.failures, j.subnet)
		return
	}

	t := failure{hash: j.hash, err: err, tries: 1}
	if before, failed := n.failures[j.subnet]; failed && before.hash == t.hash {
		t.tries += before.tries
	}

	t.next = time.Now().Add(min(minPause<<min(t.tries-1, 16), maxPause)) // a larger shift would overflow
	n.failures[j.subnet] = t
	if j.want != nil {
		return // the reason is reported with the refused lease
	}

	log := klog.FromContext(ctx)
	switch t.tries {
	case removeTries:
		delete(n.failures, j.subnet)
		n.host.store.removeEntry(j.subnet)
		log.Error(err, "subnet not removed, giving up", "subnet", j.subnet, "tries", t.tries)
	case 1:
		log.Error(err, "subnet not removed, trying again", "subnet", j.subnet)
	}
}

// nextRetry returns the time until the first failed job is due, or zero if there is none. The caller
// holds n.mu.
func (n *network) nextRetry() (after time.Duration) {
	now := time.Now()
	for s, t := range n.failures {
		if n.running[s] { // the end of its command wakes the loop
			continue
		}
		left := t.next.Sub(now)
		if left <= 0 { // it may be waiting for the first answer of the store
			left = minPause
		}
		after = least.Of(after, left)
	}
	return after
}

var errRunning = errors.New("the command is still running")

func (n *network) outcome(want map[string]target) backend.Outcome {
	n.mu.Lock()
	defer n.mu.Unlock()
	o := backend.Outcome{Again: n.nextRetry()}
	for s, t := range want {
		reason := n.failures[s].err
		if n.running[s] && reason == nil {
			reason = errRunning
		}
		if reason != nil {
			o.Refused = append(o.Refused, subnet.Refusal{Key: t.lease, Reason: reason.Error()})
		}
	}
	return o
}
