// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/tune"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/doctor/linux"
	"github.com/flanneld/flanneld/pkg/report/status"
)

const (
	// lookPause is the least time between two looks at what the kernel does with packets of pods, and lookPauseMost
	// the longest one. A look asks for two routes of each peer, and the kernel announces settings with each pod that
	// starts. So the time after a look is lookShare times its cost in CPU time, which is half a second with 5,000 peers.
	lookPause, lookPauseMost = 10 * time.Second, time.Minute
	lookShare                = 100
	// settlePause is the time between an announcement and the look. A VPN that connects announces several.
	settlePause = time.Second
	// addressesRest is the least time between two reads of the addresses of this host. Networks start shortly after each
	// other, and share reads. Even if a look counted this time as its cost, the time after it would be lookPause.
	addressesRest = lookPause / lookShare / 2
)

// podSources is what the networks of a process share to watch their pods.
type podSources struct {
	changes   wait.Shared // of the rules and settings of other programs
	addresses linux.Addresses
}

// watchPods reports whether rules or settings of other programs keep packets from pods although all objects of flanneld
// are in place. It looks when a session has started, and after each announcement of such a change. A problem is looked at
// again until it is gone, because not everything that may end it is announced.
func (n *Network) watchPods(ctx context.Context) {
	log := klog.FromContext(ctx)
	changed, _, err := n.host.pods.changes.Join(linux.Watch)
	if err != nil {
		log.Error(err, "cannot watch the rules and settings of other programs")
		changed = wait.NewSignal()
	} else {
		defer n.host.pods.changes.Leave(changed)
	}
	changed.Send()

	var before string
	looked := false // while there was a session
	for {
		pause := time.Duration(1<<63 - 1)
		if before != "" || !looked {
			pause = lookPause
		}
		if wait.ForOr(ctx, pause, changed) != nil || wait.For(ctx, settlePause) != nil {
			return
		}

		cost := tune.Cost()
		served := n.serving.Load() != nil
		problem, known := n.cutOff(ctx)
		looked = served && known
		rest := min(max(lookPause, lookShare*cost()), lookPauseMost)
		if !known {
			problem = before
		}

		switch problem {
		case before:
		case "":
			log.Info("pods are not cut off any more")
			n.ready.report(partPods, nil)
		default:
			log.Error(errors.New(problem), "pods are cut off: see flannelctl doctor")
			n.ready.report(partPods, errors.New(problem))
			n.store.Warn("FlannelPodsCutOff", problem)
		}

		before = problem
		if wait.For(ctx, rest-settlePause) != nil {
			return
		}
	}
}

// cutOff returns what keeps packets from pods, or "". known is false if the daemon is too busy to tell. A report of
// thousands of peers takes memory, so it asks for one only if there are pods.
func (n *Network) cutOff(ctx context.Context) (problem string, known bool) {
	now, _ := n.state.Get()
	if !n.host.pods.addresses.HasPods(ctx, statusLease(now.Own).Subnets) {
		return "", true
	}

	report, err := n.Report(ctx, status.Query{})
	if err != nil || report.Kernel.Error != "" && len(report.Peers) == 0 {
		return "", false
	}
	if found := doctor.CutOff(linux.Pods(report)); len(found) > 0 {
		return found[0].Problem, true
	}
	return "", true
}
