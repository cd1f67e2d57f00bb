// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
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

func (r *runner) measureKube(ctx context.Context) {
	for _, h := range r.lab.Hosts() {
		r.clean(ctx, h)
	}
	r.configure(ctx, "vxlan", 0)
	s := &kubeServer{figures.StartKube(ctx, r.lab, r.lab.Host(2).Namespace, figures.AdminToken, `{"Network":"`+podNetwork+`","Backend":{"Type":"vxlan"}}`, lab.APIServerOptions{
		Path: figures.APIServerPath, Args: []string{"--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000"},
	})}
	defer func() {
		s.Close()
		r.backend = "" // make the next configure write everything again
	}()

	r.peers = makePeers(r.large)
	s.Do(ctx, figures.AdminToken, http.MethodPost, figures.NodesPath, figures.JSON, map[string]any{
		"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": kubeOwn},
		"spec": map[string]any{"podCIDR": "10.128.0.0/24", "podCIDRs": []string{"10.128.0.0/24"}},
	})
	figures.Each(0, len(r.peers), func(i int) { s.addNode(ctx, r.peers[i]) })

	for range r.rounds {
		r.kubeStart(ctx, s)
	}
	r.kubeBeats(ctx, s)
	r.kubeEvents(ctx, s)
	must.Get(r.lab.Host(1).Daemon().Stop(ctx))
	r.kubeServerCost(ctx, s)
}

func (r *runner) kubeDaemon(ctx context.Context, s *kubeServer) start {
	return r.begin(ctx, lab.FlanneldOptions{
		Args: []string{"--kube-subnet-mgr", "--kubeconfig-file=" + s.Kubeconfig(), "--net-config-path=" + s.NetConfig()},
		Env:  []string{"NODE_NAME=" + kubeOwn},
	})
}

func (r *runner) kubeStart(ctx context.Context, s *kubeServer) {
	n := r.large
	h := r.lab.Host(1)
	r.clean(ctx, h)
	list, size := s.bareList(ctx)
	limit, _ := r.limit(ctx, nil, r.peers, objectsOf("vxlan"))
	r.clean(ctx, r.lab.Host(2))
	before := received(ctx, h)
	st := r.kubeDaemon(ctx, s)
	after := received(ctx, h)
	r.verify(ctx, h, n)
	r.report.add(kubeGroup, "exec to subnet.env", n, "ms", ms(st.file), 300)
	r.report.add(kubeGroup, "exec to all programmed", n, "ms", ms(st.all), 3000)
	r.report.add(kubeGroup, "bare list, protobuf", n, "ms", ms(list))
	r.report.add(kubeGroup, "bare list, bytes", n, "MB", mb(float64(size)))
	r.report.add(kubeGroup, "limit: kernel objects", n, "ms", ms(limit))
	r.report.add(kubeGroup, "exec to all programmed / (bare list + limit)", n, "×", float64(st.all)/float64(list+limit), 1.5)
	r.report.add(kubeGroup, "received until then", n, "MB", mb(after-before))
	r.report.add(kubeGroup, "CPU until then", n, "ms", ms(st.cpu))
	r.report.add(kubeGroup, "peak RSS", n, "MB", mb(st.peak), 110)
	untilReady(ctx, st.daemon)
	pause(ctx, 3*time.Second) // the daemon writes its state file meanwhile
	must.Get(st.daemon.Stop(ctx))
	before = received(ctx, h)
	began := time.Now()
	st = r.kubeDaemon(ctx, s)
	untilReady(ctx, st.daemon)
	ready := time.Since(began)
	after = received(ctx, h)
	r.report.add(kubeGroup, "restart: exec to ready", n, "ms", ms(ready))
	r.report.add(kubeGroup, "restart: received until then", n, "MB", mb(after-before))
}

