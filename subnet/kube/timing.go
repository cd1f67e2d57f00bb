// SPDX-License-Identifier: Apache-2.0

package kube

import "time"

// timing contains the intervals that tests shorten.
type timing struct {
	request              time.Duration // deadline of a request
	backoffMin, backoff  time.Duration
	vary                 float64       // share by which pauses of the backoff vary
	restoreMin, restored time.Duration // shortest and longest pause after this host's Node had to be written again
	fresh                time.Duration // the age up to which justRead is used
	spread               time.Duration // multiplied by the number of Nodes, the time over which the lists of all nodes are spread; see turns too
	requestPause         time.Duration // multiplied by the number of Nodes, the pause between requests for new Nodes
	silence              time.Duration // shortest silence of a watch after which it is probed
	late                 time.Duration // the time that a change in the store may need to reach a watch
	event                time.Duration // multiplied by the number of Nodes, the time over which the same Events of all nodes are spread
	poll                 time.Duration // interval between reads of the configuration file
	audit, auditPage     time.Duration // latest time of the audit of a restored cache, and the pause between the pages of its list
}

func defaultTiming() timing {
	return timing{
		request: 10 * time.Second, backoffMin: 100 * time.Millisecond, backoff: 5 * time.Second, vary: 0.5,
		restoreMin: time.Second, restored: time.Minute, fresh: 2 * time.Second, spread: time.Millisecond,
		requestPause: 100 * time.Microsecond, silence: 2 * time.Minute, late: 10 * time.Second,
		event: 10 * time.Millisecond, poll: 10 * time.Second, audit: time.Hour, auditPage: time.Second,
	}
}
