// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

// Media types that a watch can request: complete Nodes, or only their metadata.
const (
	kubeFull     = "application/vnd.kubernetes.protobuf"
	kubeMetadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
)

const (
	kubeGroup   = "Kubernetes"
	kubeOwn     = "bench-host1"
	kubeRate    = 100 // heartbeats per second
	kubeWatches = 10  // number of bare watches at the same time, so that the cost of one is measurable
)

// measureKube measures the daemon with a real API server and thousands of Nodes.
func (r *runner) measureKube(ctx context.Context) error {
	for _, h := range r.lab.Hosts() {
		if err := r.clean(ctx, h); err != nil {
			return err
		}
	}
	if err := r.configure(ctx, "vxlan", 0); err != nil {
		return err
	}
	s, err := r.startKube(ctx, r.apiserver)
	if err != nil {
		return err
	}
	defer func() {
		s.close()
		r.backend = "" // make the next configure write everything again
	}()

	r.peers = makePeers(r.large)
	own := map[string]any{
		"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": kubeOwn},
		"spec": map[string]any{"podCIDR": "10.128.0.0/24", "podCIDRs": []string{"10.128.0.0/24"}},
	}

	body, err := json.Marshal(own)
	if err != nil {
		return err
	}
	if err := s.fill(ctx, r.peers, body); err != nil {
		return fmt.Errorf("make nodes: %w", err)
	}

	for range r.rounds {
		if err := r.kubeStart(ctx, s); err != nil {
			return err
		}
	}
	if err := r.kubeBeats(ctx, s); err != nil {
		return err
	}
	if err := r.kubeEvents(ctx, s); err != nil {
		return err
	}
	if _, err := r.lab.Host(1).Daemon().Stop(ctx); err != nil {
		return err
	}
	return r.kubeServerCost(ctx, s)
}

// kubeDaemon starts the daemon on host 1 and waits until the kernel has all objects of the peers.
func (r *runner) kubeDaemon(ctx context.Context, s *kubeServer) (st start, err error) {
	config, err := s.kubeconfig()
	if err != nil {
		return st, err
	}
	network := filepath.Join(s.dir, "net-conf.json")
	if err := os.WriteFile(network, []byte(`{"Network":"`+podNetwork+`","Backend":{"Type":"vxlan"}}`), 0o600); err != nil {
		return st, err
	}
	h := r.lab.Host(1)
	began := time.Now()
	st.daemon, err = h.StartFlanneld(ctx, lab.FlanneldOptions{
		Args: []string{"--kube-subnet-mgr", "--kubeconfig-file=" + config, "--net-config-path=" + network},
		Env:  []string{"NODE_NAME=" + kubeOwn},
	})
	if err != nil {
		return st, err
	}
	return st, r.follow(ctx, h, began, &st)
}

// kubeStart measures a cold start, and a restart from the last known state.
func (r *runner) kubeStart(ctx context.Context, s *kubeServer) error {
	n := r.large
	h := r.lab.Host(1)
	if err := r.clean(ctx, h); err != nil {
		return err
	}
	list, size, err := s.bareList(ctx)
	if err != nil {
		return err
	}
	limit, _, err := r.limit(ctx, nil, r.peers, objectsOf("vxlan"))
	if err != nil {
		return err
	}
	if err := r.clean(ctx, r.lab.Host(2)); err != nil {
		return err
	}
	before, err := received(ctx, h)
	if err != nil {
		return err
	}
	st, err := r.kubeDaemon(ctx, s)
	if err != nil {
		return err
	}
	after, err := received(ctx, h)
	if err != nil {
		return err
	}
	if err := r.verify(ctx, h, n); err != nil {
		return err
	}
	r.report.add(kubeGroup, "exec to subnet.env", n, "ms", ms(st.file), 300)
	r.report.add(kubeGroup, "exec to all programmed", n, "ms", ms(st.all), 3000)
	r.report.add(kubeGroup, "bare list, protobuf", n, "ms", ms(list))
	r.report.add(kubeGroup, "bare list, bytes", n, "MB", mb(float64(size)))
	r.report.add(kubeGroup, "limit: kernel objects", n, "ms", ms(limit))
	r.report.add(kubeGroup, "exec to all programmed / (bare list + limit)", n, "×", float64(st.all)/float64(list+limit), 1.5)
	r.report.add(kubeGroup, "received until then", n, "MB", mb(after-before))
	r.report.add(kubeGroup, "CPU until then", n, "ms", ms(st.cpu))
	r.report.add(kubeGroup, "peak RSS", n, "MB", mb(st.peak), 110)
	if err := untilReady(ctx, st.daemon); err != nil {
		return err
	}
	if err := wait.For(ctx, 3*time.Second); err != nil { // the daemon writes its state file meanwhile
		return err
	}
	if _, err := st.daemon.Stop(ctx); err != nil {
		return err
	}
	if before, err = received(ctx, h); err != nil {
		return err
	}
	began := time.Now()
	if st, err = r.kubeDaemon(ctx, s); err != nil {
		return err
	}
	if err := untilReady(ctx, st.daemon); err != nil {
		return err
	}
	ready := time.Since(began)
	if after, err = received(ctx, h); err != nil {
		return err
	}
	r.report.add(kubeGroup, "restart: exec to ready", n, "ms", ms(ready))
	r.report.add(kubeGroup, "restart: received until then", n, "MB", mb(after-before))
	return nil
}

