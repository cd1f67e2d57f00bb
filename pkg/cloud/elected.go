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
	// Lead tries once to make this host the leader. If it succeeds, it runs lead, and returns nil after
	// lead has returned. The context term ends when this host must not lead any more. The function
	// announce publishes an announcement, which Leader then returns on all hosts. If another host is the
	// leader, Lead returns an error that wraps ErrLed.
	Lead(ctx context.Context, lead func(term context.Context, announce func(context.Context, json.RawMessage) error)) error
	// Leader returns the name of the present leader and its last announcement. The name is empty if there
	// is no leader, and the announcement is nil if the leader has announced nothing yet.
	Leader(ctx context.Context) (name string, announced json.RawMessage, err error)
}

// ErrLed means that another host is the leader.
var ErrLed = errors.New("another host is the leader")

// A host that may write asks for the leader after each pause, and tries to become the leader if there is none. The
// pause grows with the number of hosts, because all of them may try.
const (
	leastTry = 5 * time.Second
	eachTry  = 25 * time.Millisecond // for each other host
)

// A host that waits for its route reads the announcement after growing pauses.
const (
	leastRead = time.Second
	mostRead  = 10 * time.Second
	// patience is the time for which a new host waits for its route before it gives a reason.
	patience = 10 * time.Second
	// novelty is the time for which a new host reads often even if the announcement says that its routes are in
	// order. Until the leader has compared again, these routes may lead to an earlier host with the same subnet.
	novelty = time.Minute
)

// A host that may not write checks its rights again after growing pauses, because an operator may have given
// the rights to it. The pauses grow because a check makes some calls.
const (
	leastCheck = 30 * time.Second
	mostCheck  = time.Hour
	checkTime  = time.Minute // for one check
)

// mostVacancy is the time without a leader after which a host reports an error even if its routes are in order.
// It is longer than the change to another leader takes.
const mostVacancy = 2 * time.Minute

// ElectedConfig configures an Elected. All fields are required except AtOnce, Tunnel and All. NewElected sets All. With
// a Tunnel the leader also announces the tables, because hosts choose the cloud or the tunnel by them.
type ElectedConfig struct {
	KeeperConfig
	Election Election
}

// Elected makes one host of the network, the leader, write the routes to all hosts. Only the leader makes
// calls that write. The other hosts make calls only to check their rights.
type Elected struct {
	ElectedConfig
	first  chan struct{} // closed when there is a result
	ready  func()        // closes first
	begun  time.Time
	checks wait.Backoff // pauses between checks of the rights
	reads  wait.Backoff // pauses between readings of the announcement
	check  time.Time    // when to check the rights again
	unfit  error        // why this host may not write; nil if it may
	failed error        // why this host has not become the leader although there is no other one

	mu          sync.Mutex
	peers       Peers
	keeper      *Keeper   // while this host is the leader; otherwise nil
	report      Report    // while this host is not the leader; the field Leader is always valid
	vacant      time.Time // since when there is no leader; zero if there is one
	inOrder     bool      // the last announcement or comparison says that the own routes are in order
	knowsTables bool      // the last announcement or comparison had the tables; only with Tunnel
	repaired    int       // routes that this host has repaired since the last call of Last
	err         error     // why the routes to this host are not in order
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
			e.follow(leader, announced, nil) // before the check of the rights, which may take long
		}
		fit := e.fit(ctx, first || err == nil && leader == "") == nil
		// Try to lead at the start even if there is a leader: it may be this host before its restart.
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

// fit returns nil if this host may write, and otherwise the reason why not. It checks the rights at the start.
// It repeats a check that has failed, after growing pauses, if vacant is set or the error may end by itself.
// vacant means that there is no leader.
func (e *Elected) fit(ctx context.Context, vacant bool) error {
	if e.check.IsZero() || e.unfit != nil && (vacant || Transient(e.unfit)) && time.Now().After(e.check) {
		ctx, cancel := context.WithTimeout(ctx, checkTime)
		defer cancel()
		e.note(ctx, e.Cloud.Check(ctx))
	}
	return e.unfit
}

// note records whether this host may write: err is nil, or the reason why it may not. note logs a new reason, and
// sets the time of the next check of the rights.
func (e *Elected) note(ctx context.Context, err error) {
	if err != nil && (e.unfit == nil || e.unfit.Error() != err.Error()) {
		klog.FromContext(ctx).Info("this host does not take part in the election of the one that writes the routes of the cloud", "reason", err.Error())
	}
	if e.unfit = err; err == nil {
		e.checks.Reset()
	}
	e.check = time.Now().Add(e.checks.Next())
}

// pause returns the time until the next try to lead or to read the announcement. fit is set if this host may
// write.
func (e *Elected) pause(fit bool) time.Duration {
	e.mu.Lock()
	each, inOrder := time.Duration(len(e.peers.Hosts)*int(eachTry)), e.inOrder && e.err == nil && time.Since(e.begun) >= novelty
	reached := e.Tunnel && e.err != nil && (!waiting(e.err) || errors.Is(e.err, errNoTables)) // the tunnel carries the packets, so the route is not urgent
	e.mu.Unlock()
	pause := wait.Vary(e.Resync, 0.5)
	if fit {
		pause = min(pause, wait.Vary(max(leastTry, each), 0.5))
	}
	if inOrder {
		e.reads.Reset()
		return pause
	}
	if e.reads.Most = max(mostRead, each); reached { // the host may wait for ever if the table stays full
		e.reads.Most = max(e.reads.Most, e.Resync)
	}
	return min(pause, e.reads.Next())
}