// kubeBeats measures the cost of heartbeats of Nodes: updates in which nothing changes that the
// daemon needs.
func (r *runner) kubeBeats(ctx context.Context, s *kubeServer) {
	n := r.large
	h := r.lab.Host(1)
	d := h.Daemon()
	pause(ctx, 10*time.Second)
	m := figures.ProcessMemory(d.PID())
	r.report.add(kubeGroup, "RSS", n, "MB", mb(m.Anonymous+m.File), 45)
	r.report.add(kubeGroup, "RSS, anonymous", n, "MB", mb(m.Anonymous))
	count := r.countWrites(ctx, h)
	log := len(d.Log())
	bytes := received(ctx, h)
	beats := 0.0
	var cpu time.Duration
	server := spent(figures.ProcessCPU, s.API.PID(), func() {
		cpu = spent(figures.ProcessCPU, d.PID(), func() { beats = s.heartbeats(ctx, r.peers, r.atRest) })
	})
	bytes = received(ctx, h) - bytes
	m = figures.ProcessMemory(d.PID())
	r.report.add(kubeGroup, "a heartbeat: CPU of the daemon", n, "ms", ms(cpu)/beats, 0.4)
	r.report.add(kubeGroup, "a heartbeat: bytes received", n, "kB", bytes/beats/1000)
	r.report.add(kubeGroup, "heartbeats made", n, "", beats)
	r.report.add(kubeGroup, "heartbeats: kernel changes", n, "", float64(count()), 0)
	r.report.add(kubeGroup, "heartbeats: bytes logged", n, "", float64(len(d.Log())-log), 0)
	r.report.add(kubeGroup, "heartbeats: RSS after", n, "MB", mb(m.Anonymous+m.File), 45)
	r.report.add(kubeGroup, "a heartbeat: CPU of the API server, the write included", n, "ms", ms(server)/beats)
}

// requestPause, for each Node, is the pause of the daemon between two requests for new Nodes: a Node that comes sooner waits, and
// is requested together.
const requestPause = 100 * time.Microsecond

// kubeEvents measures the time from a request that adds or removes one Node until the kernel has
// announced the last change. It also measures the time until a bare watch has an event of that
// request.
func (r *runner) kubeEvents(ctx context.Context, s *kubeServer) {
	n := r.large
	p := makePeer(n)
	announced, stop := r.listen(ctx, r.lab.Host(1), p)
	defer stop()
	watching, cancel := context.WithCancel(ctx)
	seen := s.watchBare(watching, kubeMetadata)
	defer func() {
		cancel()
		for range seen { // until the watch has ended
		}
	}()
	type latency struct{ took, watched []float64 }
	var added, removed latency
	for range r.eventCount {
		for _, step := range []struct {
			into  *latency
			write func(context.Context, peer)
			gone  bool
		}{{&added, s.addNode, false}, {&removed, s.removeNode, true}} {
			pause(ctx, 3*eventPause+requestPause*time.Duration(n))
			for len(seen) > 0 {
				<-seen
			}
			began := time.Now()
			at := during(func() { step.write(ctx, p) }, func() time.Time { return announced(step.gone) })
			step.into.took = append(step.into.took, ms(at.Sub(began)))
			select {
			case at := <-seen:
				step.into.watched = append(step.into.watched, ms(at.Sub(began)))
			case <-time.After(patience):
			}
		}
	}

	for _, one := range []struct {
		what string
		latency
	}{{"added", added}, {"removed", removed}} {
		took, watched := quantile(one.took, 0.5), quantile(one.watched, 0.5)
		r.report.add(kubeGroup, "one node "+one.what+", p50", n, "ms", took)
		r.report.add(kubeGroup, "bare watch of metadata, node "+one.what+", p50", n, "ms", watched)
		r.report.add(kubeGroup, "one node "+one.what+", p50 / bare watch", n, "×", took/watched, 1.5)
	}
}

// kubeServerCost measures the cost of a watch whose client ignores the events, with complete
// Nodes and with metadata. It records the cost for the client, and that for the API server beyond
// the cost of the heartbeats themselves.
func (r *runner) kubeServerCost(ctx context.Context, s *kubeServer) {
	n := r.large
	lasting := r.atRest / 2
	for range max(1, r.rounds/3) {
		base := r.watchCost(ctx, s, "", lasting)

		for _, k := range []struct{ name, kind string }{{"whole Nodes", kubeFull}, {"metadata", kubeMetadata}} {
			cost := r.watchCost(ctx, s, k.kind, lasting)
			watch := "a bare watch of " + k.name
			r.report.add(kubeGroup, watch+": bytes received a heartbeat", n, "kB", cost.bytes/1000)
			if k.kind == kubeMetadata {
				r.relate("a heartbeat: bytes received", cost.bytes/1000, 1.1)
				r.relate("a heartbeat: CPU of the daemon", cost.client, 2)
			}
			r.report.add(kubeGroup, watch+": CPU of the client a heartbeat", n, "ms", cost.client)
			r.report.add(kubeGroup, watch+": CPU of the API server for 1,000 heartbeats", n, "s", (cost.server-base.server)/kubeWatches)
		}
	}
}

