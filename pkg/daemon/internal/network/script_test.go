// SPDX-License-Identifier: Apache-2.0

package network

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/scripttest"
	"github.com/flanneld/flanneld/pkg/base/tune"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/ownership"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/keeper"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/subnet"
)

// TestScripts runs the scripts in testdata. Each is the life of one network on one host, and prints its phases and
// what it does on lines that begin with four blanks below the command. testdata/README.md lists the commands.
func TestScripts(t *testing.T) {
	scripttest.Run(t, func(t *testing.T, script string) (played string) {
		synctest.Test(t, func(t *testing.T) { played = runScript(t, script) })
		return played
	})
}

func runScript(t *testing.T, script string) string {
	s := &scriptedHost{
		T: t, start: time.Now(), dir: t.TempDir(), store: newMemoryStore(), kernel: dataplanetest.New(),
		uplink: link(1500, "192.0.2.1"), uplinkIsThere: true, failing: map[string]bool{},
	}
	defer s.stop()
	s.Play(script, s.command)
	s.stop()
	return s.String()
}

// scriptedHost is a host with one network, and the store.
type scriptedHost struct {
	*testing.T
	scripttest.Transcript
	start   time.Time
	dir     string
	store   *memoryStore
	kernel  *dataplanetest.Kernel
	network *Network
	end     func() // ends the network, and waits for that; nil while it does not run

	mu            sync.Mutex
	uplink        underlay.Interface
	uplinkIsThere bool
	moved         wait.Broadcast  // sent when the uplink changes
	held          subnet.Lease    // the last lease that the store has given
	away          bool            // the store does not answer
	answers       wait.Broadcast  // sent when it does again
	failing       map[string]bool // types of backends that do not start
}

// did prints what the network does, its effects last.
func (s *scriptedHost) did(format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	s.Did(time.Since(s.start), slices.ContainsFunc(effects, func(e string) bool { return strings.Contains(what, e) }), what)
}

// effects are parts of lines about what follows from others of the same moment.
var effects = []string{"rules for", "carries to", "ready", "Wrote subnet file", "the network uses", "lease is up to date", "going on from", "acquired", "lease: no answer"}

func (s *scriptedHost) command(name string, args []string) {
	defer synctest.Wait()
	switch name {
	case "config":
		s.store.SetConfig(configText(args))
	case "quickly": // several changes without a pause, so that nothing happens between them
		for text := range strings.SplitSeq(strings.Join(args, " "), " then ") {
			s.store.SetConfig(configText(strings.Fields(text)))
			time.Sleep(5 * time.Millisecond)
		}
	case "peer":
		p := netip.MustParsePrefix(args[0])
		s.store.Put(subnet.Lease{Key: args[0], BackendType: args[2], Expires: time.Now().Add(24 * time.Hour), Endpoints: []subnet.Endpoint{
			{Subnet: p, PublicIP: netip.MustParseAddr(args[1])},
		}})
	case "delete":
		s.store.Delete(args[0])
	case "uplink":
		s.mu.Lock()
		if s.uplinkIsThere = args[0] != "none"; s.uplinkIsThere {
			mtu, err := strconv.Atoi(args[1])
			if err != nil {
				s.Fatal(err)
			}
			s.uplink = link(mtu, args[0])
		}
		s.mu.Unlock()
		s.moved.Send()
	case "away", "back":
		s.mu.Lock()
		s.away = name == "away"
		s.mu.Unlock()
		s.answers.Send()
	case "fails", "works":
		s.mu.Lock()
		s.failing[args[0]] = name == "fails"
		s.mu.Unlock()
	case "start":
		s.stop()
		s.begin(args)
	case "stop":
		s.stop()
	case "retire":
		s.stop()
		own, others := s.keys()
		for _, path := range []string{own, others} {
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				s.Fatal(err)
			}
		}
		s.open(nil)
		if err := s.network.Retire(s.context(), false); err != nil {
			s.did("retire: %v", err)
		}
		if _, err := os.Stat(own); err == nil {
			s.did("the key is left")
		}
		if _, err := os.Stat(others); err != nil {
			s.did("the key of the operator is gone: %v", err)
		}
		s.network.Close()
		s.list()
	case "kernel":
		s.list()
	case "run":
		d, err := time.ParseDuration(args[0])
		if err != nil {
			s.Fatal(err)
		}
		time.Sleep(d)
	default:
		s.Fatalf("there is no command %q", name)
	}
}

