// SPDX-License-Identifier: Apache-2.0

package extension

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/subnettest"
)

// patience is how long a step of a test may take.
const patience = 10 * time.Second

// node is a host whose commands log their calls.
type node struct {
	t      *testing.T
	dir    string
	env    backend.Env
	boot   string
	config map[string]any
	prev   subnet.Claim // the last published claim
	subnet string       // the IPv4 subnet of its own lease
	host   *Host
	net    backend.Network
	cancel context.CancelFunc
	ctx    context.Context
}

func newNode(t *testing.T, config map[string]any) *node {
	t.Helper()
	n := &node{t: t, dir: t.TempDir(), boot: "boot1", subnet: "10.5.1.0/24", config: config, env: backend.Env{
		Kernel: dataplanetest.New(), Resync: time.Hour,
		Config: subnet.Config{Networks: []subnet.Network{{Prefix: netip.MustParsePrefix("10.5.0.0/16")}}},
		Underlay: underlay.Interface{Name: "eth0", Index: 2, MTU: 1500, Addrs: []underlay.Address{
			{Local: netip.MustParseAddr("192.0.2.1"), Public: netip.MustParseAddr("198.51.100.1")},
		}},
	}}
	t.Setenv("LOG", filepath.Join(n.dir, "log"))
	t.Setenv("DIR", n.dir)
	t.Cleanup(n.stop)
	return n
}

// dual enables IPv6 on the node in addition to IPv4.
func (n *node) dual() {
	n.env.Config.Networks = append(n.env.Config.Networks, subnet.Network{Prefix: netip.MustParsePrefix("fd00:5::/48")})
	n.env.Underlay.Addrs = append(n.env.Underlay.Addrs, underlay.Address{
		Local: netip.MustParseAddr("2001:db8::1"), Public: netip.MustParseAddr("2001:db8::1"),
	})
}

// v6 leaves only IPv6 on the node.
func (n *node) v6() {
	n.dual()
	n.env.Config.Networks, n.env.Underlay.Addrs = n.env.Config.Networks[1:], n.env.Underlay.Addrs[1:]
}

// own returns the node's own lease for a claim: with n.subnet over IPv4, and fd00:5:0:1::/64 over
// IPv6.
func (n *node) own(c subnet.Claim) subnet.Lease {
	l := subnet.Lease{BackendType: c.BackendType, Endpoints: slices.Clone(c.Endpoints)}
	for i, e := range l.Endpoints {
		l.Endpoints[i].Subnet = netip.MustParsePrefix(n.subnet)
		if e.PublicIP.Is6() {
			l.Endpoints[i].Subnet = netip.MustParsePrefix("fd00:5:0:1::/64")
		}
	}
	return l
}

// start creates a Host as a new process does, and starts its network. It returns the claim, and the
// error of Claim or Start.
func (n *node) start() (subnet.Claim, error) {
	n.t.Helper()
	n.host = NewHost(Settings{Allow: true, StateDir: filepath.Join(n.dir, "state"), Name: "test"})
	n.host.store.boot = n.boot
	return n.again()
}

// again starts another network on the same Host, as after a change of the external interface. It
// returns the claim, and the error of Claim or Start.
func (n *node) again() (subnet.Claim, error) {
	n.t.Helper()
	raw, err := json.Marshal(n.config)
	if err != nil {
		n.t.Fatal(err)
	}
	b, warnings, err := n.host.New(raw, n.env)
	if err != nil || warnings != nil {
		n.t.Fatal(err, warnings)
	}
	n.ctx, n.cancel = context.WithCancel(n.t.Context())
	claim, err := b.Claim(n.ctx, n.prev)
	if err != nil {
		return claim, err
	}
	n.net, err = b.Start(n.ctx, n.own(claim))
	return claim, err
}

func (n *node) mustStart() subnet.Claim {
	n.t.Helper()
	claim, err := n.start()
	if err != nil {
		n.t.Fatal(err)
	}
	return claim
}

func (n *node) stop() {
	if n.net != nil {
		n.cancel()
		_ = n.net.Close()
		n.net = nil
	}
}

// sync passes the peers to the network. It returns the reasons of refused peers, by lease key. The
// test fails if Sync returns an error. It also fails if a peer is refused although its command does
// not run any more, and no retry is scheduled.
func (n *node) sync(peers ...subnet.Lease) map[string]string {
	n.t.Helper()
	o, err := n.net.Sync(n.ctx, set(true, peers...))
	if err != nil {
		n.t.Fatal(err)
	}
	refused := map[string]string{}
	for _, r := range o.Refused {
		refused[r.Key] = r.Reason
	}
	if len(refused) > 0 && o.Again == 0 && refused[o.Refused[0].Key] != errRunning.Error() {
		n.t.Errorf("no retry is scheduled for %v", refused)
	}
	return refused
}

