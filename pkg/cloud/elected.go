// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/wait"
)

// Election elects one host of the network, by the store.
type Election interface {
	// Lead tries once to make this host the leader. If it succeeds, it runs lead, whose context ends with
	// the term, and returns nil after it. announce publishes what Leader returns to all hosts. Lead
	// returns ErrLed, wrapped, if another host is the leader.
	Lead(ctx context.Context, lead func(term context.Context, announce func(context.Context, json.RawMessage) error)) error
	// Leader returns the name of the present leader, which is empty if there is none, and its last
	// announcement, which is nil if there is none.
	Leader(ctx context.Context) (name string, announced json.RawMessage, err error)
}

// ErrLed means that another host is the leader.
var ErrLed = errors.New("another host is the leader")

// A host that may write tries to become the leader after pauses, which grow with the number of hosts,
// because all of them may have the rights.
const (
	leastTry = 5 * time.Second
	eachTry  = 25 * time.Millisecond
)

// A host that waits for its route reads the announcement after growing pauses.
const (
	leastRead = time.Second
	mostRead  = 10 * time.Second
	// patience is the time for which a new host waits for its route before it gives a reason.
	patience = 10 * time.Second
	// novelty is the time for which a new host reads often, also if its routes are in order: they may lead to
	// another host that had the same subnet, until the leader has compared them.
	novelty = time.Minute
)

// A host that may not write checks its rights again after growing pauses, because an operator may give
// them to it. The check takes some calls.
const (
	leastCheck = 30 * time.Second
	mostCheck  = time.Hour
	checkTime  = time.Minute
)

// mostVacancy is the time for which there may be no leader before hosts whose routes are in order report
// that. It is longer than the change to another leader takes.
const mostVacancy = 2 * time.Minute

// ElectedConfig configures an Elected. All fields are required but All, which is set anyway, and Tunnel.
type ElectedConfig struct {
	KeeperConfig
	Election Election
	// Tunnel is set if a tunnel carries the packets that the routers of the cloud do not carry. The leader
	// then announces also what each table does.
	Tunnel bool
}

// Elected makes one host of the network write the routes to all hosts. Only that host makes calls that
// write. A host that may not write makes calls only to check its rights.
type Elected struct {
	ElectedConfig
	first  chan struct{} // closed when there is a result
	ready  func()
	begun  time.Time
	checks wait.Backoff
	reads  wait.Backoff
	check  time.Time // when to check the rights again
	unfit  error     // why this host may not write; nil if it may
	failed error     // why it has not become the leader although there is none

	mu       sync.Mutex
	peers    Peers
	keeper   *Keeper // during a term of this host
	report   Report  // of the other time
	vacant   time.Time
	inOrder  bool // the last announcement that was read has the own routes
	told     bool // the last announcement that was read has the tables
	repaired int
	err      error
}

// NewElected returns an Elected. The caller runs it.
func NewElected(c ElectedConfig) *Elected {
	c.All = true
	e := &Elected{ElectedConfig: c, first: make(chan struct{}), begun: time.Now(), report: Report{Writer: WriterLeader}}
	e.ready = sync.OnceFunc(func() {
		close(e.first)
		e.Compared()
	})
	e.checks = wait.Backoff{Least: leastCheck, Most: mostCheck}
	e.reads = wait.Backoff{Least: leastRead, Most: mostRead}
	return e
}

// Run takes part in the election until ctx ends.
func (e *Elected) Run(ctx context.Context) {
	for first := true; ctx.Err() == nil; first = false {
		leader, announced, err := e.Election.Leader(ctx)
		if err == nil && leader != "" {
			e.follow(leader, announced, nil) // the check of the rights may take long
		}
		fit := e.fit(ctx, first || err == nil && leader == "") == nil
		// A daemon that was restarted may be the leader.
		if fit && err == nil && (first || leader == "") {
			failed := e.Election.Lead(ctx, e.lead)
			if leader, announced, err = e.Election.Leader(ctx); err == nil && leader == "" && !errors.Is(failed, ErrLed) {
				e.failed = failed
			}
		}
		if ctx.Err() != nil {
			return
		}
		e.follow(leader, announced, err)
		_ = wait.For(ctx, e.pause(fit)) // the end of ctx ends the loop
	}
}

// fit returns nil if this host may write. It checks the rights at the start, and again after growing pauses
// while there is no leader, or the error may end by itself.
func (e *Elected) fit(ctx context.Context, vacant bool) error {
	if e.check.IsZero() || e.unfit != nil && (vacant || Transient(e.unfit)) && time.Now().After(e.check) {
		ctx, cancel := context.WithTimeout(ctx, checkTime)
		defer cancel()
		e.note(ctx, e.Cloud.Check(ctx))
	}
	return e.unfit
}