// kubeBeats measures the cost of heartbeats of Nodes: updates in which nothing changes that the
// daemon needs.
func (r *runner) kubeBeats(ctx context.Context, s *kubeServer) error {
	n := r.large
	h := r.lab.Host(1)
	d := h.Daemon()
	if err := wait.For(ctx, 10*time.Second); err != nil {
		return err
	}
	m, err := figures.ProcessMemory(d.PID())
	if err != nil {
		return err
	}
	r.report.add(kubeGroup, "RSS", n, "MB", mb(m.Anonymous+m.File), 45)
	r.report.add(kubeGroup, "RSS, anonymous", n, "MB", mb(m.Anonymous))
	count, err := r.countWrites(ctx, h)
	if err != nil {
		return err
	}
	log := len(d.Log())
	cpu, err1 := figures.ProcessCPU(d.PID())
	bytes, err2 := received(ctx, h)
	server, err3 := figures.ProcessCPU(s.api.PID())
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	beats, err := s.heartbeats(ctx, r.peers, kubeRate, r.atRest)
	if err != nil {
		return fmt.Errorf("heartbeats: %w", err)
	}
	if err := wait.For(ctx, time.Second); err != nil {
		return err
	}
	cpu2, err1 := figures.ProcessCPU(d.PID())
	bytes2, err2 := received(ctx, h)
	server2, err3 := figures.ProcessCPU(s.api.PID())
	writes, err4 := count()
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	m, err = figures.ProcessMemory(d.PID())
	if err != nil {
		return err
	}
	per := float64(beats)
	r.report.add(kubeGroup, "a heartbeat: CPU of the daemon", n, "ms", ms(cpu2-cpu)/per, 0.4)
	r.report.add(kubeGroup, "a heartbeat: bytes received", n, "kB", (bytes2-bytes)/per/1000)
	r.report.add(kubeGroup, "heartbeats made", n, "", per)
	r.report.add(kubeGroup, "heartbeats: kernel changes", n, "", float64(writes), 0)
	r.report.add(kubeGroup, "heartbeats: bytes logged", n, "", float64(len(d.Log())-log), 0)
	r.report.add(kubeGroup, "heartbeats: RSS after", n, "MB", mb(m.Anonymous+m.File), 45)
	r.report.add(kubeGroup, "a heartbeat: CPU of the API server, the write included", n, "ms", ms(server2-server)/per)
	return nil
}

// requestPause, for each Node, is the pause of the daemon between two requests for new Nodes: a Node that comes sooner waits, and
// is requested together.
const requestPause = 100 * time.Microsecond