// set returns a set of these peers, any of which may have changed.
func set(complete bool, peers ...subnet.Lease) backend.Set {
	s := backend.Set{Leases: map[string]*subnet.Lease{}, All: true, Complete: complete}
	for _, p := range peers {
		s.Leases[p.Key] = &p
	}
	return s
}

// expect compares the calls that the commands have logged with want, in that order, and clears
// the log.
//
// It waits for missing calls, because on a busy machine a command may take longer than Sync
// waits for it.
func (n *node) expect(want ...string) {
	n.t.Helper()
	var text []byte
	for end := time.Now().Add(patience); ; {
		text, _ = os.ReadFile(filepath.Join(n.dir, "log"))
		if strings.Count(string(text), "\n") >= len(want) || time.Now().After(end) {
			break
		}
		<-time.After(5 * time.Millisecond)
	}
	_ = os.Remove(filepath.Join(n.dir, "log"))
	got := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(want) == 0 {
		want = []string{""}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Errorf("commands (-want +got):\n%s", diff)
	}
}

// peer returns the lease of a host with the subnet 10.5.<number>.0/24. text is the data that the host
// publishes; empty for none.
func peer(number int, text string) subnet.Lease {
	l := subnet.Lease{Key: fmt.Sprintf("10.5.%d.0-24", number), BackendType: Type, Endpoints: []subnet.Endpoint{{
		Subnet: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(number)}), 24), PublicIP: netip.AddrFrom4([4]byte{192, 0, 2, byte(number)}),
	}}}
	if text != "" {
		l.Endpoints[0].Data, _ = json.Marshal(text)
	}
	return l
}

// logging returns a configuration in which every command logs its variables and input.
func logging() map[string]any {
	return map[string]any{
		"Type":                Type,
		"PreStartupCommand":   `echo "pre [$(cat)]" >> $LOG; echo data`,
		"PostStartupCommand":  `echo "post $NETWORK $SUBNET $PUBLIC_IP $IPV6NETWORK $IPV6SUBNET $PUBLIC_IPV6 [$(cat)]" >> $LOG`,
		"SubnetAddCommand":    `echo "add $SUBNET $PUBLIC_IP [$IPV6SUBNET $PUBLIC_IPV6] [$(cat)]" >> $LOG`,
		"SubnetRemoveCommand": `echo "remove $SUBNET $PUBLIC_IP [$IPV6SUBNET $PUBLIC_IPV6] [$(cat)]" >> $LOG`,
		"ShutdownCommand":     `echo "shutdown $SUBNET" >> $LOG`,
		"CommandTimeout":      20,
	}
}

func TestVariablesOfCommands(t *testing.T) {
	t.Run("IPv4", func(t *testing.T) {
		n := newNode(t, logging())
		claim := n.mustStart()
		n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []")
		if claim.BackendType != Type || string(claim.Endpoints[0].Data) != `"data"` {
			t.Errorf("claim is %+v", claim)
		}
		n.sync(peer(2, "two"), peer(3, ""))
		n.expect("add 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.3.0/24 192.0.2.3 [ ] []")
		if mtu := n.net.(*network).Describe().MTU; mtu != 1500 {
			t.Errorf("MTU is %d", mtu)
		}
	})
	t.Run("dual", func(t *testing.T) {
		n := newNode(t, logging())
		n.dual()
		claim := n.mustStart()
		n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1 fd00:5::/48 fd00:5:0:1::/64 2001:db8::1 []")
		if string(claim.Endpoints[0].Data) != `"data"` || claim.Endpoints[1].Data != nil {
			t.Errorf("claim is %+v", claim)
		}
		p := peer(2, "two")
		p.Endpoints = append(p.Endpoints, subnet.Endpoint{Subnet: netip.MustParsePrefix("fd00:5:0:2::/64"), PublicIP: netip.MustParseAddr("2001:db8::2")})
		n.sync(p)
		n.sync()
		n.expect("add 10.5.2.0/24 192.0.2.2 [fd00:5:0:2::/64 2001:db8::2] [two]", "remove 10.5.2.0/24 192.0.2.2 [fd00:5:0:2::/64 2001:db8::2] [two]")
	})
	t.Run("IPv6", func(t *testing.T) {
		n := newNode(t, logging())
		n.v6()
		claim := n.mustStart()
		n.expect("pre []", "post    fd00:5::/48 fd00:5:0:1::/64 2001:db8::1 []")
		if string(claim.Endpoints[0].Data) != `"data"` {
			t.Errorf("claim is %+v", claim)
		}
		n.sync(subnet.Lease{Key: "a", BackendType: Type, Endpoints: []subnet.Endpoint{{
			Subnet: netip.MustParsePrefix("fd00:5:0:2::/64"), PublicIP: netip.MustParseAddr("2001:db8::2"), Data: json.RawMessage(`"six"`)}}})
		n.expect("add   [fd00:5:0:2::/64 2001:db8::2] [six]")
	})
	t.Run("nothing configured", func(t *testing.T) {
		n := newNode(t, map[string]any{"Type": Type})
		if claim := n.mustStart(); claim.Endpoints[0].Data != nil {
			t.Errorf("claim is %+v", claim)
		}
		if refused := n.sync(peer(2, "two")); len(refused) > 0 {
			t.Errorf("refused: %v", refused)
		}
		n.sync()
	})
}

