package lab

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"flanneld/pkg/ping"
	"flanneld/pkg/prefix"
)

// Cell is what one pod reaches of another in one address family.
type Cell struct {
	From, To      *Pod
	Family        prefix.Family
	RTT           time.Duration
	BitsPerSecond float64
	Err           error // why it is not reachable, or not as it should be; nil if all is well
}

// Matrix tries every pod to every other in each of the families: a ping, a TCP
// connection that must arrive from the pod's own address, and the throughput.
// It spends about budget on the latter. A pod without an address of a family
// reaches nobody in it.
func (l *Lab) Matrix(ctx context.Context, families []prefix.Family, budget time.Duration) []Cell {
	const shortest, longest = 2 * time.Millisecond, 100 * time.Millisecond
	var cells []*Cell
	pods := l.Pods()
	for _, f := range families {
		for _, from := range pods {
			for _, to := range pods {
				if from != to {
					cells = append(cells, &Cell{From: from, To: to, Family: f})
				}
			}
		}
	}
	reachAll(ctx, cells)
	out := make([]Cell, len(cells))
	for i, c := range cells {
		if c.Err == nil { // one at a time: they share the processors
			c.Err = c.measure(ctx, min(max(budget/time.Duration(len(cells)), shortest), longest))
		}
		out[i] = *c
	}
	return out
}

// reachAll finds out side by side who reaches whom, so that many timeouts take
// hardly longer than one.
func reachAll(ctx context.Context, cells []*Cell) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, 256)
	for _, c := range cells {
		slots <- struct{}{}
		wg.Go(func() {
			c.Err = c.reach(ctx)
			<-slots
		})
	}
	wg.Wait()
}

func (c *Cell) reach(ctx context.Context) error {
	for _, p := range []*Pod{c.From, c.To} {
		if !p.Addr(c.Family).IsValid() {
			return fmt.Errorf("%s has no %v address", p.name, c.Family)
		}
	}
	// One packet may be lost to a neighbour that is not resolved yet.
	_, err := c.From.Ping(ctx, c.To.Addr(c.Family), ping.Options{})
	if err != nil {
		_, err = c.From.Ping(ctx, c.To.Addr(c.Family), ping.Options{})
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Second, errors.New("TCP timeout"))
	defer cancel()
	seen, err := c.From.Connect(ctx, c.To, c.Family)
	if err != nil {
		return err
	}
	if own := c.From.Addr(c.Family); seen != own {
		return fmt.Errorf("connect %s to %s: arrives from %s, not from %s", c.From.name, c.To.name, seen, own)
	}
	return nil
}

func (c *Cell) measure(ctx context.Context, d time.Duration) error {
	const tries = 3
	for range tries {
		rtt, err := c.From.Ping(ctx, c.To.Addr(c.Family), ping.Options{})
		if err != nil {
			return err
		}
		if c.RTT == 0 || rtt < c.RTT {
			c.RTT = rtt
		}
	}
	var err error
	c.BitsPerSecond, err = c.From.Throughput(ctx, c.To, c.Family, d)
	if errors.Is(err, errNothingArrived) { // a lost packet is sent again only after 200 ms
		c.BitsPerSecond, err = c.From.Throughput(ctx, c.To, c.Family, 2*time.Second)
	}
	return err
}