// relate records a ratio: the median of the metric called name, divided by bare, the value of a
// bare watch of metadata.
func (r *runner) relate(name string, bare, target float64) {
	if m := r.report.find(kubeGroup, name, r.large); m != nil {
		r.report.add(kubeGroup, name+" / bare watch of metadata", r.large, "×", m.median()/bare, target)
	}
}

// watchCost is what one heartbeat costs: the CPU time of the API server in milliseconds, and the CPU time and the
// received bytes of one watch.
type watchCost struct{ server, client, bytes float64 }

// watchCost sends heartbeats while kubeWatches processes watch. If kind is empty, no process watches.
func (r *runner) watchCost(ctx context.Context, s *kubeServer, kind string, lasting time.Duration) watchCost {
	var watchers []int // process IDs
	for range kubeWatches {
		if kind == "" {
			break
		}
		watcher := r.startPlain(ctx, r.lab.Host(1), plainKubeWatch, s.Addr+" "+kind)
		defer end(watcher)
		watchers = append(watchers, watcher.Process.Pid)
	}
	pause(ctx, 2*time.Second)
	clients := func() (sum time.Duration) {
		for _, w := range watchers {
			sum += figures.ProcessCPU(w)
		}
		return sum
	}

	client := clients()
	bytes := received(ctx, r.lab.Host(1))
	beats := 0.0
	server := spent(figures.ProcessCPU, s.API.PID(), func() { beats = s.heartbeats(ctx, r.peers, lasting) })
	return watchCost{
		ms(server) / beats, ms(clients()-client) / beats / kubeWatches,
		(received(ctx, r.lab.Host(1)) - bytes) / beats / kubeWatches,
	}
}

// runKubeWatch watches the Nodes of an API server and decodes nothing. config is the address and
// the media type, with a space between them. It reports that the watch has begun.
func runKubeWatch(config string) {
	addr, kind, _ := strings.Cut(config, " ")
	s := &kubeServer{&figures.Kube{Addr: addr, Client: &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // this process does not have the CA of the lab
		ForceAttemptHTTP2: true, DisableCompression: true,
	}}}}

	seen := s.watchBare(context.Background(), kind)
	sayThere()
	for range seen {
	}
	must.Fail("the watch has ended")
}

func received(ctx context.Context, h *lab.Host) float64 {
	return float64(eth0(ctx, h).Statistics.RxBytes)
}

func (s *kubeServer) bareList(ctx context.Context) (took time.Duration, size int64) {
	began := time.Now()
	resp := s.Request(ctx, figures.AdminToken, http.MethodGet, figures.NodesPath+"?resourceVersion=0", kubeFull, nil)
	defer resp.Body.Close()
	size = must.Get(io.Copy(io.Discard, resp.Body))
	return time.Since(began), size
}

// watchBare receives the events of a watch without decoding them, and returns when they arrive. If a thousand times are
// waiting, further ones are dropped. The channel is closed when the watch ends, at the latest with ctx.
func (s *kubeServer) watchBare(ctx context.Context, kind string) <-chan time.Time {
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	must.Do(json.Unmarshal(s.Do(ctx, figures.AdminToken, http.MethodGet, figures.NodesPath+"?limit=1", figures.JSON, nil), &list))
	resp := s.Request(ctx, figures.AdminToken, http.MethodGet, figures.NodesPath+"?watch=true&resourceVersion="+list.Metadata.ResourceVersion, kind, nil)
	seen := make(chan time.Time, 1000)
	go func() {
		defer close(seen)
		defer resp.Body.Close()
		var length [4]byte
		for {
			if _, err := io.ReadFull(resp.Body, length[:]); err != nil {
				return
			}
			if _, err := io.CopyN(io.Discard, resp.Body, int64(binary.BigEndian.Uint32(length[:]))); err != nil {
				return
			}
			select {
			case seen <- time.Now():
			default:
			}
		}
	}()
	return seen
}
