// SPDX-License-Identifier: Apache-2.0

// Flannel-lab builds a network of hosts on this machine, from network namespaces.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

func main() {
	lab.RunChild()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // stop catching signals, so that a second one kills the process
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "flannel-lab:", err)
		os.Exit(1)
	}
}

const examples = `  # three hosts with vxlan; watch until Ctrl-C
  flannel-lab

  # check once, for scripts: exits 1 unless every pod reaches every other
  flannel-lab --once --backend host-gw --dual

  # four hosts on two routed segments, plain routes within each
  flannel-lab --hosts 4 --l2 2 --backend-config '{"DirectRouting": true}'

  # several networks on every host, with a backend each
  flannel-lab --networks red,green --backend vxlan,host-gw`

type options struct {
	cfg           lab.Config
	networks      []string
	backend       string
	backendConfig string
	ipv6, dual    bool
	rateMbit      uint64
	json, once    bool
	interval      time.Duration
}

func newCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "flannel-lab",
		Short: "Build a network of hosts on this machine and watch its pods talk",
		Long: `Builds hosts from network namespaces, with an etcd, and with a flanneld and a pod
on every host. Until Ctrl-C it shows which pods reach each other, the leases, and
the routes of flanneld.

It only needs root. It does not touch the machine's own network, and leaves
nothing behind, even if it is killed.`,
		Example: examples,
		Args:    cobra.NoArgs,

		SilenceUsage:  true, // an error is one line
		SilenceErrors: true, // main prints the error

		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}

	f := cmd.Flags()
	f.SortFlags = false
	f.IntVar(&o.cfg.Hosts, "hosts", 3, "number of hosts")
	f.StringSliceVar(&o.networks, "networks", nil, "names of several networks, which one flanneld on each host serves")
	f.StringVar(&o.backend, "backend", "vxlan", "backend type: vxlan, host-gw, wireguard, ipip, udp, alloc or extension; with --networks also a list of types, used in turn")
	f.StringVar(&o.backendConfig, "backend-config", "{}", "further keys of Backend, as a JSON object")
	f.BoolVar(&o.ipv6, "ipv6", false, "only IPv6, on the underlay and for the pods")
	f.BoolVar(&o.dual, "dual", false, "IPv4 and IPv6")
	f.IntVar(&o.cfg.Segments, "l2", 1, "number of L2 segments, joined by a router")
	f.IntVar(&o.cfg.MTU, "mtu", 1500, "MTU of the underlay")
	f.Float64Var(&o.cfg.Loss, "loss", 0, "packet loss towards each host in percent (needs netem)")
	f.DurationVar(&o.cfg.Latency, "latency", 0, "delay towards each host (needs netem)")
	f.Uint64Var(&o.rateMbit, "rate", 0, "rate towards each host in Mbit/s; 0 is unlimited")
	f.BoolVar(&o.once, "once", false, "show the state once, and exit with 1 if a pod is unreachable")
	f.BoolVar(&o.json, "json", false, "print JSON: one object, or one at each refresh")
	f.DurationVar(&o.interval, "interval", 2*time.Second, "time between refreshes")
	f.StringVar(&o.cfg.Flanneld, "flanneld", "", "flanneld binary (default: beside flannel-lab)")
	return cmd
}

// complete checks the flags and sets o.cfg from them.
func (o *options) complete() error {
	if o.ipv6 && o.dual {
		return errors.New("--ipv6 and --dual are both given: expected at most one")
	}
	if o.interval <= 0 {
		return fmt.Errorf("--interval: %v is not positive", o.interval)
	}

	// In the configuration of the lab zero means the default. On the command line zero is
	// a mistake.
	for flag, value := range map[string]int{"hosts": o.cfg.Hosts, "l2": o.cfg.Segments, "mtu": o.cfg.MTU} {
		if value <= 0 {
			return fmt.Errorf("--%s: %d is not positive", flag, value)
		}
	}

	switch {
	case o.dual:
		o.cfg.Families = []prefix.Family{prefix.IPv4, prefix.IPv6}
	case o.ipv6:
		o.cfg.Families = []prefix.Family{prefix.IPv6}
	default:
		o.cfg.Families = []prefix.Family{prefix.IPv4}
	}

	const bitsPerByte, mega = 8, 1_000_000
	o.cfg.Rate = o.rateMbit * mega / bitsPerByte

	if err := o.configure(); err != nil {
		return err
	}

	if o.cfg.Flanneld == "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		o.cfg.Flanneld = filepath.Join(filepath.Dir(self), "flanneld")
	}
	if _, err := os.Stat(o.cfg.Flanneld); err != nil {
		return fmt.Errorf("find flanneld: %w (name it with --flanneld)", err)
	}
	return nil
}

