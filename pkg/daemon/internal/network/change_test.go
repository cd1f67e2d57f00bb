// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/subnet"
)

func parseConfig(t *testing.T, text string) subnet.Config {
	t.Helper()
	cfg, err := subnet.ParseConfig([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// TestSameForwarding checks which changes of a configuration leave the backend as it is.
func TestSameForwarding(t *testing.T) {
	from := parseConfig(t, `{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7}}`)
	for text, want := range map[string]bool{
		`{"Network":"10.5.0.0/16","Backend":{"VNI":7,"Type":"vxlan"}}`:                                             true,
		`{"Network":"10.5.0.0/16","EnableNFTables":true,"Backend":{"Type":"vxlan","VNI":7}}`:                       true,
		`{"Network":"10.5.0.0/16","NonMasqueradeCIDRs":["192.0.2.0/24"],"Backend":{"Type":"vxlan","VNI":7}}`:       true,
		`{"Network":"10.5.0.0/16","SubnetLen":25,"SubnetMax":"10.5.9.0","Backend":{"Type":"vxlan","VNI":7}}`:       true,
		`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":8}}`:                                             false,
		`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7,"MTU":1400}}`:                                  false,
		`{"Network":"10.4.0.0/15","Backend":{"Type":"vxlan","VNI":7}}`:                                             false,
		`{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}`:                                                   false,
		`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00::/48","Backend":{"Type":"vxlan","VNI":7}}`: false,
	} {
		if got := sameForwarding(from, parseConfig(t, text)); got != want {
			t.Errorf("%s: %v, want %v", text, got, want)
		}
	}
}

// TestFits checks that a host keeps its subnets if the configuration can assign them. With Kubernetes
// the API assigns the subnets, so they only have to be in the networks.
func TestFits(t *testing.T) {
	own := subnet.Lease{Endpoints: []subnet.Endpoint{{Subnet: netip.MustParsePrefix("10.5.7.0/24")}}}
	for text, want := range map[string]struct{ etcd, kube bool }{
		`{"Network":"10.5.0.0/16"}`:                                             {true, true},
		`{"Network":"10.4.0.0/15"}`:                                             {true, true},
		`{"Network":"10.5.0.0/16","SubnetMin":"10.5.8.0"}`:                      {false, true},
		`{"Network":"10.5.0.0/16","SubnetMax":"10.5.6.0"}`:                      {false, true},
		`{"Network":"10.5.0.0/16","SubnetLen":25}`:                              {false, true},
		`{"Network":"10.6.0.0/16"}`:                                             {false, false},
		`{"Network":"10.5.7.0/25"}`:                                             {false, false},
		`{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48"}`:      {false, false},
		`{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00::/48"}`: {false, false},
	} {
		cfg := parseConfig(t, text)
		r := &Network{}
		etcd := r.fits(cfg, own)
		r.opts.KubeSubnetMgr = true
		if kube := r.fits(cfg, own); etcd != want.etcd || kube != want.kube {
			t.Errorf("%s: %v with etcd and %v with Kubernetes, want %v", text, etcd, kube, want)
		}
	}
}

// TestStateDuringAChange reads the state file while the backend of another configuration starts. The file
// must then have the former configuration for the next process, the other configuration among those that
// may have left objects, and the lease that the store has. When the backend has started, the file must
// have the other configuration. If the backend does not start because the process is told to stop, the
// file must keep the former one.
func TestStateDuringAChange(t *testing.T) {
	for name, fails := range map[string]bool{"it starts": false, "the process is told to stop": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				file, err := statefile.Open[lastknown.State](t.TempDir(), "node")
				if err != nil {
					t.Fatal(err)
				}
				load := func() lastknown.State {
					t.Helper()
					last, _, err := file.Load()
					if err != nil {
						t.Error(err)
					}
					return last
				}
				var during lastknown.State
				be := starter{close: func() {}, start: func(backend.Env) error {
					during = load()
					if fails {
						cancel()
						return errors.New("told to stop")
					}
					return nil
				}}
				n, s := networkOn(t, be, link(1500, "192.0.2.1"))
				before := n.last()
				n.state = lastknown.NewStore(file)
				defer n.state.Close()
				n.state.Change(func(to *lastknown.State) { *to = before })
				former := before.Config
				other := former
				other.Networks = []subnet.Network{{Prefix: netip.MustParsePrefix("10.6.0.0/16")}}
				c := &change{config: other, iface: link(1500, "192.0.2.1"), be: be, own: &subnet.Lease{Key: "10.6.1.0-24"}}
				_, err = n.change(ctx, s, c)
				if (err != nil) != fails {
					t.Error(err)
				}
				if len(subnet.Changes(during.Config, former)) > 0 || during.Stored == nil || during.Stored.Key != "10.6.1.0-24" ||
					len(during.Former) != 1 || len(subnet.Changes(during.Former[0].Config, other)) > 0 {
					t.Errorf("the state is %+v while the backend starts, want the former configuration", during)
				}
				want := other
				if fails {
					want = former
				}
				if last := load(); len(subnet.Changes(last.Config, want)) > 0 {
					t.Errorf("at the end the state has configuration %+v, want %+v", last.Config, want)
				}
				n.stopServing()
			})
		})
	}
}