// kubeEvents measures the time from a request that adds or removes one Node until the kernel has
// announced the last change. It also measures the time until a bare watch has an event of that
// request.
func (r *runner) kubeEvents(ctx context.Context, s *kubeServer) error {
	n := r.large
	p := makePeer(n)
	announced, stop, err := r.listen(ctx, r.lab.Host(1), p)
	if err != nil {
		return err
	}
	defer stop()
	bare, err := s.watchBare(ctx, kubeMetadata)
	if err != nil {
		return err
	}
	defer bare.stop()
	var add, remove, addWatch, removeWatch []float64
	for range r.eventCount {
		for _, step := range []struct {
			into, watch *[]float64
			write       func(context.Context, peer) error
			gone        bool
		}{{&add, &addWatch, s.addNode, false}, {&remove, &removeWatch, s.removeNode, true}} {
			if err := wait.For(ctx, 3*eventPause+requestPause*time.Duration(n)); err != nil {
				return err
			}
			bare.drain()
			written := make(chan error, 1)
			began := time.Now()
			go func() { written <- step.write(ctx, p) }()
			at, err := announced(step.gone)
			if err := errors.Join(err, <-written); err != nil {
				return err
			}
			*step.into = append(*step.into, ms(at.Sub(began)))
			if at, ok := bare.first(); ok {
				*step.watch = append(*step.watch, ms(at.Sub(began)))
			}
		}
	}

	r.report.add(kubeGroup, "one node added, p50", n, "ms", quantile(add, 0.5))
	r.report.add(kubeGroup, "one node removed, p50", n, "ms", quantile(remove, 0.5))
	r.report.add(kubeGroup, "bare watch of metadata, node added, p50", n, "ms", quantile(addWatch, 0.5))
	r.report.add(kubeGroup, "bare watch of metadata, node removed, p50", n, "ms", quantile(removeWatch, 0.5))
	r.report.add(kubeGroup, "one node added, p50 / bare watch", n, "×", quantile(add, 0.5)/quantile(addWatch, 0.5), 1.5)
	r.report.add(kubeGroup, "one node removed, p50 / bare watch", n, "×", quantile(remove, 0.5)/quantile(removeWatch, 0.5), 1.5)
	return nil
}

// kubeServerCost measures the cost of a watch whose client ignores the events, with complete
// Nodes and with metadata. It records the cost for the client, and that for the API server beyond
// the cost of the heartbeats themselves.
func (r *runner) kubeServerCost(ctx context.Context, s *kubeServer) error {
	n := r.large
	lasting := r.atRest / 2
	for range max(1, r.rounds/3) {
		base, _, _, err := r.watchCost(ctx, s, "", lasting)
		if err != nil {
			return err
		}

		for _, k := range []struct{ name, kind string }{{"whole Nodes", kubeFull}, {"metadata", kubeMetadata}} {
			server, client, bytes, err := r.watchCost(ctx, s, k.kind, lasting)
			if err != nil {
				return err
			}
			watch := "a bare watch of " + k.name
			r.report.add(kubeGroup, watch+": bytes received a heartbeat", n, "kB", bytes/1000)
			if k.kind == kubeMetadata {
				r.relate("a heartbeat: bytes received", bytes/1000, 1.1)
				r.relate("a heartbeat: CPU of the daemon", client, 2)
			}
			r.report.add(kubeGroup, watch+": CPU of the client a heartbeat", n, "ms", client)
			r.report.add(kubeGroup, watch+": CPU of the API server for 1,000 heartbeats", n, "s", (server-base)/kubeWatches)
		}
	}
	return nil
}

// relate records a ratio: the median of the metric called name, divided by bare, the value of a
// bare watch of metadata.
func (r *runner) relate(name string, bare, target float64) {
	if m := r.report.find(kubeGroup, name, r.large); m != nil {
		r.report.add(kubeGroup, name+" / bare watch of metadata", r.large, "×", m.median()/bare, target)
	}
}