// configText returns the configuration of a command. Without words there is none. "red 10.5.1.0 MTU=1400" is a
// backend with its keys in the network 10.5.0.0/16, in which only this subnet may be assigned. Other words are
// the text of the configuration.
func configText(words []string) string {
	if len(words) < 2 || strings.HasPrefix(words[0], "{") {
		return strings.Join(words, " ")
	}
	subnet := netip.MustParseAddr(words[1])
	network, _ := subnet.Prefix(16)
	be := map[string]any{"Type": words[0]}
	config := map[string]any{"Network": network, "SubnetMin": subnet, "SubnetMax": subnet, "Backend": be}
	for _, w := range words[2:] {
		key, value, _ := strings.Cut(w, "=")
		switch number, err := strconv.Atoi(value); {
		case key == "EnableNFTables":
			config[key] = value == "true"
		case err == nil:
			be[key] = number
		default:
			be[key] = value
		}
	}
	text, err := json.Marshal(config)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// keys returns the paths of the two files of each backend: its own, and that of an operator in the same directory.
func (s *scriptedHost) keys() (own, others string) {
	return filepath.Join(s.dir, "own.key"), filepath.Join(s.dir, "operator.key")
}

// list prints what there is on the host and in the store.
func (s *scriptedHost) list() {
	have, err := s.kernel.Read(s.Context(), dataplane.Scope{Devices: []string{"red", "red2", "blue"}})
	if err != nil {
		s.Fatal(err)
	}
	var devices, leases []string
	for name := range have.Links {
		devices = append(devices, name)
	}
	slices.Sort(devices)
	for _, l := range s.store.Leases() {
		leases = append(leases, l.Key)
	}
	_, err = os.Stat(filepath.Join(s.dir, "subnet.env"))
	s.did("devices %v, leases %v, subnet file %v", devices, leases, err == nil)
}

func (s *scriptedHost) context() context.Context {
	return klog.NewContext(context.Background(), funcr.New(func(_, args string) {
		_, text, _ := strings.Cut(args, `"msg"=`)
		s.did("log %s", strings.NewReplacer(` "error"=null`, "", s.dir, "").Replace(text))
	}, funcr.Options{}))
}

// open opens the network as Open does, with a store, a kernel and an uplink of the script.
func (s *scriptedHost) open(args []string) {
	registry, err := backend.NewRegistry(s.entry("red"), s.entry("blue"))
	if err != nil {
		s.Fatal(err)
	}
	ctx := s.context()
	o, err := options.Parse(append([]string{"--iface=eth0", "--state-dir=" + s.dir, "--subnet-file=" + filepath.Join(s.dir, "subnet.env")}, args...), nil)
	if err != nil {
		s.Fatal(err)
	}
	state, past, err := lastknown.Open(ctx, o)
	if err != nil {
		s.Fatal(err)
	}
	counters := metrics.New("", false, nil)
	ready := newReadiness(o, state.LeaseEnd)
	n := &Network{
		host: &Host{Tuner: &tune.Tuner{}}, devices: ownership.NewLocks(s.dir), opts: o, catalog: backend.Catalog{Registry: registry},
		state: state, past: past, store: scriptedStore{s.store.Manager(), s}, ready: ready, metrics: counters,
		rules: scriptedRules{s}, progress: &Progress{entered: func(now Phase) { s.did("phase %s", now) }},
		surroundings: surroundings{
			chooseUplink: s.chooseUplink, watchUplink: s.watchUplink,
			openKernel: func(linux.Options) (kernel, error) { return scriptedKernel{s.kernel}, nil },
			random:     func(most time.Duration) time.Duration { return most / 2 },
		},
	}
	n.config = &configWatch{follow: n.follows(), validate: n.validate}
	s.network = n
}

// begin starts the network with these flags.
func (s *scriptedHost) begin(args []string) {
	s.open(args)
	ctx, cancel := context.WithCancel(s.context())
	n := s.network
	var wg sync.WaitGroup
	wg.Go(func() { _ = n.state.Run(ctx) })
	wg.Go(func() {
		select {
		case <-n.Up():
			s.did("ready")
		case <-ctx.Done():
		}
	})
	wg.Go(func() {
		if err := n.startAndServe(ctx); err != nil {
			s.did("the network ends: %v", err)
		}
	})
	s.end = func() {
		cancel()
		wg.Wait()
		n.Close()
	}
}

func (s *scriptedHost) stop() {
	if s.end != nil {
		s.end()
		s.end = nil
	}
}

func (s *scriptedHost) chooseUplink(ctx context.Context, _ underlay.Options, limit time.Duration) (underlay.Interface, error) {
	for end := time.Now().Add(limit); ; {
		moved := s.moved.Changed()
		s.mu.Lock()
		now, there := s.uplink, s.uplinkIsThere
		s.mu.Unlock()
		if there {
			return now, nil
		}
		if !time.Now().Before(end) {
			return underlay.Interface{}, errors.New("there is no external interface")
		}
		if err := wait.ForOr(ctx, time.Until(end), moved); err != nil {
			return underlay.Interface{}, err
		}
	}
}

func (s *scriptedHost) watchUplink(ctx context.Context, _ underlay.Options, before underlay.Interface, changed func(underlay.Interface), _ func(error)) error {
	for {
		moved := s.moved.Changed()
		s.mu.Lock()
		now, there := s.uplink, s.uplinkIsThere
		s.mu.Unlock()
		if there && (now.MTU != before.MTU || now.Index != before.Index || !slices.Equal(now.Addrs, before.Addrs)) {
			before = now
			changed(now)
		}
		if wait.ForOr(ctx, time.Hour, moved) != nil {
			return nil
		}
	}
}

// scriptedKernel does not announce what it has, because nothing else changes it.
type scriptedKernel struct{ *dataplanetest.Kernel }

func (scriptedKernel) Close() error { return nil }

// scriptedRules are traffic rules that are always right.
type scriptedRules struct{ *scriptedHost }

func (s scriptedRules) Keep(ctx context.Context, _ keeper.Choice, p firewall.Policy, tried func()) {
	var networks []netip.Prefix
	for _, n := range p.Networks {
		networks = append(networks, n.Network)
	}
	s.did("rules for %v", networks)
	s.network.ready.report(partRules, nil)
	tried()
	<-ctx.Done()
}

func (s scriptedRules) Remove(_ context.Context, networks []netip.Prefix) error {
	s.did("remove the rules for %v", networks)
	return nil
}

func (scriptedRules) Flavour() keeper.Flavour { return keeper.NFTables }

// answerTime is the time that the store takes for an answer, and a backend for its start.
const answerTime = 10 * time.Millisecond

// leaseTime is the time that the store takes for a lease. It differs, so that the order of the answers is known.
const leaseTime = 17 * time.Millisecond

// scriptedStore is a store that may not answer.
type scriptedStore struct {
	*memoryManager
	*scriptedHost
}

// answer waits until the store answers, after the given time.
func (s scriptedStore) answer(ctx context.Context, takes time.Duration) error {
	for {
		answers := s.answers.Changed()
		s.mu.Lock()
		away := s.away
		s.mu.Unlock()
		if !away {
			return wait.For(ctx, takes)
		}
		if err := wait.ForOr(ctx, time.Hour, answers); err != nil {
			return err
		}
	}
}

func (s scriptedStore) Config(ctx context.Context) (subnet.Config, error) {
	if err := s.answer(ctx, answerTime); err != nil {
		return subnet.Config{}, err
	}
	return s.memoryManager.Config(ctx)
}

func (s scriptedStore) Recall(ctx context.Context, own subnet.Claim) (subnet.Claim, error) {
	if err := s.answer(ctx, answerTime); err != nil {
		return subnet.Claim{}, err
	}
	return s.memoryManager.Recall(ctx, own)
}

func (s scriptedStore) Acquire(ctx context.Context, cfg subnet.Config, c subnet.Claim) (own subnet.Lease, err error) {
	if err := s.answer(ctx, leaseTime); err != nil {
		s.did("lease: no answer: %v", context.Cause(ctx))
		return own, err
	}
	s.mu.Lock() // until held has the lease, which Keep compares with what the store has
	if own, err = s.memoryManager.Acquire(ctx, cfg, c); err == nil {
		s.held = own
	}
	s.mu.Unlock()

	if err != nil {
		s.did("lease: %v", err)
	} else {
		s.did("lease %s, %s at %s", own.Key, own.BackendType, own.Endpoints[0].PublicIP)
	}
	return own, err
}

func (s scriptedStore) Watch(ctx context.Context, sink func(subnet.Update)) error {
	if err := s.answer(ctx, answerTime); err != nil {
		return err
	}
	return s.memoryManager.Watch(ctx, sink)
}

func (s scriptedStore) WatchConfig(ctx context.Context, sink func([]byte)) error {
	if err := s.answer(ctx, answerTime); err != nil {
		return err
	}
	last := "none"
	return s.memoryManager.WatchConfig(ctx, func(text []byte) {
		if string(text) != last { // other changes of the store are not of interest
			last = string(text)
			sink(text)
		}
	})
}

func (s scriptedStore) Keep(ctx context.Context, own subnet.Lease) error {
	if err := s.answer(ctx, answerTime); err != nil {
		return err
	}
	for {
		err := s.memoryManager.Keep(ctx, own)
		s.mu.Lock()
		now := s.held
		s.mu.Unlock()
		if !errors.Is(err, subnet.ErrLeaseLost) || now.Key != own.Key || now.Endpoints[0].PublicIP == own.Endpoints[0].PublicIP {
			return err
		}
		own = now // the session has published the lease with another address
	}
}

func (s scriptedStore) Release(_ context.Context, own subnet.Lease) error {
	s.store.Delete(own.Key)
	return nil
}

func (s scriptedStore) Reconnect() { s.did("reconnect the store") }

func (scriptedStore) Close() error { return nil }

// entry returns a type of backends. Its network has one device, which the key Device names.
func (s *scriptedHost) entry(kind string) backend.Entry {
	return backend.Entry{Type: kind, Factory: func(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
		var keys struct {
			Type, Device string
			MTU          int
		}
		if err := json.Unmarshal(raw, &keys); err != nil {
			return nil, nil, err
		}
		if keys.MTU > 9000 {
			return nil, nil, fmt.Errorf("Backend.MTU is %d, want at most 9000", keys.MTU)
		}
		if env.Underlay.MTU < 1000 && kind == "red" {
			return nil, nil, fmt.Errorf("the underlay MTU is %d, want at least 1000", env.Underlay.MTU)
		}
		return scriptedBackend{s, env, kind, cmp.Or(keys.Device, kind), cmp.Or(keys.MTU, env.Underlay.MTU-50)}, nil, nil
	}}
}

// scriptedBackend is a backend and its network.
type scriptedBackend struct {
	*scriptedHost
	env          backend.Env
	kind, device string
	mtu          int
}

func (b scriptedBackend) scope() dataplane.Scope {
	return dataplane.Scope{Devices: []string{b.device}, Networks: b.env.Config.Prefixes()}
}

func (b scriptedBackend) Describe() backend.Description {
	own, others := b.keys()
	return backend.Description{Scope: b.scope(), LeaseType: b.kind, MTU: b.mtu, Kept: []string{own}, Files: []string{others}}
}

func (b scriptedBackend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	c := subnet.Claim{BackendType: b.kind}
	for _, a := range b.env.Underlay.Addrs {
		e := subnet.Endpoint{PublicIP: a.Public}
		if before, ok := prev.Endpoint(prefix.FamilyOf(a.Public)); ok {
			e.Subnet = before.Subnet
		}
		c.Endpoints = append(c.Endpoints, e)
	}
	return c, nil
}

func (b scriptedBackend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	if err := wait.For(ctx, answerTime); err != nil {
		return nil, err
	}
	b.mu.Lock()
	failing := b.failing[b.kind]
	b.mu.Unlock()
	if failing {
		b.did("%s does not start on device %s", b.kind, b.device)
		return nil, errors.New("the device is in use")
	}
	b.did("start %s for %s on device %s with MTU %d at %s", b.kind, own.Key, b.device, b.mtu, b.env.Underlay.Addrs[0].Local)
	if have, _ := b.kernel.Read(ctx, b.scope()); len(have.Links) == 0 {
		add := []dataplane.Op{{Object: dataplane.Link{Name: b.device, Kind: dataplane.KindVXLAN, MTU: b.mtu, VXLAN: dataplane.VXLAN{VNI: map[string]int{"red": 1, "red2": 2, "blue": 3}[b.device], Port: 8472, Local: b.env.Underlay.Addrs[0].Local, Underlay: "eth0"}}}}
		if errs := b.kernel.Apply(ctx, add); len(errs) > 0 {
			return nil, errs[0]
		}
	}
	return &scriptedNetwork{scriptedBackend: b}, nil
}

// scriptedNetwork is the network of a scriptedBackend.
type scriptedNetwork struct {
	scriptedBackend
	peers string
}

func (*scriptedNetwork) Check(subnet.Lease) ([]string, error) { return nil, nil }

func (n *scriptedNetwork) Sync(_ context.Context, set backend.Set) (backend.Outcome, error) {
	var keys []string
	for key := range set.Leases {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	if peers := fmt.Sprint(keys); peers != n.peers {
		n.peers = peers
		n.did("%s carries to %s", n.kind, peers)
	}
	return backend.Outcome{}, nil
}

func (*scriptedNetwork) Report() backend.NetworkReport { return backend.NetworkReport{} }

func (*scriptedNetwork) Changed() <-chan struct{} { return nil }

func (n *scriptedNetwork) Close() error {
	n.did("stop %s on device %s", n.kind, n.device)
	return nil
}