// TestRestart checks that a new process runs a command only if the command or its input has
// changed, and that the commands of the start run again after a boot.
func TestRestart(t *testing.T) {
	n := newNode(t, logging())
	two, three := peer(2, "two"), peer(3, "three")
	n.mustStart()
	n.sync(two, three)
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []",
		"add 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.3.0/24 192.0.2.3 [ ] [three]")
	restart := func() {
		n.stop()
		if claim := n.mustStart(); string(claim.Endpoints[0].Data) != `"data"` {
			t.Errorf("claim after a restart is %+v", claim)
		}
	}

	restart()
	n.sync(two, three)
	n.sync(two, three)
	n.expect()

	restart()
	two.Endpoints[0].PublicIP = netip.MustParseAddr("192.0.2.22")
	n.sync(two, peer(3, "drei"))
	n.expect("remove 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.2.0/24 192.0.2.22 [ ] [two]",
		"remove 10.5.3.0/24 192.0.2.3 [ ] [three]", "add 10.5.3.0/24 192.0.2.3 [ ] [drei]")

	restart() // peers are removed only after the store has answered
	if _, err := n.net.Sync(n.ctx, set(false, two)); err != nil {
		t.Fatal(err)
	}
	n.expect()
	n.sync(two)
	n.expect("remove 10.5.3.0/24 192.0.2.3 [ ] [drei]")

	n.stop() // the commands change: the subnet must be removed with the recorded command
	n.config["SubnetAddCommand"], n.config["SubnetRemoveCommand"] = `echo "new $SUBNET" >> $LOG`, `echo "gone $SUBNET" >> $LOG`
	n.mustStart()
	n.sync(two)
	n.sync()
	n.expect("remove 10.5.2.0/24 192.0.2.22 [ ] [two]", "new 10.5.2.0/24", "gone 10.5.2.0/24")

	n.stop()
	n.boot = "boot2"
	n.mustStart()
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []")
}