// TestChangeThatIsNotFree changes to a configuration after another network has claimed a part of it. The
// network must neither start the configuration nor remove its objects, which are those of the other
// network.
func TestChangeThatIsNotFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var started []int
		be := starter{close: func() {}, start: func(env backend.Env) error {
			started = append(started, len(env.Config.Networks))
			cancel()
			return nil
		}}
		n, s := networkOn(t, be, link(1500, "192.0.2.1"))
		n.claims = func(all []Claimed) error {
			if len(all[0].Config.Networks) > 0 {
				return errors.New("it clashes with network green")
			}
			return nil
		}
		other := n.last().Config
		other.Networks = []subnet.Network{{Prefix: netip.MustParsePrefix("10.6.0.0/16")}}
		s, err := n.change(ctx, s, &change{config: other, iface: link(1500, "192.0.2.1"), be: be})
		if err != nil {
			t.Fatal(err)
		}
		if next, err := followUplink(ctx, n, s, nil); next != nil || err != nil {
			t.Errorf("the network returns %v, %v", next, err)
		}
		defer n.stopServing()
		now, _ := n.state.Get()
		if !slices.Equal(started, []int{0}) || len(now.Config.Networks) > 0 || len(now.Former) > 0 {
			t.Errorf("started backends with %v networks, the state is %+v, want the former configuration", started, now)
		}
	})
}

// TestSteps waits in each stage for the next step toward the configuration in the store. A host that has withdrawn the
// data of its next backend makes it some time after its lease is published, and otherwise the backend says when. If a
// step has failed to start, the host waits before it tries again.
func TestSteps(t *testing.T) {
	for name, tt := range map[string]struct {
		stage, next subnet.Stage
		asks, fails bool
		after       time.Duration
	}{
		"withdrawn":                   {stage: subnet.Withdrawn, next: "", after: withdrawal},
		"finished":                    {stage: subnet.Finished, next: subnet.Leaving, asks: true},
		"finished, and not asked":     {stage: subnet.Finished, next: "none", after: time.Hour},
		"finished, but did not start": {stage: subnet.Finished, next: subnet.Leaving, asks: true, fails: true, after: leastPause},
		"no stage":                    {next: "none", asks: true, after: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, s := networkOn(t, starter{close: func() {}}, link(1500, "192.0.2.1"))
				defer n.stopServing()
				n.state.Update(func(now *lastknown.State) { now.Config.Stage = tt.stage })
				if tt.fails {
					stored := n.last().Config.Goal()
					n.config.stored.config = &stored
					n.config.giveUp(t.Context(), stored, errors.New("does not start"))
				}
				s.reclaim = wait.NewSignal()
				if tt.asks {
					s.reclaim.Send()
				}
				published := make(chan struct{})
				close(published)
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				began := time.Now()
				next, err := n.awaitChange(ctx, s, published)
				got := subnet.Stage("none")
				if next != nil {
					got = next.config.Stage
				}
				if got != tt.next || (err == nil) != (next != nil) || time.Since(began) != tt.after {
					t.Errorf("after %v the network changes to stage %q, %v, want %q after %v", time.Since(began), got, err, tt.next, tt.after)
				}
			})
		})
	}
}