// watchCost sends heartbeats while kubeWatches processes watch. If kind is empty, no process
// watches. server is the CPU time of the API server in milliseconds per heartbeat. client and
// bytes are the CPU time and the received bytes of one watch per heartbeat.
func (r *runner) watchCost(ctx context.Context, s *kubeServer, kind string, lasting time.Duration) (server, client, bytes float64, err error) {
	var watchers []int // process IDs
	for range kubeWatches {
		if kind == "" {
			break
		}
		pid, stop, err := r.startBare(ctx, plainKubeWatch, s.addr+" "+kind)
		if err != nil {
			return 0, 0, 0, fmt.Errorf("bare watch: %w", err)
		}
		defer stop()
		watchers = append(watchers, pid)
	}
	if err := wait.For(ctx, 2*time.Second); err != nil {
		return 0, 0, 0, err
	}
	sum := func() (serverCPU, clientCPU time.Duration, in float64, err error) {
		serverCPU, err = figures.ProcessCPU(s.api.PID())
		for _, w := range watchers {
			cpu, err2 := figures.ProcessCPU(w)
			clientCPU, err = clientCPU+cpu, errors.Join(err, err2)
		}
		in, err2 := received(ctx, r.lab.Host(1))
		return serverCPU, clientCPU, in, errors.Join(err, err2)
	}

	server0, client0, in0, err := sum()
	if err != nil {
		return 0, 0, 0, err
	}
	beats, err := s.heartbeats(ctx, r.peers, kubeRate, lasting)
	if err == nil {
		err = wait.For(ctx, time.Second)
	}
	if err != nil {
		return 0, 0, 0, err
	}
	server1, client1, in1, err := sum()
	per := float64(beats)
	return ms(server1-server0) / per, ms(client1-client0) / per / kubeWatches, (in1 - in0) / per / kubeWatches, err
}

// runKubeWatch watches the Nodes of an API server and decodes nothing. config is the address and
// the media type, with a space between them. It reports that the watch has begun.
func runKubeWatch(config string) error {
	addr, kind, _ := strings.Cut(config, " ")
	s := &kubeServer{addr: addr, client: &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // this process does not have the CA of the lab
		ForceAttemptHTTP2: true, DisableCompression: true,
	}}}

	w, err := s.watchBare(context.Background(), kind)
	if err != nil {
		return err
	}
	if err := sayThere(); err != nil {
		return err
	}
	w.wait()
	return errors.New("the watch has ended")
}

// received returns the number of bytes that eth0 of a host has received.
func received(ctx context.Context, h *lab.Host) (bytes float64, err error) {
	err = h.Netlink(ctx, func(nl *netlink.Handle) error {
		link, err := nl.LinkByName("eth0")
		if err == nil {
			bytes = float64(link.Attrs().Statistics.RxBytes)
		}
		return err
	})
	return bytes, err
}

// bareList reads the list of all Nodes and discards it. It returns the time that this took and
// the size of the list.
func (s *kubeServer) bareList(ctx context.Context) (took time.Duration, size int64, err error) {
	began := time.Now()
	resp, err := s.request(ctx, http.MethodGet, nodesPath+"?resourceVersion=0", kubeFull, nil)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	size, err = io.Copy(io.Discard, resp.Body)
	return time.Since(began), size, err
}

// bareWatch receives the events of a watch without decoding them, and records when they arrive.
type bareWatch struct {
	at   chan time.Time // times of arrival; if a thousand are waiting, further ones are dropped
	stop func()
	wait func()
}

func (s *kubeServer) watchBare(ctx context.Context, kind string) (*bareWatch, error) {
	ctx, cancel := context.WithCancel(ctx)
	one, err := s.do(ctx, http.MethodGet, nodesPath+"?limit=1", "application/json", nil)
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	if err == nil {
		err = json.Unmarshal(one, &list)
	}
	var resp *http.Response
	if err == nil {
		resp, err = s.request(ctx, http.MethodGet, nodesPath+"?watch=true&resourceVersion="+list.Metadata.ResourceVersion, kind, nil)
	}
	if err != nil {
		cancel()
		return nil, err
	}
	w := &bareWatch{at: make(chan time.Time, 1000)}
	var wg sync.WaitGroup
	w.wait = wg.Wait
	w.stop = func() { cancel(); wg.Wait() }
	wg.Go(func() {
		defer resp.Body.Close()
		var length [4]byte
		for {
			if _, err := io.ReadFull(resp.Body, length[:]); err != nil {
				return
			}
			n := int64(binary.BigEndian.Uint32(length[:]))
			if _, err := io.CopyN(io.Discard, resp.Body, n); err != nil {
				return
			}
			select {
			case w.at <- time.Now():
			default:
			}
		}
	})
	return w, nil
}

// drain discards the times of the events so far.
func (w *bareWatch) drain() {
	for {
		select {
		case <-w.at:
		default:
			return
		}
	}
}

// first waits for the first event since drain and returns its time. ok is false if none arrives
// within patience.
func (w *bareWatch) first() (at time.Time, ok bool) {
	select {
	case at = <-w.at:
		return at, true
	case <-time.After(patience):
		return at, false
	}
}
