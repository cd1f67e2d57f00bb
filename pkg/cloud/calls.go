// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// A call that the cloud refuses because there were too many is repeated with pauses that
// double and vary by half, so that hosts that start together do not come back together.
const (
	leastPause = 500 * time.Millisecond
	mostPause  = 20 * time.Second
	pauseShare = 0.5
	tries      = 7
)

// Calls makes and counts the calls of an API. The zero Calls is usable, and safe for concurrent use.
type Calls struct {
	mu sync.Mutex
	n  map[CallCount]uint64 // numbers of calls by name and result; the field N of the keys is not used
}

// CallCount is the number of calls with the same name and result.
type CallCount struct {
	Name   string // in the words of the cloud, such as CreateRoute
	Result string // kind of the error: see Kind
	N      uint64
}

// Count counts a call that ended with err.
func (c *Calls) Count(name string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[CallCount]uint64{}
	}
	c.n[CallCount{Name: name, Result: Kind(err)}]++
}

// Make makes a call, and repeats it after pauses while it returns ErrThrottled. It gives up after a
// few tries, or when ctx ends, so that the next comparison of the keeper can start with the present
// tables. It counts each try under name, and returns the last error with action before its text.
func (c *Calls) Make(ctx context.Context, name, action string, call func() error) error {
	backoff := wait.Backoff{Least: leastPause, Most: mostPause, Share: pauseShare}
	for try := 1; ; try++ {
		err := call()
		if err != nil {
			err = fmt.Errorf("%s: %w", action, err)
		}
		c.Count(name, err)
		if !errors.Is(err, ErrThrottled) || try == tries || backoff.Wait(ctx, 0) != nil {
			return err
		}
	}
}

// Counts returns the numbers of calls, sorted by name and result.
func (c *Calls) Counts() []CallCount {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []CallCount
	for count, n := range c.n {
		count.N = n
		all = append(all, count)
	}
	slices.SortFunc(all, func(a, b CallCount) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Result, b.Result))
	})
	return all
}
