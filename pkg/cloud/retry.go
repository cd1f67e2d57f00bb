// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"errors"
	"time"

	"github.com/flanneld/flanneld/pkg/wait"
)

// A call that the cloud refuses because there were too many is repeated with pauses that
// double and vary by half, so that hosts that start together do not come back together.
const (
	leastPause = 500 * time.Millisecond
	mostPause  = 20 * time.Second
	pauseShare = 0.5
	tries      = 7
)

// Retry repeats call while it returns ErrThrottled, but not for ever: then the next pass
// of the keeper starts from the state that the tables have by then.
func Retry(ctx context.Context, call func() error) error {
	backoff := wait.Backoff{Least: leastPause, Most: mostPause, Share: pauseShare}
	for try := 1; ; try++ {
		err := call()
		if err == nil || !errors.Is(err, ErrThrottled) || try == tries {
			return err
		}
		if backoff.Wait(ctx, 0) != nil {
			return err
		}
	}
}