// lead writes the routes to all hosts until term ends, or until tell finds that this host cannot write them.
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

// tell publishes the results of the comparisons of k until term ends. It leaves out a result that equals the last
// one, and repeats a publication that has failed. It also returns if this host lacks rights, if the cloud refuses
// its keys, or if it cannot join the cloud, so that another host can become the leader.
func (e *Elected) tell(term context.Context, k *Keeper, compared wait.Signal, publish func(context.Context, json.RawMessage) error) {
	name, _, _ := e.Election.Leader(term) // only for reports
	e.mu.Lock()
	e.report.Leader = name
	e.mu.Unlock()
	var announced, omitted, problem string
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
		if failed == nil && string(text) != announced {
			failed = publish(term, text)
		}
		if now := errorText(failed); now != problem && now != "" && term.Err() == nil {
			klog.FromContext(term).Error(failed, "cannot announce which routes are in order, trying again", "bytes", len(text))
		}
		problem = errorText(failed)
		if again = 0; failed != nil {
			again = retry.Next()
		} else {
			announced = string(text)
			retry.Reset()
		}
		if _, alone := errors.AsType[*joinError](err); Hopeless(err) || alone && !Transient(err) {
			e.note(term, err)
			return
		}
	}
}

// take records the result of the last comparison of k, and returns its error. Before the end of the first
// comparison it does nothing and returns nil.
func (e *Elected) take(ctx context.Context, k *Keeper) error {
	select {
	case <-k.first:
	default:
		return nil // the first comparison is in progress
	}
	repaired, err := k.Result(ctx)
	e.mu.Lock()
	e.repaired += repaired
	e.err, e.inOrder, e.knowsTables = err, err == nil, e.Tunnel && len(k.Report().Tables) > 0
	e.mu.Unlock()
	e.ready()
	e.Compared()
	return err
}

// follow updates the state of the routes to this host after the store was asked for the leader. leader is empty if
// there is none, and err is the error of the store. follow calls Compared if the state has changed.
func (e *Elected) follow(leader string, announced json.RawMessage, err error) {
	leader = clean(leader)
	e.mu.Lock()
	before, was, report := errorText(e.err), e.inOrder, e.report
	switch {
	case err != nil:
		if !e.inOrder && !e.knowsTables { // otherwise the routes stay as they are while the store is away
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
	if changed { // a pass after each reading of the announcement would cost more than the reading
		e.Compared()
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// stay updates the state when there is no leader. If the routes to this host are in order, or the tables are known,
// stay waits for the next leader, and sets an error only after mostVacancy. The error is a waitingError even if this
// host cannot write routes, because the routes are as they were.
func (e *Elected) stay() {
	if e.vacant.IsZero() {
		e.vacant = time.Now()
	}
	if (e.inOrder || e.knowsTables) && time.Since(e.vacant) <= mostVacancy {
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

// read records an announcement of the leader, and returns whether the routes to this host are in order. If they are
// not, err is the reason. err is nil, although inOrder is false, if a tunnel is in use and a route was just put: the
// routers may not follow this route yet.
func (e *Elected) read(leader string, announced json.RawMessage) (inOrder bool, err error) {
	if announced == nil {
		if e.inOrder || e.knowsTables {
			return e.stays()
		}
		return false, &waitingError{fmt.Errorf("waiting for the leader %s, which has not compared the routes yet", leader)}
	}
	a, err := parse(announced)
	if err != nil {
		return false, fmt.Errorf("the leader %s has announced something that cannot be read: %w", leader, err)
	}
	if a.Routed == nil && (e.inOrder || e.knowsTables) { // the routes stay as they are in an outage of the cloud or of the store
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
	if e.knowsTables = a.Tables != nil; e.knowsTables {
		complete := false
		e.report.Tables, e.report.Routes, complete = a.tables(e.Own.Subnets)
		e.report.Dropped = false
		return inOrder && complete, err
	}
	// Without tables this host continues to use the cloud or the tunnel, as before, unless the leader says that
	// there is no route.
	if _, announced := errors.AsType[*announcedError](err); inOrder || announced {
		e.report.Dropped = announced && Kind(err) != "waiting"
	}
	if inOrder && len(e.report.Tables) == 0 {
		return false, &waitingError{fmt.Errorf("the leader %s %w", leader, errNoTables)}
	}
	return inOrder, err
}

// errNoTables means that this host has a tunnel but no leader has announced the tables to it. The reason is that
// the leader has no tunnel, or has too many hosts to announce the tables. In a message the text of errNoTables
// follows the name of the leader.
var errNoTables = errors.New("has not announced which tables hosts follow")

// stays returns the result of read while the leader does not know the routes yet. The routes are as they were, so
// stays returns the last result.
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

// Result returns the reason why the routes to this host are not in order, or nil if they are or no reason is
// known. repaired is the number of routes that this host has repaired since the last call of Result or Last.
// Result waits until there is something to return, and returns an error if ctx ends before.
func (e *Elected) Result(ctx context.Context) (repaired int, err error) {
	select {
	case <-e.first:
	case <-ctx.Done():
		return 0, errors.New("it is not known yet which host writes the routes of the cloud")
	}
	repaired, _, err = e.Last()
	return repaired, err
}

// Last is like Result, but does not wait. known is false while Result would wait. Otherwise Last also sets the
// number of repaired routes back to zero.
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

// Report returns the state at the last comparison if this host is the leader. Otherwise it returns the state
// that the leader has announced, or that of this host's own last term if no leader has announced anything since.
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
