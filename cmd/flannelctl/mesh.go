// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/report/mesh"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube"
)

const (
	// meshAtOnce is the maximum number of hosts that are asked at the same time. It is large because most
	// of the time is spent waiting for hosts that are down.
	meshAtOnce = 128
	// meshReading is the maximum number of answers that are read at the same time. It is small because
	// each answer may take several times mesh.MaxAnswer of memory.
	meshReading = 16
	// meshConnect limits the time to connect to a host. It is long enough for TCP to repeat a lost packet.
	meshConnect = 2 * time.Second
)

// meshFlags are the flags of flannelctl mesh.
type meshFlags struct {
	clusterFlags
	store    storeFlags
	port     uint16
	interval time.Duration
}

func newMeshCommand(h host) *cobra.Command {
	var (
		f     = meshFlags{store: storeFlags{host: h}}
		out   output
		watch bool
	)

	cmd := &cobra.Command{
		Use: "mesh", Short: "Ask all hosts for their paths, and show who reaches whom", Args: cobra.NoArgs,
		Long: `Asks every host with a lease for the results of its probes, and shows them as a
matrix: a row is what one host knows of the paths to the others. The daemons need
--probe and --statusz-address. With etcd the addresses are the public ones of the
leases. On Kubernetes the API server passes the requests to flanneld's pods: you need
the rights to list nodes, to list pods and to get pods/proxy. The exit code is 1 if
a path is broken or a host says that its pods are cut off, and 2 if no host has answered.`,
		Example: "  flannelctl mesh\n  flannelctl mesh -w\n  flannelctl mesh -o svg > mesh.svg\n  flannelctl mesh -o json | jq -r '.broken[] | .from + \" \" + .to'\n" +
			"  flannelctl mesh --kubeconfig-file ~/.kube/config --namespace kube-flannel",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.interval < leastInterval {
				return openError{fmt.Errorf("--interval %s is invalid: expected at least %s", f.interval, leastInterval)}
			}
			if watch {
				return watchMesh(cmd.Context(), cmd.OutOrStdout(), &f)
			}
			return showMesh(cmd, &f, out)
		},
	}

	f.store.addKubeTo(cmd)
	out.addTo(cmd, "wide", "svg")
	f.addTo(cmd)
	cmd.Flags().DurationVar(&f.interval, "interval", 10*time.Second, "with --watch: time between two questions, longer if a question takes more than half of it")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "print every path that breaks or works again, a line each, until Ctrl-C")
	cmd.MarkFlagsMutuallyExclusive("watch", "output")
	return cmd
}

// addTo adds the flags about the question to all hosts to a command, which does not run if a value is invalid.
func (f *meshFlags) addTo(cmd *cobra.Command) {
	cmd.Flags().Uint16Var(&f.port, "statusz-port", 8287, "port of the daemons' --statusz-address")
	f.clusterFlags.addTo(cmd, 5*time.Second, "time that a host may take to begin its answer, and again to send it")
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		if f.port == 0 {
			return openError{errors.New("--statusz-port 0 is invalid: expected a port from 1 to 65535")}
		}
		return f.check(cmd, args)
	}
}

