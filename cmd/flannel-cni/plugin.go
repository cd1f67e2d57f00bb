// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
)

// The functions below implement the CNI commands. Each process runs one of them, and the
// runtime kills it if it takes too long. So none of them needs a context.

// command implements a command of CNI for the configuration and the attachment that the runtime passes.
func command(run func(config, attachment) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		c, err := parseConfig(args.StdinData)
		if err != nil {
			return err
		}
		return run(c, attachment{dir: c.DataDir, container: args.ContainerID, iface: args.IfName})
	}
}

func add(c config, a attachment) error {
	d, err := c.delegation()
	if err != nil {
		return err
	}

	// The note is written before the delegate is called, so that the attachment can be
	// deleted however this call ends. If there is a note already, this is a second ADD of
	// the interface. Most plugins refuse that, and the note of the first ADD must then
	// stay. So an existing note is replaced only after the delegate has succeeded.
	_, err = a.load()
	fresh := errors.Is(err, fs.ErrNotExist)
	if fresh {
		if err := a.save(d); err != nil {
			return err
		}
	}

	if err := c.enableIPv6(d); err != nil {
		return err
	}

	var result types.Result
	err = d.delegate(func(ctx context.Context, plugin string, stdin []byte, exec invoke.Exec) (err error) {
		result, err = invoke.DelegateAdd(ctx, plugin, stdin, exec)
		return err
	})
	if err != nil {
		return err
	}

	if !fresh {
		if err := a.save(d); err != nil {
			return err
		}
	}
	return result.Print()
}

func (o object) delegate(command func(context.Context, string, []byte, invoke.Exec) error) error {
	plugin, err := o.text("type", defaultDelegate)
	if err != nil {
		return fmt.Errorf("delegate: %w", err)
	}
	return command(context.Background(), plugin, raw(o), nil)
}

func del(c config, a attachment) error {
	d, err := a.loadAny(c.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // CNI wants DEL to succeed if there is nothing to delete
	}
	if errors.Is(err, errDamaged) {
		fmt.Fprintln(os.Stderr, "flannel:", err)
		d, err = c.release()
	}
	if err != nil {
		return err
	}

	c.runtime(d)
	if err := d.delegate(invoke.DelegateDel); err != nil {
		return err
	}
	return a.remove()
}

func check(c config, a attachment) error {
	d, err := a.loadAny(c.Name)
	if err != nil {
		return types.NewError(types.ErrUnknownContainer, "the container is not known to be attached", err.Error())
	}

	c.runtime(d)
	if c.PrevResult != nil {
		d.set("prevResult", withGateways(c.PrevResult))
	}
	return d.delegate(invoke.DelegateCheck)
}

func status(c config, _ attachment) error {
	d, err := c.delegation()
	if e, ok := errors.AsType[*types.Error](err); ok && e.Code == types.ErrTryAgainLater {
		return types.NewError(types.ErrPluginNotAvailable, e.Msg, e.Details)
	}
	if err != nil {
		return err
	}
	return d.delegate(invoke.DelegateStatus)
}

// collect implements GC.
func collect(c config, _ attachment) error {
	// A missing list is not an empty one, which means to detach everything.
	var keep []types.GCAttachment
	if err := json.Unmarshal(c.Attachments, &keep); err != nil {
		return types.NewError(types.ErrInvalidNetworkConfig, "parse cni.dev/valid-attachments", err.Error())
	}

	err := c.detachAllBut(keep)
	d, failed := c.delegation()
	if failed != nil {
		return errors.Join(err, failed)
	}

	// The delegate may know further attachments.
	d.set("cni.dev/valid-attachments", keep)
	return errors.Join(err, d.delegate(invoke.DelegateGC))
}

func (c config) detachAllBut(keep []types.GCAttachment) error {
	all, err := attachments(c.DataDir)
	if err != nil {
		return err
	}

	var failed []error
	for _, a := range all {
		d, err := a.load()
		if err != nil {
			continue // without a readable note, it may belong to another network
		}
		name, _ := d.text("name", "")
		if name != c.Name || a.kept(keep, all) {
			continue
		}
		if err := a.detach(d); err != nil {
			failed = append(failed, fmt.Errorf("detach %s %s: %w", a.container, a.iface, err))
		}
	}
	return errors.Join(failed...)
}

func (a attachment) detach(d object) error {
	err := d.delegate(func(ctx context.Context, plugin string, stdin []byte, exec invoke.Exec) error {
		paths := os.Getenv("CNI_PATH")
		path, err := invoke.FindInPath(plugin, filepath.SplitList(paths))
		if err != nil {
			return err
		}
		args := &invoke.Args{Command: "DEL", ContainerID: a.container, IfName: a.iface, Path: paths}
		return invoke.ExecPluginWithoutResult(ctx, path, stdin, args, exec)
	})
	if err != nil {
		return err
	}
	return a.remove()
}
