package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"flanneld/pkg/lab"
)

// server is a store under test: one process in the router's namespace of a lab.
type server interface {
	pid() int
	restart(ctx context.Context) error
	// calls returns how many requests the process has received, by kind.
	calls(ctx context.Context) (counts, error)
	// touch reads and writes something that is not flannel's, as other users of the store do.
	touch(ctx context.Context) error
	// touches returns the kinds of the requests that touch sends.
	touches() []string
	// reach returns how hosts reach the store.
	reach() Store
	close()
}

// counts are numbers of requests by kind.
type counts map[string]float64

func (c counts) add(other counts) {
	for kind, n := range other {
		c[kind] += n
	}
}

// since returns the requests since before.
func (c counts) since(before counts) counts {
	added := counts{}
	for kind, n := range c {
		if n -= before[kind]; n > 0 {
			added[kind] = n
		}
	}
	return added
}

func (c counts) total() (sum float64) {
	for _, n := range c {
		sum += n
	}
	return sum
}

// usage is what a process has used until now.
type usage struct {
	cpu  time.Duration
	peak float64 // memory in RAM, bytes, since the process started or forgetPeak
}

func usageOf(pid int) (u usage, err error) {
	const schedClock = 2 // CPUCLOCK_SCHED, used as by clock_getcpuclockid(3)
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
		return u, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	u.cpu = time.Duration(ts.Nano())
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kB, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
			u.peak = kB * 1024
			return u, err
		}
	}
	return u, fmt.Errorf("/proc/%d/status has no VmHWM", pid)
}

// forgetPeak makes the peak of a process begin again at what it uses now.
func forgetPeak(pid int) error {
	const resetPeak = "5"
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte(resetPeak), 0)
}

// etcdServer is an etcd of one member, of a program that is given.
type etcdServer struct {
	lab     *lab.Lab
	program string
	client  *clientv3.Client
	http    *http.Client
	url     string
	output  bytes.Buffer
	cmd     *exec.Cmd
	exited  chan struct{}
}

const etcdPort = 2379

func startEtcd(ctx context.Context, l *lab.Lab, program string) (s *etcdServer, err error) {
	s = &etcdServer{lab: l, url: fmt.Sprintf("http://%s:%d", l.RouterAddr(4), etcdPort)}
	if s.program, err = filepath.Abs(program); err != nil {
		return nil, err
	}
	s.http = &http.Client{Transport: &http.Transport{DialContext: l.Underlay().Dial, DisableKeepAlives: true}, Timeout: 20 * time.Second}
	s.client, err = clientv3.New(clientv3.Config{
		Endpoints: []string{s.url}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn, error) {
			return l.Underlay().Dial(ctx, "tcp", a)
		})},
	})
	if err != nil {
		return nil, err
	}
	if err := s.start(ctx); err != nil {
		s.close()
		return nil, err
	}
	if _, err := s.client.Put(ctx, lab.Prefix+"/config", networkConfig); err != nil {
		s.close()
		return nil, fmt.Errorf("put the network configuration: %w", err)
	}
	return s, nil
}

func (s *etcdServer) start(ctx context.Context) error {
	s.output.Reset()
	s.cmd = &exec.Cmd{Path: s.program, Args: []string{s.program,
		"--data-dir", "/var/lib/etcd", "--log-level", "error", "--quota-backend-bytes", strconv.Itoa(8 << 30),
		"--listen-client-urls", s.url, "--advertise-client-urls", s.url,
	}, Stdout: &s.output, Stderr: &s.output}
	if err := s.lab.Underlay().Start(s.cmd); err != nil {
		return fmt.Errorf("start %s: %w", s.program, err)
	}
	s.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) {
		defer close(exited)
		_ = cmd.Wait() // it is ended by a signal
	}(s.cmd, s.exited)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := s.get(ctx, "/health", io.Discard)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-s.exited:
			return fmt.Errorf("%s has ended: %s", s.program, s.output.String())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %w", s.program, context.Cause(ctx), err)
		}
	}
}

func (s *etcdServer) get(ctx context.Context, path string, into io.Writer) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	_, err = io.Copy(into, resp.Body)
	return err
}

func (s *etcdServer) pid() int { return s.cmd.Process.Pid }

func (s *etcdServer) stop() {
	if s.exited != nil {
		_ = s.cmd.Process.Kill() // it may have ended
		<-s.exited
	}
}

func (s *etcdServer) restart(ctx context.Context) error {
	s.stop()
	return s.start(ctx)
}

func (s *etcdServer) close() {
	s.stop()
	_ = s.client.Close()
}

func (s *etcdServer) reach() Store { return Store{Etcd: []string{s.url}, Prefix: lab.Prefix} }

func (s *etcdServer) touch(ctx context.Context) error {
	if _, err := s.client.Put(ctx, "/bystander", time.Now().String()); err != nil {
		return err
	}
	_, err := s.client.Get(ctx, "/bystander")
	return err
}

func (*etcdServer) touches() []string { return []string{"Put", "Range"} }

// calls counts messages: a request that opens a stream is not the only one on it.
func (s *etcdServer) calls(ctx context.Context) (counts, error) {
	var page bytes.Buffer
	if err := s.get(ctx, "/metrics", &page); err != nil {
		return nil, fmt.Errorf("ask etcd for its metrics: %w", err)
	}
	return metric(&page, "grpc_server_msg_received_total", "grpc_method")
}

// metric adds up a counter by the value of one label.
func metric(page io.Reader, name string, by ...string) (counts, error) {
	found := counts{}
	lines := bufio.NewScanner(page)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		labels, ok := strings.CutPrefix(lines.Text(), name+"{")
		if !ok {
			continue
		}
		labels, value, _ := strings.Cut(labels, "} ")
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		kinds := make([]string, len(by))
		for label := range strings.SplitSeq(labels, ",") {
			key, value, _ := strings.Cut(label, "=")
			for i := range by {
				if by[i] == key {
					kinds[i] = strings.Trim(value, `"`)
				}
			}
		}
		found[strings.TrimSpace(strings.Join(kinds, " "))] += n
	}
	return found, lines.Err()
}