// ask asks all hosts once. Of many hosts it prints at once which ones do not answer, because each of these
// takes seconds.
func (f *meshFlags) ask(ctx context.Context, progress io.Writer) (*mesh.Matrix, error) {
	c, err := f.find(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	if len(c.hosts) > meshAtOnce {
		c.failed = func(h mesh.Host, why string) { fmt.Fprintf(progress, "nothing is known from %s: %s\n", h, why) }
	}
	return c.collect(ctx, f.timeout)
}

func showMesh(cmd *cobra.Command, f *meshFlags, out output) error {
	m, err := f.ask(cmd.Context(), cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	w := cmd.OutOrStdout()
	switch out.format {
	case "svg":
		err = m.SVG(w)
	case "table", "wide":
		err = m.Text(w, out.format == "wide")
	default:
		err = out.print(w, m.Data(), nil)
	}
	if err != nil {
		return err
	}
	s := m.Summary()
	switch {
	case len(m.Hosts) == 0:
		return errors.New("there is no lease")
	case len(s.Silent) == len(m.Hosts):
		return openError{fmt.Errorf("nothing is known from any host: %s: %s", m.Hosts[0], m.Problem(0))}
	case s.Broken > 0:
		return fmt.Errorf("%d of %d paths are broken", s.Broken, s.OK+s.Broken)
	case len(s.CutOff) > 0:
		return fmt.Errorf("the pods of %d of %d hosts are cut off", len(s.CutOff), len(m.Hosts))
	}
	return nil
}

// cluster contains the hosts that have a lease, and the way to ask them for their status.
type cluster struct {
	hosts []mesh.Host
	// ask requests the status of a host and returns the body of the answer. The caller must read and
	// close the body before it cancels ctx.
	ask   func(ctx context.Context, h mesh.Host) (answer io.ReadCloser, err error)
	close func()
	// failed is called for each host of which nothing is known, as soon as that is clear, by one goroutine at a time.
	// It may be nil.
	failed func(h mesh.Host, why string)
}

// find reads the hosts from the store. The caller closes the cluster, unless find returns an error.
func (f *meshFlags) find(ctx context.Context) (c cluster, err error) {
	err = f.store.read(func(o storeOptions, from store) error {
		c = cluster{ask: f.overHTTP(), close: func() {}}
		if o.KubeSubnetMgr {
			d, err := kube.FindDaemons(ctx, o.kubeConfig(), f.namespace, f.selector)
			if err != nil {
				return err
			}
			c.close = d.Close
			c.ask = func(ctx context.Context, h mesh.Host) (io.ReadCloser, error) { // through the API server
				return d.Get(ctx, h.Key, int(f.port), "statusz.json", f.query())
			}
		}

		entries, err := from.Entries(ctx, false)
		if err != nil {
			c.close()
		}
		for _, e := range entries {
			if h, ok := meshHost(e.Lease, o.KubeSubnetMgr); ok {
				c.hosts = append(c.hosts, h)
			}
		}
		return err
	})
	return c, err
}

// collect asks all hosts for their status. most is the time that a host may take to begin its answer, and
// again the time that it may take to send it. If a host does not answer, the matrix contains its error.
// collect returns an error only if ctx ends.
func (c cluster) collect(ctx context.Context, most time.Duration) (*mesh.Matrix, error) {
	m := mesh.New(c.hosts)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(meshAtOnce)
	reading := make(chan struct{}, meshReading)
	var telling sync.Mutex
	for i := range m.Hosts {
		group.Go(func() error {
			if err := c.collectOne(ctx, m, i, most, reading); err != nil {
				m.Fail(i, err)
			}
			if why := m.Problem(i); why != "" && c.failed != nil {
				telling.Lock()
				defer telling.Unlock()
				c.failed(m.Hosts[i], why)
			}
			return ctx.Err()
		})
	}
	return m, group.Wait()
}

// collectOne asks host i, counted from 0, and records its answer in m. The caller records the error that
// collectOne returns. collectOne keeps a value in the channel reading while it reads the answer, so that
// the capacity of the channel limits the number of answers that are read at the same time.
func (c cluster) collectOne(ctx context.Context, m *mesh.Matrix, i int, most time.Duration, reading chan struct{}) error {
	within, cancel := context.WithCancel(ctx)
	defer cancel()
	late := time.AfterFunc(most, cancel)
	defer late.Stop()
	explain := func(err error) error {
		if within.Err() != nil && ctx.Err() == nil {
			return fmt.Errorf("it does not answer within %s", most)
		}
		return err
	}

	answer, err := c.ask(within, m.Hosts[i])
	if err != nil {
		return explain(err)
	}
	defer answer.Close()

	// The time that this host may take does not pass while its answer waits to be read.
	if !late.Stop() {
		return explain(nil)
	}

	select {
	case reading <- struct{}{}:
		defer func() { <-reading }()
	case <-ctx.Done():
		return ctx.Err()
	}

	late.Reset(most)
	body, err := io.ReadAll(io.LimitReader(answer, int64(mesh.MaxAnswer(len(m.Hosts)))+1))
	if err != nil {
		return fmt.Errorf("read its answer: %w", explain(err))
	}
	m.Answer(i, body)
	return nil
}

// meshHost returns the host of a lease, with its public addresses. Its name is that of the Node, or else its first
// subnet. ok is false if the lease has no public address, because it reserves a subnet for no host or cannot be read.
func meshHost(l subnet.Lease, ofNode bool) (h mesh.Host, ok bool) {
	h = mesh.Host{Key: l.Key, Name: l.Key}
	for i, e := range l.Endpoints {
		if i == 0 && !ofNode {
			h.Name = e.Subnet.String()
		}
		if subnet.IsHost(e.PublicIP) {
			h.PublicIPs = append(h.PublicIPs, e.PublicIP)
		}
	}
	return h, len(h.PublicIPs) > 0
}

// overHTTP returns a function that asks a host at its public addresses. It asks at the address of the
// second family only if the request to the first one fails.
func (f *meshFlags) overHTTP() func(context.Context, mesh.Host) (io.ReadCloser, error) {
	dialer := &net.Dialer{Timeout: min(meshConnect, f.timeout/2)}
	client := &http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: dialer.DialContext}, // no proxy: the addresses are those of hosts on the underlay
		// Do not follow a redirect: another host must not make this one send requests to arbitrary
		// addresses.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return func(ctx context.Context, h mesh.Host) (answer io.ReadCloser, err error) {
		for _, a := range h.PublicIPs {
			if answer, err = get(ctx, client, netip.AddrPortFrom(a, f.port), f.query()); err == nil {
				return answer, nil
			}
		}
		return nil, err
	}
}

func get(ctx context.Context, client *http.Client, at netip.AddrPort, query url.Values) (io.ReadCloser, error) {
	resp, err := request(ctx, client, "http://"+at.String()+"/statusz.json?"+query.Encode())
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%s refuses the connection: start flanneld with --statusz-address", at)
	case err != nil:
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		_ = resp.Body.Close()
		return nil, fmt.Errorf("http://%s/statusz.json: %s", at, resp.Status)
	}
	return resp.Body, nil
}

// query returns the URL parameters that request all paths of the network.
func (f *meshFlags) query() url.Values {
	q := url.Values{status.ParamPaths: {status.AllPaths}}
	if f.store.network != "" {
		q.Set(status.ParamNetwork, f.store.network)
	}
	return q
}