func (o *options) configure() error {
	var backend map[string]any
	if err := json.Unmarshal([]byte(o.backendConfig), &backend); err != nil || backend == nil {
		return fmt.Errorf("--backend-config: want a JSON object, got %q", o.backendConfig)
	}
	if t, ok := backend["Type"]; ok && t != o.backend {
		return fmt.Errorf("--backend-config: Type is %v, but --backend says %s", t, o.backend)
	}

	if len(o.networks) > 0 {
		var err error
		o.cfg.Networks, err = lab.Networks(o.networks, o.cfg.Families, strings.Split(o.backend, ","), backend)
		return err
	}
	if strings.Contains(o.backend, ",") {
		return errors.New("--backend: several types need --networks")
	}

	backend["Type"] = o.backend
	text, err := json.Marshal(backend)
	if err != nil {
		return err
	}
	o.cfg.Network, err = lab.NetworkConfig(o.cfg.Families, text)
	return err
}

func (o *options) run(ctx context.Context, out, progress io.Writer) error {
	if err := o.complete(); err != nil {
		return err
	}

	start := time.Now()
	o.cfg.Progress = func(step string) {
		fmt.Fprintf(progress, "%6.2fs  %s\n", time.Since(start).Seconds(), step)
	}

	l, err := lab.New(ctx, o.cfg)
	if err != nil {
		return o.unlessStopped(ctx, err)
	}
	defer l.Close()

	err = bringUp(ctx, l)
	if err == nil {
		err = o.watch(ctx, l, out)
	}
	return o.unlessStopped(ctx, err)
}

func bringUp(ctx context.Context, l *lab.Lab) error {
	const patience = time.Minute
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not within %v", patience))
	defer cancel()

	// With --firewall=auto the lab also works on machines without iptables.
	if err := l.StartFlanneld(ctx, lab.FlanneldOptions{Args: []string{"--firewall=auto"}}); err != nil {
		return err
	}
	return l.AddPods(ctx)
}

func (o *options) unlessStopped(ctx context.Context, err error) error {
	if ctx.Err() == nil || err == nil {
		return err
	}
	if o.once {
		return fmt.Errorf("interrupted: %w", err) // the lab has ended before its output
	}
	return nil // the user has ended the lab, which is its normal end
}

// watch shows the lab's state until ctx ends or, with --once, once.
func (o *options) watch(ctx context.Context, l *lab.Lab, out io.Writer) error {
	tick := time.NewTicker(o.interval)
	defer tick.Stop()

	// A terminal is redrawn. Another output gets a state only if it differs from the last one,
	// and with --json every state.
	redraw := !o.once && !o.json && isTerminal(out)
	shown := ""
	for {
		r, err := observe(ctx, l)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}

		if o.json || redraw || r.fingerprint() != shown {
			if err := o.show(out, r, redraw); err != nil {
				return err
			}
			shown = r.fingerprint()
		}
		if o.once {
			return r.verdict()
		}

		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (o *options) show(out io.Writer, r report, redraw bool) error {
	if o.json {
		return json.NewEncoder(out).Encode(r)
	}

	text := r.text()
	if !o.once {
		text += "\n" + r.hints()
	}
	if redraw {
		const home, clearBelow = "\x1b[H", "\x1b[2J"
		text = home + clearBelow + text
	}
	_, err := io.WriteString(out, text)
	return err
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
