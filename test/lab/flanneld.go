// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const healthPort = "8081" // of flanneld, on the host's loopback

// FlanneldOptions configures flanneld on a host.
type FlanneldOptions struct {
	Path string   // path of the binary; empty means Config.Flanneld
	Args []string // added after the lab's own arguments, so that they override them
	Env  []string // added to an environment that is otherwise nearly empty
}

// Daemon is one process of flanneld.
type Daemon struct {
	*process
	host  *Host
	files []string // subnet files for which Ready waits
}

// StartFlanneld starts flanneld on the host and does not wait until it is ready. It passes the
// address and the TLS files of the store, if the lab has one, and the names of several networks. It
// makes the health server listen on the host's loopback. Everything else is flanneld's default
// unless o changes it.
func (h *Host) StartFlanneld(ctx context.Context, o FlanneldOptions) (*Daemon, error) {
	o.Path = cmp.Or(o.Path, h.lab.cfg.Flanneld)
	if o.Path == "" {
		return nil, errors.New("start flanneld: no binary given")
	}

	args := []string{"--healthz-ip=127.0.0.1", "--healthz-port=" + healthPort}
	args = append(args, h.storeArgs()...)
	if names := h.lab.networkNames(); len(names) > 0 {
		args = append(args, "--networks="+strings.Join(names, ","))
	}

	p, err := startProcess(ctx, h.Namespace, processSpec{
		name: "flanneld", path: o.Path, args: append(args, o.Args...), env: childEnv(o.Env),
	})
	if err != nil {
		return nil, fmt.Errorf("start flanneld: %w", err)
	}

	d := &Daemon{process: p, host: h, files: h.lab.subnetFiles()}
	for _, arg := range o.Args {
		if file, ok := strings.CutPrefix(arg, "--subnet-file="); ok {
			d.files = []string{file}
		} else if strings.Contains(arg, "networks") {
			d.files = nil // the lab does not know the networks of these flags
			break
		}
	}

	h.mu.Lock()
	h.daemons = append(h.daemons, d)
	h.mu.Unlock()
	return d, nil
}

func (h *Host) storeArgs() []string {
	if h.lab.etcd == nil {
		return nil
	}

	args := []string{"--etcd-endpoints=" + h.EtcdEndpoint()}
	files := h.lab.etcd.TLSFiles()
	if files.CA != "" {
		args = append(args, "--etcd-cafile="+files.CA)
	}
	if files.ClientCert != "" {
		args = append(args, "--etcd-certfile="+files.ClientCert, "--etcd-keyfile="+files.ClientKey)
	}
	return args
}

// EtcdEndpoint returns the URL of the store on the host's own segment, or "" if the lab
// has none.
func (h *Host) EtcdEndpoint() string {
	e := h.lab.etcd
	if e == nil {
		return ""
	}
	return e.url(segmentAddr(h.lab.cfg.Families[0], h.segment, router).Addr())
}

// childEnv returns the few variables of this process that child processes or the Go runtime need, and
// extra.
func childEnv(extra []string) []string {
	var env []string
	for _, key := range []string{"PATH", "GOCOVERDIR", "GORACE", "GOTRACEBACK"} {
		if value, ok := os.LookupEnv(key); ok {
			env = append(env, key+"="+value)
		}
	}
	return append(env, extra...)
}

// Ready waits until the daemon reports that it is ready and the subnet files of the lab's networks
// exist, unless the arguments of the daemon name others. It fails if the daemon exits before that.
func (d *Daemon) Ready(ctx context.Context) error {
	return d.await(ctx, 20*time.Millisecond, func() error {
		if _, reason, err := d.Get(ctx, "/readyz"); err != nil {
			return fmt.Errorf("%w: %q", err, strings.TrimSpace(reason))
		}
		for _, file := range d.files {
			if _, err := os.Stat(d.host.Path(file)); err != nil {
				return err
			}
		}
		return nil
	})
}

// askTimeout limits one request to a daemon. An answer takes milliseconds, but on a busy
// machine it takes longer.
const askTimeout = 10 * time.Second

// Get requests path from the daemon's health server, and returns the status and the body
// of the answer. If the status is not 200, Get returns both together with an error.
func (d *Daemon) Get(ctx context.Context, path string) (status int, body string, err error) {
	transport := &http.Transport{DialContext: d.host.Dial, DisableKeepAlives: true}
	url := "http://127.0.0.1:" + healthPort + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}

	resp, err := (&http.Client{Transport: transport, Timeout: askTimeout}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()

	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	return resp.StatusCode, string(text), err
}

// Stop sends SIGTERM to the daemon, waits for its end and returns its exit code. If the
// daemon has ended before, Stop returns the code with which it ended. If ctx ends first,
// Stop returns an error.
func (d *Daemon) Stop(ctx context.Context) (code int, err error) {
	if err := d.Signal(unix.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return 0, err
	}
	return d.Wait(ctx)
}