// note records whether this host may write.
func (e *Elected) note(ctx context.Context, err error) {
	if err != nil && (e.unfit == nil || e.unfit.Error() != err.Error()) {
		klog.FromContext(ctx).Info("this host does not take part in the election of the one that writes the routes of the cloud", "reason", err.Error())
	}
	if e.unfit = err; err == nil {
		e.checks.Reset()
	}
	e.check = time.Now().Add(e.checks.Next())
}

// pause returns the time until the next try to lead or to read the announcement.
func (e *Elected) pause(fit bool) time.Duration {
	e.mu.Lock()
	each, inOrder := time.Duration(len(e.peers.Hosts)*int(eachTry)), e.inOrder && e.err == nil && time.Since(e.begun) >= novelty
	reached := e.Tunnel && e.err != nil && (!waiting(e.err) || errors.Is(e.err, errNoTables)) // by the tunnel
	e.mu.Unlock()
	pause := wait.Vary(e.Resync, 0.5)
	if fit {
		pause = min(pause, wait.Vary(max(leastTry, each), 0.5))
	}
	if inOrder {
		e.reads.Reset()
		return pause
	}
	if e.reads.Most = max(mostRead, each); reached { // for ever, if the table stays full
		e.reads.Most = max(e.reads.Most, e.Resync)
	}
	return min(pause, e.reads.Next())
}

// lead writes the routes to all hosts until term ends, or this host turns out not to be able to.
func (e *Elected) lead(term context.Context, announce func(context.Context, json.RawMessage) error) {
	term, resign := context.WithCancel(term)
	defer resign()
	log := klog.FromContext(term)
	log.Info("this host writes the routes of the cloud to all hosts")
	compared := wait.NewSignal()
	c := e.KeeperConfig
	c.Compared = compared.Send
	k := NewKeeper(c)
	e.mu.Lock()
	k.SetPeers(e.peers)
	e.keeper, e.vacant = k, time.Time{}
	e.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer resign()
		e.tell(term, k, compared, announce)
	})
	k.Run(term)
	wg.Wait()
	e.mu.Lock()
	last := k.Report()
	e.report, e.keeper = Report{Writer: WriterLeader, Routes: last.Routes, Good: last.Good, Dropped: last.Dropped}, nil
	for _, t := range last.Tables {
		if e.Tunnel {
			e.report.Tables = append(e.report.Tables, TableReport{ID: t.ID, Name: t.Name, Own: t.Own})
		}
	}
	e.mu.Unlock()
	log.Info("the term of this host as the writer of routes has ended")
}

// tell announces the result of each comparison of k until term ends. It returns if this host lacks
// rights, or cannot join the cloud, which another host may have and can.
func (e *Elected) tell(term context.Context, k *Keeper, compared wait.Signal, publish func(context.Context, json.RawMessage) error) {
	name, _, _ := e.Election.Leader(term) // only for reports
	e.mu.Lock()
	e.report.Leader = name
	e.mu.Unlock()
	var told, omitted, problem string
	retry := &wait.Backoff{Least: leastRead, Most: mostRead}
	for again := time.Duration(0); ; {
		var due <-chan time.Time
		if again > 0 {
			due = time.After(again)
		}
		select {
		case <-term.Done():
			return
		case <-compared:
		case <-due:
		}
		err := e.take(term, k)
		text, less, failed := announce(k.Report(), err, e.Tunnel)
		if less != omitted && less != "" {
			klog.FromContext(term).Info("the routes are too many to announce all of them", "most", mostText, "omitted", less)
		}
		omitted = less
		if failed == nil && string(text) != told {
			failed = publish(term, text)
		}
		if now := errorText(failed); now != problem && now != "" && term.Err() == nil {
			klog.FromContext(term).Error(failed, "cannot announce which routes are in order, trying again", "bytes", len(text))
		}
		problem = errorText(failed)
		if again = 0; failed != nil {
			again = retry.Next()
		} else {
			told = string(text)
			retry.Reset()
		}
		if _, alone := errors.AsType[*joinError](err); Hopeless(err) || alone && !Transient(err) {
			e.note(term, err)
			return
		}
	}
}

// take takes the result of the keeper over, and returns its error.
func (e *Elected) take(ctx context.Context, k *Keeper) error {
	select {
	case <-k.first:
	default:
		return nil // the first comparison is in progress
	}
	repaired, err := k.Result(ctx)
	e.mu.Lock()
	e.repaired += repaired
	e.err, e.inOrder, e.told = err, err == nil, e.Tunnel && len(k.Report().Tables) > 0
	e.mu.Unlock()
	e.ready()
	e.Compared()
	return err
}

