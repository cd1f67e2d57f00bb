// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"sync/atomic"
	"time"
)

// Patience is the deadline of requests to a server that many hosts use. After a request that came to its
// deadline, the next one has twice as much time, up to four times the usual one, until the server is fast
// again. Otherwise, if thousands of hosts use the server at once, each would give up early and repeat its
// request, and the server would never finish. The zero Patience is usable. It is safe for concurrent use.
type Patience struct{ late atomic.Int32 }

// maxLate is how many times the usual deadline is doubled at most.
const maxLate = 2

// Try calls f, which makes a request, with its deadline. usual is the usual one. took is the time that f has
// taken.
func (p *Patience) Try(usual time.Duration, f func(deadline time.Duration) error) (took time.Duration, err error) {
	late := p.late.Load()
	deadline := usual << late
	start := time.Now()
	err = f(deadline)
	took = time.Since(start)

	switch {
	case err == nil && took < usual/2:
		p.late.Store(0)
	case took >= deadline:
		p.late.Store(min(late+1, maxLate))
	}
	return took, err
}
