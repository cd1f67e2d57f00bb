// SPDX-License-Identifier: Apache-2.0

package loop_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/loop"
)

// The step of this loop makes a file have the wanted content. Only the goroutine of the
// loop uses the variables, so they need no lock.
func ExampleLoop() {
	ctx, stop := context.WithCancel(context.Background())
	wanted, written := 1, 0
	full := true // the disk is full at the first attempt to write 3
	l := loop.New(time.Hour, func(context.Context) error {
		switch {
		case written == wanted: // nothing to do
			return nil
		case wanted == 3 && full:
			full = false
			fmt.Println("cannot write 3, trying again")
			return errors.New("the disk is full") // the loop repeats the step after a pause
		}
		written = wanted
		fmt.Println("wrote", written)
		if written == 3 {
			stop()
		}
		return nil
	})
	var running sync.WaitGroup
	running.Go(func() { _ = l.Run(ctx) }) // runs the first step at once

	// Both changes lead to one further step, which needs only the last change.
	_ = l.Do(ctx, func() { wanted = 2 })
	_ = l.Do(ctx, func() { wanted = 3 })
	l.Wake()
	running.Wait()
	// Output:
	// wrote 1
	// cannot write 3, trying again
	// wrote 3
}
