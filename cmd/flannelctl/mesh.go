// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/report/mesh"
)

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
				return fmt.Errorf("--interval %s is invalid: expected at least %s", f.interval, leastInterval)
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
			return errors.New("--statusz-port 0 is invalid: expected a port from 1 to 65535")
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