// TestAnotherBackendMeanwhile checks that all commands run again after another backend was used,
// and none if the last claim was of this backend.
func TestAnotherBackendMeanwhile(t *testing.T) {
	n := newNode(t, logging())
	const post = "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []"
	lease := n.own(n.mustStart())
	n.sync(peer(2, "two"))
	n.expect("pre []", post, "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
	n.stop()

	for _, other := range []string{"vxlan", ""} { // udp and alloc publish no type
		n.prev = subnet.Claim{BackendType: other, Endpoints: lease.Endpoints}
		n.mustStart()
		n.sync(peer(2, "two"))
		n.expect("shutdown 10.5.1.0/24", "pre []", post, "remove 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
		n.stop()
	}

	n.prev = subnet.Claim{BackendType: Type, Endpoints: lease.Endpoints}
	n.mustStart()
	n.sync(peer(2, "two"))
	n.expect()
}

// TestAnotherSubnet checks that all commands run again if the host has another subnet after a
// restart, and that none runs again if it has the same one.
func TestAnotherSubnet(t *testing.T) {
	n := newNode(t, logging())
	n.dual()
	lease := n.own(n.mustStart())
	n.sync(peer(2, "two"))
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1 fd00:5::/48 fd00:5:0:1::/64 2001:db8::1 []", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
	n.stop()

	n.prev = subnet.Claim{BackendType: Type, Endpoints: lease.Endpoints}
	n.mustStart()
	n.sync(peer(2, "two"))
	n.expect()
	n.stop()

	n.subnet = "10.5.9.0/24"
	n.prev.Endpoints = n.own(n.prev).Endpoints
	n.mustStart()
	n.sync(peer(2, "two"))
	n.expect("shutdown 10.5.1.0/24", "pre []", "post 10.5.0.0/16 10.5.9.0/24 192.0.2.1 fd00:5::/48 fd00:5:0:1::/64 2001:db8::1 []",
		"remove 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
}

// TestSubnetChangesHands checks that the subnet is removed and added again when it passes from
// one lease to another.
func TestSubnetChangesHands(t *testing.T) {
	n := newNode(t, logging())
	n.mustStart()
	before, after := peer(2, "two"), peer(2, "zwei")
	before.Key, after.Key = "node-z", "node-a"
	n.sync(before)
	n.sync(after)
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []", "add 10.5.2.0/24 192.0.2.2 [ ] [two]",
		"remove 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.2.0/24 192.0.2.2 [ ] [zwei]")
}

// TestInterfaceChanges checks that all commands run again when the external interface gets
// another address.
func TestInterfaceChanges(t *testing.T) {
	n := newNode(t, logging())
	n.mustStart()
	n.sync(peer(2, "two"))
	n.stop()
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
	n.env.Underlay.Addrs[0].Local = netip.MustParseAddr("192.0.2.101")
	if _, err := n.again(); err != nil {
		t.Fatal(err)
	}
	n.sync(peer(2, "two"))
	n.expect("shutdown 10.5.1.0/24", "pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.101  ::/0 <nil> []",
		"remove 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
}

func TestShutdown(t *testing.T) {
	n := newNode(t, logging())
	n.mustStart()
	n.sync(peer(2, "two"))
	n.stop()
	n.host.Shutdown(t.Context())
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []", "add 10.5.2.0/24 192.0.2.2 [ ] [two]", "shutdown 10.5.1.0/24")
	n.host.Shutdown(t.Context())
	n.expect()
	n.mustStart() // the shutdown may or may not have removed the subnets
	n.sync(peer(2, "two"))
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []",
		"remove 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
	n.stop()
	NewHost(Settings{}).Shutdown(t.Context()) // the process has another backend
	n.expect()
}

// TestRetire checks that Retire undoes all commands and deletes the state file, in the process
// that has served the network and in the next one.
func TestRetire(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		n := newNode(t, logging())
		n.mustStart()
		n.sync(peer(2, "two"), peer(3, "three"))
		n.stop()
		n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []",
			"add 10.5.2.0/24 192.0.2.2 [ ] [two]", "add 10.5.3.0/24 192.0.2.3 [ ] [three]")
		if restarted {
			n.host = NewHost(n.host.settings)
			n.host.store.boot = n.boot
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if err := n.host.Retire(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("%v after the end of the context", err)
		}
		for range 2 {
			if err := n.host.Retire(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		n.expect("remove 10.5.2.0/24 192.0.2.2 [ ] [two]", "remove 10.5.3.0/24 192.0.2.3 [ ] [three]", "shutdown 10.5.1.0/24")
		if exists, err := n.host.store.exists(); exists || err != nil {
			t.Errorf("the state file still exists (%v, %v)", exists, err)
		}
		n.mustStart() // the network exists again
		n.sync(peer(2, "two"))
		n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
		n.stop()
	}
}

// TestRetireBeforeStart checks that Retire also undoes PreStartupCommand if another configuration has come before
// the network was started. The next process knows that, too.
func TestRetireBeforeStart(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		n := newNode(t, logging())
		n.host = NewHost(Settings{Allow: true, StateDir: filepath.Join(n.dir, "state"), Name: "test"})
		n.host.store.boot = n.boot
		raw, err := json.Marshal(n.config)
		if err != nil {
			t.Fatal(err)
		}
		b, _, err := n.host.New(raw, n.env)
		if err != nil {
			t.Fatal(err)
		}
		had := subnet.Claim{BackendType: "vxlan", Endpoints: []subnet.Endpoint{{Subnet: netip.MustParsePrefix(n.subnet), PublicIP: netip.MustParseAddr("192.0.2.1")}}}

		if _, err := b.Claim(t.Context(), had); err != nil {
			t.Fatal(err)
		}
		if restarted {
			n.host = NewHost(n.host.settings)
			n.host.store.boot = n.boot
		}
		if err := n.host.Retire(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.expect("pre []", "shutdown 10.5.1.0/24")
	}
}

// TestRetireWhileShutdownHangs checks that Retire runs ShutdownCommand again if the last Retire has
// killed that command because its context has ended, also in another process.
func TestRetireWhileShutdownHangs(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		config := logging()
		config["ShutdownCommand"] = `echo "shutdown begins" >> $LOG; test -e $DIR/ok || sleep 60; echo "shutdown ends" >> $LOG`
		n := newNode(t, config)
		n.mustStart()
		n.stop()
		n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []")
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- n.host.Retire(ctx) }()
		n.expect("shutdown begins")
		end()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Retire = %v after the end of the context, want its error", err)
		}
		if restarted {
			n.host = NewHost(n.host.settings)
			n.host.store.boot = n.boot
		}
		if err := os.WriteFile(filepath.Join(n.dir, "ok"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := n.host.Retire(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		n.expect("shutdown begins", "shutdown ends")
		if exists, err := n.host.store.exists(); exists || err != nil {
			t.Errorf("the state file still exists (%v, %v)", exists, err)
		}
	}
}

// TestRecorded checks that a cleanup finds the state files in the state directory, and that a Host
// without a state directory does not take commands from the working directory.
func TestRecorded(t *testing.T) {
	t.Chdir(t.TempDir())
	const name = "flanneld-012345-commands"
	if err := os.WriteFile(name+".json", []byte(`{"version":1,"state":{"boot":"boot1"}}`), 0o600); err != nil {
		t.Fatal(err)
	}

	found, err := Recorded(".")
	if err != nil || len(found) != 1 {
		t.Fatalf("found %v, %v, want one", found, err)
	}
	for _, tt := range []struct {
		of   backend.Leftover
		want bool
	}{{found[0], true}, {NewHost(Settings{Name: name}).Leftovers()[0], false}} {
		if present, err := tt.of.Present(); present != tt.want || err != nil {
			t.Errorf("present %v, %v, want %v", present, err, tt.want)
		}
	}
}

// TestRetireAfterBoot checks that Retire deletes a state file of an earlier boot, and runs no command, because the
// boot has undone what commands did.
func TestRetireAfterBoot(t *testing.T) {
	n := newNode(t, logging())
	n.mustStart()
	n.sync(peer(2, "two"))
	n.stop()
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
	n.host = NewHost(n.host.settings)
	n.host.store.boot = "boot2"
	if err := n.host.Retire(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.expect()
	if _, err := os.Stat(filepath.Join(n.dir, "state", "test.json")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want no state file", err)
	}
}

// TestRetireWithBrokenDisk checks that Retire undoes the commands of this process also if it cannot
// write or read the state file. In the next process, which cannot know these commands, Retire must
// do nothing and return no error.
func TestRetireWithBrokenDisk(t *testing.T) {
	n := newNodeWithBrokenDisk(t)
	n.mustStart()
	n.sync(peer(2, "two"))
	n.stop()
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
	for range 2 {
		if err := n.host.Retire(t.Context()); !errors.Is(err, syscall.ENOTDIR) {
			t.Errorf("%v, want that the state file cannot be deleted", err)
		}
	}
	n.expect("remove 10.5.2.0/24 192.0.2.2 [ ] [two]", "shutdown 10.5.1.0/24")
	if err := NewHost(n.host.settings).Retire(t.Context()); err != nil {
		t.Errorf("%v in the next process, want none: the rest of the network must be removed", err)
	}
	n.expect()
}

func TestStartFails(t *testing.T) {
	n := newNode(t, logging())
	n.config["PostStartupCommand"] = `echo "post" >> $LOG; echo no such device; exit 3`
	if _, err := n.start(); errorText(err) != "PostStartupCommand: exit status 3: no such device" {
		t.Errorf("start: %v", err)
	}
	n.expect("pre []", "post", "post", "post")
	n.config["PostStartupCommand"] = `echo "post" >> $LOG`
	n.mustStart() // from the beginning, because the device may be incomplete
	n.expect("shutdown 10.5.1.0/24", "pre []", "post")
	n.stop()

	n.config["PreStartupCommand"] = `echo "pre" >> $LOG; test $(wc -l < $LOG) = 3 && echo third`
	if claim := n.mustStart(); string(claim.Endpoints[0].Data) != `"third"` {
		t.Errorf("claim is %+v", claim)
	}
	n.expect("shutdown 10.5.1.0/24", "pre", "pre", "post")
	n.stop()

	n.config["PreStartupCommand"] = `head -c 40000 /dev/zero | tr '\0' x`
	if _, err := n.start(); errorText(err) != "PreStartupCommand: its output has 40002 bytes as JSON, at most 16384 can be published" {
		t.Errorf("start: %v", err)
	}
}

// TestStartHangs expects that a command of the start which hangs runs once.
func TestStartHangs(t *testing.T) {
	n := newNode(t, map[string]any{"PostStartupCommand": "echo post >> $LOG; sleep 1000", "CommandTimeout": 1})
	if _, err := n.start(); !errors.Is(err, errTimeout) {
		t.Errorf("error %v, want that the command hangs", err)
	}
	n.expect("post")
}

// TestAddFails checks that other peers are served while the command of one peer fails.
func TestAddFails(t *testing.T) {
	n := newNode(t, map[string]any{
		"SubnetAddCommand":    `echo "add $SUBNET" >> $LOG; test $SUBNET != 10.5.2.0/24 || test -e $DIR/ok || { echo one; echo out of luck >&2; exit 2; }`,
		"SubnetRemoveCommand": `echo "remove $SUBNET" >> $LOG; exit 1`,
	})
	n.mustStart()
	want := map[string]string{"10.5.2.0-24": "SubnetAddCommand: exit status 2: out of luck"}
	for range 3 { // the command runs once, then pauses
		if diff := cmp.Diff(want, n.sync(peer(2, ""), peer(3, ""))); diff != "" {
			t.Errorf("refused (-want +got):\n%s", diff)
		}
	}
	n.expect("add 10.5.2.0/24", "add 10.5.3.0/24")
	n.sync(peer(2, ""), peer(3, ""), peer(4, ""))
	n.expect("add 10.5.4.0/24")

	if err := os.WriteFile(filepath.Join(n.dir, "ok"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(patience)
	for len(n.sync(peer(2, ""), peer(3, ""), peer(4, ""))) > 0 {
		if time.Now().After(deadline) {
			t.Fatal("the command does not run again")
		}
		<-time.After(20 * time.Millisecond)
	}
	n.expect("remove 10.5.2.0/24", "add 10.5.2.0/24")
}

// TestPausesAreIndependent checks that the pause of one peer does not depend on the failures of
// another.
func TestPausesAreIndependent(t *testing.T) {
	n := newNode(t, map[string]any{"SubnetAddCommand": "false"})
	n.mustStart()
	n.sync(peer(2, ""))
	old := n.net.(*network)
	old.mu.Lock()
	last := old.failures["10.5.2.0/24"]
	last.tries, last.next = 9, time.Now().Add(maxPause)
	old.failures["10.5.2.0/24"] = last
	old.mu.Unlock()

	for _, tc := range []struct {
		peers    []subnet.Lease
		from, to time.Duration
	}{
		{[]subnet.Lease{peer(2, "")}, maxPause - time.Minute, maxPause},
		{[]subnet.Lease{peer(2, ""), peer(3, "")}, 0, minPause},
	} {
		o, err := n.net.Sync(n.ctx, set(true, tc.peers...))
		if err != nil || o.Retry || o.Again <= tc.from || o.Again > tc.to {
			t.Errorf("%d peers: %+v, %v; want it again after %s to %s", len(tc.peers), o, err, tc.from, tc.to)
		}
	}
}

// TestAddFailsAndChanges checks that a change of the peer ends the pause.
func TestAddFailsAndChanges(t *testing.T) {
	n := newNode(t, map[string]any{"SubnetAddCommand": `echo "add $SUBNET" >> $LOG; grep good`})
	n.mustStart()
	if refused := n.sync(peer(2, "bad")); len(refused) != 1 {
		t.Errorf("refused: %v", refused)
	}
	if refused := n.sync(peer(2, "good")); len(refused) != 0 {
		t.Errorf("refused: %v", refused)
	}
	n.expect("add 10.5.2.0/24", "add 10.5.2.0/24")
}

func TestRemoveFails(t *testing.T) {
	n := newNode(t, map[string]any{"SubnetRemoveCommand": `echo "remove $SUBNET" >> $LOG; test -e $DIR/ok`})
	n.mustStart()
	n.sync(peer(2, ""))
	n.sync()
	n.expect("remove 10.5.2.0/24")
	if err := os.WriteFile(filepath.Join(n.dir, "ok"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(patience)
	for {
		o, err := n.net.Sync(n.ctx, set(true))
		if err == nil && o.Again == 0 {
			break
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("the command does not run again: %v", err)
		}
		<-time.After(20 * time.Millisecond)
	}
	n.expect("remove 10.5.2.0/24")
}

// TestHangingAdd checks that two peers do not wait for the command of a third peer that hangs,
// and that this command is killed after CommandTimeout.
func TestHangingAdd(t *testing.T) {
	n := newNode(t, map[string]any{
		"SubnetAddCommand": `test $SUBNET != 10.5.2.0/24 || sleep 1000; echo "add $SUBNET" >> $LOG`,
		"CommandTimeout":   3,
	})
	n.mustStart()
	begin := time.Now()
	refused := n.sync(peer(2, ""), peer(3, ""), peer(4, ""))
	if diff := cmp.Diff(map[string]string{"10.5.2.0-24": errRunning.Error()}, refused); diff != "" {
		t.Errorf("after %v refused (-want +got):\n%s", time.Since(begin), diff)
	}
	n.expect("add 10.5.3.0/24", "add 10.5.4.0/24")
	select {
	case <-n.net.Changed():
	case <-time.After(patience):
		t.Fatal("the command is not killed")
	}
	want := map[string]string{"10.5.2.0-24": "SubnetAddCommand: " + errTimeout.Error()}
	if diff := cmp.Diff(want, n.sync(peer(2, ""), peer(3, ""), peer(4, ""))); diff != "" {
		t.Errorf("after %v refused (-want +got):\n%s", time.Since(begin), diff)
	}
}

// TestStopWhileCommandsHang checks that a stop takes at most 20 s while a command hangs, and
// that the next process removes the subnet before it adds the subnet again.
func TestStopWhileCommandsHang(t *testing.T) {
	n := newNode(t, map[string]any{"SubnetAddCommand": `echo "add" >> $LOG; test -e $DIR/ok || sleep 1000`, "SubnetRemoveCommand": `echo "remove" >> $LOG`})
	n.mustStart()
	n.sync(peer(2, ""))
	begin := time.Now()
	n.stop()
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("the stop took %v", took)
	}
	if err := os.WriteFile(filepath.Join(n.dir, "ok"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.mustStart()
	n.sync(peer(2, ""))
	n.expect("add", "remove", "add")
}

// TestStopWhileRemoveHangs stops the daemon while SubnetRemoveCommand runs. It checks that the next
// process runs that command again, and then SubnetAddCommand with the present data, because the first
// removal may have succeeded in part.
func TestStopWhileRemoveHangs(t *testing.T) {
	n := newNode(t, map[string]any{"SubnetAddCommand": `echo "add $(cat)" >> $LOG`, "SubnetRemoveCommand": `echo "remove $(cat)" >> $LOG; test -e $DIR/ok || sleep 1000`})
	n.mustStart()
	n.sync(peer(2, "one"))
	n.sync(peer(2, "another"))
	n.stop()
	if err := os.WriteFile(filepath.Join(n.dir, "ok"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.mustStart()
	n.sync(peer(2, "one"))
	n.expect("add one", "remove one", "remove one", "add one")
}

func TestHostileData(t *testing.T) {
	n := newNode(t, map[string]any{"SubnetAddCommand": `cat > $DIR/seen`})
	n.mustStart()
	for _, hostile := range []string{
		"$(touch $DIR/pwned)", "`touch $DIR/pwned`", "; touch $DIR/pwned #", "' ; touch $DIR/pwned '", "a\nb\n", "\x00\x01\x7f",
		"PATH=/tmp", "-rf /", strings.Repeat("A", 200_000), "${SUBNET}",
	} {
		p := peer(2, hostile)
		if _, err := n.net.Check(p); err != nil {
			t.Errorf("Check(%.20q): %v", hostile, err)
		}
		if refused := n.sync(p); len(refused) > 0 {
			t.Errorf("%.20q: %v", hostile, refused)
		}
		if seen, err := os.ReadFile(filepath.Join(n.dir, "seen")); err != nil || string(seen) != hostile+"\n" {
			t.Errorf("command read %.40q, %v, want %.40q", seen, err, hostile)
		}
		if _, err := os.Stat(filepath.Join(n.dir, "pwned")); err == nil {
			t.Fatalf("%q was run", hostile)
		}
	}
	subnettest.CheckLeaseData(t, "extension", "", func(raw json.RawMessage) error {
		p := peer(2, "")
		p.Endpoints[0].Data = raw
		_, err := n.net.Check(p)
		return err
	})
}

// newNodeWithBrokenDisk returns a node that has a file in place of the state directory.
func newNodeWithBrokenDisk(t *testing.T) *node {
	t.Helper()
	n := newNode(t, logging())
	if err := os.WriteFile(filepath.Join(n.dir, "state"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestBrokenDisk(t *testing.T) {
	n := newNodeWithBrokenDisk(t)
	n.mustStart()
	n.sync(peer(2, "two"))
	n.sync(peer(2, "two"))
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []", "add 10.5.2.0/24 192.0.2.2 [ ] [two]")
}

// TestRandomWalk starts and stops simulated daemons at random, while peers come and go. Like
// those of ip(8), the commands fail to add a subnet twice and to remove a missing one. At
// random they do all their work and then report a failure. In the end every subnet must be as
// wanted.
func TestRandomWalk(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	n := newNode(t, map[string]any{
		"PreStartupCommand":   `rm -rf $DIR/net; mkdir $DIR/net`,
		"SubnetAddCommand":    `set -C; read data; f=$DIR/net/${SUBNET%/*}; echo "$PUBLIC_IP $data" > $f && ! test -e $DIR/broken`,
		"SubnetRemoveCommand": `rm $DIR/net/${SUBNET%/*} && ! test -e $DIR/broken`,
		"ShutdownCommand":     `rm -rf $DIR/net`,
	})
	n.mustStart()
	broken := filepath.Join(n.dir, "broken")
	peers := map[int]subnet.Lease{}
	for range 60 {
		switch r.IntN(6) {
		case 0:
			n.stop()
			if r.IntN(3) == 0 {
				n.host.Shutdown(t.Context())
			}
			n.mustStart()
		case 1:
			_ = os.WriteFile(broken, nil, 0o600)
		default:
			number := 2 + r.IntN(5)
			if delete(peers, number); r.IntN(3) > 0 {
				peers[number] = peer(number, fmt.Sprint(r.IntN(3)))
			}
		}
		n.sync(slices.Collect(maps.Values(peers))...)
		_ = os.Remove(broken)
	}
	deadline := time.Now().Add(patience)
	for {
		o, err := n.net.Sync(n.ctx, set(true, slices.Collect(maps.Values(peers))...))
		if err != nil {
			t.Fatal(err)
		}
		if o.Again == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("not as wanted in time: %+v", o)
		}
		<-time.After(50 * time.Millisecond)
	}
	want, got := map[string]string{}, map[string]string{}
	for _, p := range peers {
		e := p.Endpoints[0]
		want[e.Subnet.Addr().String()] = fmt.Sprintf("%s %s\n", e.PublicIP, strings.Trim(string(e.Data), `"`))
	}
	files, err := os.ReadDir(filepath.Join(n.dir, "net"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, _ := os.ReadFile(filepath.Join(n.dir, "net", f.Name()))
		got[f.Name()] = string(text)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("subnets (-want +got):\n%s", diff)
	}
}

// TestBlackhole checks that the blackhole route, which flanneld adds without a command, exists
// exactly if it is requested.
func TestBlackhole(t *testing.T) {
	n := newNode(t, map[string]any{})
	hole := dataplane.NewUnreachable(netip.MustParsePrefix("10.5.1.0/24"))
	for _, on := range []bool{true, false} {
		n.env.Blackhole = on
		n.mustStart()
		n.sync()
		state, err := n.env.Kernel.Read(t.Context(), n.env.Scope())
		if there := slices.Contains(state.Routes[hole.Dst], hole); err != nil || there != on {
			t.Errorf("with the option %v the route is there: %v, %v", on, there, err)
		}
		n.stop()
	}
}

// TestFamiliesOfAPeer checks that the subnets of a host whose address families change are removed
// before they are added with the other families, and not after that, although the store has another
// lease of the host.
func TestFamiliesOfAPeer(t *testing.T) {
	n := newNode(t, logging())
	n.dual()
	six := peer(2, "")
	six.Key = "six"
	six.Endpoints[0] = subnet.Endpoint{Subnet: netip.MustParsePrefix("fd00:5:0:2::/64"), PublicIP: netip.MustParseAddr("2001:db8::2")}
	both := peer(2, "")
	both.Key = "both"
	both.Endpoints = append(both.Endpoints, six.Endpoints...)
	const addSix, removeSix = "add   [fd00:5:0:2::/64 2001:db8::2] []", "remove   [fd00:5:0:2::/64 2001:db8::2] []"
	const addBoth, removeBoth = "add 10.5.2.0/24 192.0.2.2 [fd00:5:0:2::/64 2001:db8::2] []", "remove 10.5.2.0/24 192.0.2.2 [fd00:5:0:2::/64 2001:db8::2] []"
	const setUp = "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1 fd00:5::/48 fd00:5:0:1::/64 2001:db8::1 []"
	n.mustStart()
	n.sync(six)
	n.expect("pre []", setUp, addSix)
	for _, complete := range []bool{false, true} {
		if _, err := n.net.Sync(n.ctx, set(complete, both)); err != nil {
			t.Fatal(err)
		}
	}
	n.expect(removeSix, addBoth)
	for _, complete := range []bool{false, true} {
		if _, err := n.net.Sync(n.ctx, set(complete, six)); err != nil {
			t.Fatal(err)
		}
	}
	n.expect(removeBoth, addSix)
}

// TestFamiliesChangeWhileASessionEnds checks that everything which may have a subnet of a peer is removed before the subnet is
// added. A session that ends before it runs a job leaves two entries with one subnet: that of the last job for the host, and
// that of the job which it did not run.
func TestFamiliesChangeWhileASessionEnds(t *testing.T) {
	for i := range 8 { // the entries are found in random order
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			n := newNode(t, logging())
			n.dual()
			six := subnet.Endpoint{Subnet: netip.MustParsePrefix("fd00:5:0:2::/64"), PublicIP: netip.MustParseAddr("2001:db8::2")}
			before := peer(2, "")
			before.Endpoints = append(before.Endpoints, six)
			alone := peer(2, "")
			alone.Endpoints = []subnet.Endpoint{six}
			after := peer(3, "")
			after.Endpoints = append(after.Endpoints, six)

			n.mustStart()
			n.sync(before)
			n.cancel()
			_, _ = n.net.Sync(n.ctx, set(true, alone))
			n.stop()
			_ = os.Remove(filepath.Join(n.dir, "log"))
			n.mustStart()
			for _, complete := range []bool{false, true} {
				if _, err := n.net.Sync(n.ctx, set(complete, after)); err != nil {
					t.Fatal(err)
				}
			}
			n.expect("remove 10.5.2.0/24 192.0.2.2 [fd00:5:0:2::/64 2001:db8::2] []", "remove   [fd00:5:0:2::/64 2001:db8::2] []",
				"add 10.5.3.0/24 192.0.2.3 [fd00:5:0:2::/64 2001:db8::2] []")
		})
	}
}

// TestRecalled checks that commands of a recalled configuration run again only after recallWait.
func TestRecalled(t *testing.T) {
	n := newNode(t, logging())
	n.mustStart()
	n.stop()
	n.host.Shutdown(t.Context())
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []", "shutdown 10.5.1.0/24")
	n.env.Recalled = true
	if _, err := n.start(); err == nil || !strings.Contains(err.Error(), "the store gets time to answer") {
		t.Errorf("%v, want that no command runs yet", err)
	}
	n.expect()
	n.host.started = n.host.started.Add(-recallWait)
	if _, err := n.again(); err != nil {
		t.Error(err)
	}
	n.expect("pre []", "post 10.5.0.0/16 10.5.1.0/24 192.0.2.1  ::/0 <nil> []")
}
