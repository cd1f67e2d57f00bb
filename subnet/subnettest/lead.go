// SPDX-License-Identifier: Apache-2.0

package subnettest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
)

const task = "test-task"

// Term is a term of a node that a test has made the leader.
type Term struct {
	Announce subnet.Announce
	Over     <-chan struct{} // closed when the term has ended, by the store or by End
	End      func()          // ends the term and waits until Lead has returned
	task     string
}

// ExpectOver waits until the store has ended the term.
func (term Term) ExpectOver(t *testing.T) {
	t.Helper()
	waittest.Receive(t, patience, "the end of the term", term.Over)
}

// ExpectTakeover makes next the leader after the node of the term has lost the store. own is the lease
// of the next leader. The term must end before next leads, and next must lead within the time most.
func (term Term) ExpectTakeover(t *testing.T, next subnet.Elector, own subnet.Lease, most time.Duration) {
	t.Helper()
	start := time.Now()
	over := make(chan time.Time, 1)
	go func() { <-term.Over; over <- time.Now() }()
	Lead(t, next, term.task, own)
	took := time.Since(start)
	select {
	case ended := <-over:
		t.Logf("the term has ended after %v, and the next one has begun after %v", ended.Sub(start), took)
	default:
		t.Error("two nodes are the leader")
	}
	if took > most {
		t.Errorf("the next term has begun after %v, want at most %v", took, most)
	}
}

// Lead makes a node the leader, and waits for that. If the node is not the leader within the patience
// of the suite, Lead fails the test. The term ends with the test at the latest.
func Lead(t *testing.T, m subnet.Elector, task string, own subnet.Lease) Term {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	begun, over, done := make(chan subnet.Announce, 1), make(chan struct{}), make(chan error, 1)
	lead := func(term context.Context, announce subnet.Announce) {
		begun <- announce
		<-term.Done()
		close(over)
	}
	go func() {
		deadline := time.Now().Add(patience)
		for {
			err := m.Lead(ctx, task, own, lead)
			if err == nil || time.Now().After(deadline) || ctx.Err() != nil {
				done <- err
				return
			}
			<-time.After(50 * time.Millisecond)
		}
	}()
	end := func() {
		cancel()
		waittest.Receive(t, patience, "the end of the term", over)
	}
	select {
	case announce := <-begun:
		t.Cleanup(end)
		return Term{Announce: announce, Over: over, task: task, End: func() {
			end()
			if err := waittest.Receive(t, patience, "the end of Lead", done); err != nil {
				t.Errorf("the term of node %s has ended with the error %v", own.Key, err)
			}
		}}
	case err := <-done:
		cancel()
		t.Fatalf("node %s is not the leader: %v", own.Key, err)
	}
	return Term{}
}

// ExpectLeader waits until m sees the leader want with what want has announced. An empty want means
// that there is no leader.
func ExpectLeader(t *testing.T, m subnet.Elector, task string, want subnet.Leader) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; <-time.After(20 * time.Millisecond) {
		found, err := m.Leader(t.Context(), task)
		if err == nil && found.Name == want.Name && string(found.Announced) == string(want.Announced) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the leader is %q with %s, error %v, want %q with %s", found.Name, found.Announced, err, want.Name, want.Announced)
		}
	}
}

// testLead checks that one node at a time is the leader, and that the other node sees the name of
// the leader and what the leader has announced.
func testLead(t *testing.T, b Backing) {
	b.SetConfig(t, configV4)
	var nodes []subnet.Elector
	var leases []subnet.Lease
	for n := 1; n <= 2; n++ {
		m := b.Manager(t, n)
		own, err := Acquire(t.Context(), m, claim(configV4, n))
		if err != nil {
			t.Fatal(err)
		}
		elector, ok := m.(subnet.Elector)
		if !ok {
			t.Fatalf("%T is no Elector", m)
		}
		nodes, leases = append(nodes, elector), append(leases, own)
	}
	never := func(context.Context, subnet.Announce) { t.Error("a second node is the leader") }
	ExpectLeader(t, nodes[1], task, subnet.Leader{})
	var names []string
	for i := range nodes { // each node leads once
		term := Lead(t, nodes[i], task, leases[i])
		now, err := nodes[1-i].Leader(t.Context(), task)
		if err != nil || now.Name == "" || now.Announced != nil {
			t.Errorf("the leader is %+v, error %v, want one that has announced nothing", now, err)
		}
		names = append(names, now.Name)
		if err := nodes[1-i].Lead(t.Context(), task, leases[1-i], never); !errors.Is(err, subnet.ErrLed) {
			t.Errorf("the other node gets the error %v, want ErrLed", err)
		}
		for n := range 2 {
			text := json.RawMessage(fmt.Sprintf(`{"step":%d}`, n))
			if err := term.Announce(t.Context(), text); err != nil {
				t.Error(err)
			}
			ExpectLeader(t, nodes[1-i], task, subnet.Leader{Name: now.Name, Announced: text})
		}
		term.End()
		if err := term.Announce(t.Context(), json.RawMessage(`{}`)); err == nil {
			t.Error("a node could announce something after its term")
		}
		ExpectLeader(t, nodes[i], task, subnet.Leader{})
	}
	if names[0] == names[1] {
		t.Errorf("both leaders are called %s", names[0])
	}
	other := Lead(t, nodes[0], task+"-2", leases[0])
	Lead(t, nodes[1], task, leases[1]) // tasks do not affect each other
	other.End()
}