// follow applies what the store has answered about the leader.
func (e *Elected) follow(leader string, announced json.RawMessage, err error) {
	leader = clean(leader)
	e.mu.Lock()
	before, was, report := errorText(e.err), e.inOrder, e.report
	switch {
	case err != nil:
		if !e.inOrder && !e.told { // otherwise the routes stay while the store is away
			e.err = &waitingError{err}
		}
	case leader == "":
		e.stay()
	default:
		e.vacant, e.failed = time.Time{}, nil
		e.checks.Reset()
		e.inOrder, e.err = e.read(leader, announced)
	}
	e.report.Leader = leader
	changed := before != errorText(e.err) || was != e.inOrder || report.Dropped != e.report.Dropped ||
		!slices.Equal(report.Routes, e.report.Routes) || report.followed() != e.report.followed()
	inOrder := e.err == nil && e.inOrder
	e.mu.Unlock()
	if inOrder || time.Since(e.begun) > patience {
		e.ready()
	}
	if changed { // a further pass at each look would cost more than the look
		e.Compared()
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// stay applies that there is no leader. A host whose routes are in order waits for the next one. The kind of the
// error is that it waits, also if this host cannot write routes, because they are as they were.
func (e *Elected) stay() {
	if e.vacant.IsZero() {
		e.vacant = time.Now()
	}
	if (e.inOrder || e.told) && time.Since(e.vacant) <= mostVacancy {
		return
	}
	err := errors.New("no host writes the routes of the cloud yet")
	switch {
	case e.failed != nil:
		err = e.failed
	case e.unfit != nil:
		err = fmt.Errorf("no host writes the routes of the cloud, and this one cannot: %w", e.unfit)
	}
	e.err = &waitingError{err}
}

// read returns whether the routes to this host are in order, by the announcement of the leader. err is what
// keeps them from that. It is nil if a route was just put, which the routers may not follow yet.
func (e *Elected) read(leader string, announced json.RawMessage) (inOrder bool, err error) {
	if announced == nil {
		if e.inOrder || e.told {
			return e.stays()
		}
		return false, &waitingError{fmt.Errorf("waiting for the leader %s, which has not compared the routes yet", leader)}
	}
	a, err := parse(announced)
	if err != nil {
		return false, fmt.Errorf("the leader %s has announced something that cannot be read: %w", leader, err)
	}
	if a.Routed == nil && (e.inOrder || e.told) { // the routes stay in an outage of the cloud or of the store
		return e.stays()
	}
	err = a.check(e.Own.Subnets, leader)
	if inOrder = err == nil; inOrder {
		e.report.Good = time.Now()
	}
	if !e.Tunnel {
		e.report.Routes = nil
		for _, dst := range e.Own.Subnets {
			e.report.Routes = append(e.report.Routes, RouteReport{Route: Route{Dst: dst, ByCall: true}, Present: a.routed(dst)})
		}
		return inOrder, err
	}
	if e.told = a.Tables != nil; e.told {
		settled := false
		e.report.Tables, e.report.Routes, settled = a.tables(e.Own.Subnets)
		e.report.Dropped = false
		return inOrder && settled, err
	}
	// Without tables this host goes on as it does, unless the leader says that there is no route.
	if _, told := errors.AsType[*toldError](err); inOrder || told {
		e.report.Dropped = told && Kind(err) != "waiting"
	}
	if inOrder && len(e.report.Tables) == 0 {
		return false, &waitingError{fmt.Errorf("the leader %s %w", leader, errNoTables)}
	}
	return inOrder, err
}

// errNoTables means that this host has a tunnel and has never read the tables. The leader has none, or has too
// many hosts to announce them. The name of the leader precedes its text.
var errNoTables = errors.New("has not announced which tables hosts follow")

// stays is the result of read while the leader does not know the routes yet: they are as they were.
func (e *Elected) stays() (inOrder bool, err error) {
	if e.inOrder {
		return true, nil
	}
	return false, e.err
}

// SetPeers sets the other hosts that have a lease.
func (e *Elected) SetPeers(p Peers) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.peers = p; e.keeper != nil {
		e.keeper.SetPeers(p)
	}
}

// Result returns what keeps the routes to this host from being in order, as far as it is known, and the
// number of routes that this host has repaired since the last call. It waits for the first result, and
// returns an error if ctx ends before.
func (e *Elected) Result(ctx context.Context) (repaired int, err error) {
	select {
	case <-e.first:
	case <-ctx.Done():
		return 0, errors.New("it is not known yet which host writes the routes of the cloud")
	}
	repaired, _, err = e.Last()
	return repaired, err
}

// Last is Result without waiting. known is false before the first result.
func (e *Elected) Last() (repaired int, known bool, err error) {
	select {
	case <-e.first:
	default:
		return 0, false, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	repaired, e.repaired = e.repaired, 0
	return repaired, true, e.err
}

// Report returns the state at the last comparison, if this host is the leader, and otherwise as the leader
// has announced it.
func (e *Elected) Report() Report {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.keeper == nil {
		return e.report
	}
	r := e.keeper.Report()
	r.Leader = e.report.Leader
	return r
}
