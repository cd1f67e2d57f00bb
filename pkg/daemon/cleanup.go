// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/keeper"
	"github.com/flanneld/flanneld/subnet"
)

// ErrRuns means that a running daemon prevents the cleanup.
var ErrRuns = errors.New("flanneld runs: stop it first, and make sure that nothing starts it again")

// Cleanup removes the objects that daemons have left on this host. It finds them by the
// state files and the subnet files, and removes no others.
type Cleanup struct {
	// StateDir and SubnetFile are those of the daemon. Cleanup covers every daemon that
	// has used StateDir, but only the subnet files in SubnetFile and SubnetDir.
	StateDir, SubnetFile string
	// SubnetDir is the folder with the subnet files of several networks.
	SubnetDir string
	// Backends are those that daemons may have used.
	Backends backend.Catalog
	// Yes removes the objects. Otherwise Run only prints them.
	Yes bool
	// Socket is the path of the daemon's socket. It may be empty.
	Socket string
	// Out gets one line for each object, and one if devices and routes cannot be found.
	Out io.Writer
}

// Run removes everything. If Yes is not set, it only prints what it would remove. If it
// cannot remove an object from the kernel, it continues with the others, keeps the files and
// returns an error, so that it can be repeated. It returns ErrRuns, wrapped, and removes
// nothing if a daemon uses one of the state files. It returns another error, and removes
// nothing either, if it cannot read one of them.
func (c Cleanup) Run(ctx context.Context) error {
	names, err := lastknown.Files(c.StateDir)
	if err != nil {
		return err
	}

	var all []lastknown.State
	for _, name := range names {
		file, err := statefile.Open[lastknown.State](c.StateDir, name)
		if errors.Is(err, statefile.ErrInUse) {
			return fmt.Errorf("%w (%w)", ErrRuns, err)
		}
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }() // until the end of Run, so that no daemon starts

		last, _, err := file.Load()
		if err != nil {
			return fmt.Errorf("%w: the objects that it names stay; remove the file to continue without it", err)
		}
		all = append(all, last)
	}

	// Files are removed last, because another attempt needs them.
	if err := oneline.Join(c.kernel(ctx, all), c.rules(ctx, all)); err != nil {
		return err
	}

	var blind error
	if len(names) == 0 {
		blind = c.blind()
	}
	return oneline.Join(c.files(all), blind)
}

// blind reports that devices and routes cannot be found without state files. That is an error if the subnet
// file shows that a daemon has run here.
func (c Cleanup) blind() error {
	unknown := fmt.Errorf("there are no state files in %s: devices and routes that flanneld has left are not known, and stay", c.StateDir)
	if _, err := os.Lstat(c.SubnetFile); err == nil {
		return unknown
	}
	fmt.Fprintf(c.Out, "there are no state files in %s and no subnet file: nothing of flanneld is known to be left\n", c.StateDir)
	return nil
}

func (c Cleanup) subnetFiles(all []lastknown.State) []string {
	paths := []string{c.SubnetFile}
	for _, last := range all {
		if last.Name != "" {
			paths = append(paths, filepath.Join(c.SubnetDir, last.Name+".env"))
		}
	}
	return paths
}

// kernel removes devices, routes on other devices, and leftovers.
func (c Cleanup) kernel(ctx context.Context, all []lastknown.State) error {
	kernel, err := linux.Open(linux.Options{NexthopObjects: true})
	if err != nil {
		return err
	}
	defer func() { _ = kernel.Close() }()

	var errs []error
	var done backend.Description
	if c.Backends.Recorded != nil {
		done.Leftovers, err = c.Backends.Recorded(c.StateDir)
		errs = append(errs, err, c.leftovers(ctx, done.Leftovers))
	}

	var owned []backend.Description
	for _, last := range all {
		for _, f := range last.All() {
			env := backend.Env{Network: last.Name, Underlay: f.Interface, Config: f.Config, StateDir: c.StateDir}
			owned = append(owned, c.Backends.Describe(env))
		}
	}

	told := map[string]bool{} // several configurations may own an object
	for _, of := range owned {
		nothing := dataplane.Scope{} // no daemon continues to use the objects
		ops, err := dataplane.PlanRetire(ctx, kernel, of.Scope, nothing)
		errs = append(errs, err)
		for _, op := range ops {
			if text := fmt.Sprint(op.Object); !told[text] {
				told[text] = true
				c.tell(text)
			}
		}
		if c.Yes {
			_, err = dataplane.Retire(ctx, kernel, of.Scope, nothing)
			errs = append(errs, err)
		}

		errs = append(errs, c.leftovers(ctx, done.Beyond(of)))
		done.Leftovers = append(done.Leftovers, of.Leftovers...)
	}
	return oneline.Join(errs...)
}

func (c Cleanup) leftovers(ctx context.Context, all []backend.Leftover) error {
	var errs []error
	for _, r := range all {
		present, err := r.Present()
		if present {
			c.tell(r)
		}
		if present && c.Yes {
			err = r.Remove(ctx)
		}
		errs = append(errs, err)
	}
	return oneline.Join(errs...)
}

// rules removes the traffic rules for the networks in the state files and in the subnet files.
func (c Cleanup) rules(ctx context.Context, all []lastknown.State) error {
	var sum lastknown.State
	for _, file := range c.subnetFiles(all) {
		sum.Rules = append(sum.Rules, subnetfile.Networks(file)...)
	}
	for _, last := range all {
		sum.Rules = append(sum.Rules, last.Rules...)
		sum.Former = append(sum.Former, last.All()...)
	}

	networks := sum.FormerNetworks(subnet.Config{})
	for _, n := range networks {
		c.tell(fmt.Sprintf("traffic rules of %s, if there are any", n))
	}
	if !c.Yes || len(networks) == 0 {
		return nil
	}
	return keeper.NewHost().Remove(ctx, networks)
}

// files removes the subnet files, private keys that flanneld has written elsewhere, and the state files.
func (c Cleanup) files(all []lastknown.State) error {
	entries, err := os.ReadDir(c.StateDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read state directory: %w", err)
	}
	var written []string
	if c.Backends.Files != nil {
		if written, err = c.Backends.Files(c.StateDir); err != nil {
			return err
		}
	}

	written = append(written, c.subnetFiles(all)...)
	if info, err := os.Lstat(c.Socket); err == nil && info.Mode()&fs.ModeSocket != 0 {
		written = append(written, c.Socket)
	}
	if err := c.remove(written); err != nil {
		return err
	}

	var paths []string
	for _, e := range entries {
		for _, ours := range []string{"flanneld-", "device-", "wgkey"} {
			if strings.HasPrefix(e.Name(), ours) && e.Type().IsRegular() {
				paths = append(paths, filepath.Join(c.StateDir, e.Name()))
			}
		}
	}
	err = c.remove(paths)
	if c.Yes {
		_ = os.Remove(c.StateDir) // fails if the directory contains other files
	}
	return err
}

func (c Cleanup) remove(paths []string) error {
	var errs []error
	for _, path := range paths {
		if _, err := os.Lstat(path); err != nil {
			continue
		}
		c.tell("file " + path)
		if c.Yes {
			errs = append(errs, os.Remove(path))
		}
	}
	return oneline.Join(errs...)
}

func (c Cleanup) tell(what any) {
	verb := "would remove"
	if c.Yes {
		verb = "remove"
	}
	fmt.Fprintln(c.Out, verb, what)
}
