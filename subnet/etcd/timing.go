// SPDX-License-Identifier: Apache-2.0

package etcd

import "time"

// timing contains the intervals that tests shorten.
type timing struct {
	request, page            time.Duration // deadlines: of a request, and of a request for a page of a list
	login                    time.Duration // deadline of a login: the server may have to process the logins of all hosts
	spread                   time.Duration // multiplied by the number of hosts, the longest wait of client.turn
	slow                     time.Duration // a request that takes longer shows that the store cannot keep up
	quiet, idle, probeAnswer time.Duration // see follow
	check                    time.Duration // see verify
	back                     time.Duration // time after which a host tries its preferred endpoint again; see comeBack
	dead                     time.Duration // the time in which pings detect a dead connection
	backoffMin, backoff      time.Duration
	restoreMin, restored     time.Duration // shortest and longest pause after this host's key had to be written again
	gracePeriod              time.Duration // see the type gracePeriod
	audit                    time.Duration // latest time of the audit of a restored cache
	exhausted                time.Duration // how long a host without a subnet waits for a change before it reads the leases again
}

// The client sends a ping over a connection that is silent for pingAfter, and closes the connection
// if there is no answer within pingTimeout. A server permits a ping every 5 s.
const pingAfter, pingTimeout = 10 * time.Second, 5 * time.Second

func defaultTiming() timing {
	return timing{
		request: 5 * time.Second, page: 20 * time.Second, login: 4 * time.Minute, spread: 10 * time.Millisecond,
		slow:  time.Second,
		quiet: 12 * time.Minute, idle: 10 * time.Second, probeAnswer: 5 * time.Second,
		// Even with its variation of a fifth, check is shorter than the five minutes after which
		// etcd forgets an unused token.
		check:      4 * time.Minute,
		back:       time.Hour,
		dead:       pingAfter + pingTimeout,
		backoffMin: 100 * time.Millisecond, backoff: 5 * time.Second,
		restoreMin: time.Second, restored: time.Minute,
		gracePeriod: time.Minute,
		exhausted:   10 * time.Minute,
		audit:       time.Hour,
	}
}
