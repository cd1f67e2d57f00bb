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

// add attaches the container to the network.
func add(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	d, err := c.delegation()
	if err != nil {
		return err
	}

	// add writes the note before it calls the delegate, so that the attachment can be
	// deleted however this call ends. If there is a note already, this is a second ADD of
	// the interface. Most plugins refuse that, and the note of the first ADD must then
	// stay. So add replaces an existing note only after the delegate has succeeded.
	a := attachment{dir: c.DataDir, container: args.ContainerID, iface: args.IfName}
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
	stdin, plugin, err := d.call()
	if err != nil {
		return err
	}
	result, err := invoke.DelegateAdd(context.Background(), plugin, stdin, nil)
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

// call returns what is needed to call the delegate with the configuration o: its standard
// input and its name.
func (o object) call() (stdin []byte, plugin string, err error) {
	if plugin, err = o.text("type", defaultDelegate); err != nil {
		return nil, "", fmt.Errorf("delegate: %w", err)
	}
	if stdin, err = json.Marshal(o); err != nil {
		return nil, "", fmt.Errorf("encode delegate: %w", err)
	}
	return stdin, plugin, nil
}

// del detaches the container. It succeeds without calling the delegate if loadAny finds no
// note. If the note is damaged, del calls the delegate with the configuration from release.
func del(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	a := attachment{dir: c.DataDir, container: args.ContainerID, iface: args.IfName}
	d, err := a.loadAny(c.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, errDamaged):
		fmt.Fprintln(os.Stderr, "flannel:", err)
		if d, err = c.release(); err != nil {
			return err
		}
	case err != nil:
		return err
	}

	c.runtime(d)
	stdin, plugin, err := d.call()
	if err != nil {
		return err
	}
	if err := invoke.DelegateDel(context.Background(), plugin, stdin, nil); err != nil {
		return err
	}
	return a.remove()
}

// check asks the delegate whether the attachment is still intact.
func check(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	a := attachment{dir: c.DataDir, container: args.ContainerID, iface: args.IfName}
	d, err := a.loadAny(c.Name)
	if err != nil {
		return types.NewError(types.ErrUnknownContainer, "the container is not known to be attached", err.Error())
	}
	c.runtime(d)
	if c.PrevResult != nil {
		d.set("prevResult", withGateways(c.PrevResult))
	}

	stdin, plugin, err := d.call()
	if err != nil {
		return err
	}
	return invoke.DelegateCheck(context.Background(), plugin, stdin, nil)
}

// status returns nil if containers can be attached, and otherwise an error with the
// reason.
func status(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	d, err := c.delegation()
	if err != nil {
		if e, ok := errors.AsType[*types.Error](err); ok && e.Code == types.ErrTryAgainLater {
			return types.NewError(types.ErrPluginNotAvailable, e.Msg, e.Details)
		}
		return err
	}
	stdin, plugin, err := d.call()
	if err != nil {
		return err
	}
	return invoke.DelegateStatus(context.Background(), plugin, stdin, nil)
}

// collect implements GC. It deletes all attachments to this network that the runtime no
// longer lists, and then calls GC of the delegate, which may know further attachments.
func collect(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	var keep []types.GCAttachment
	if err := json.Unmarshal(c.Attachments, &keep); err != nil { // do not treat a missing list like an empty one, which means to detach everything
		return types.NewError(types.ErrInvalidNetworkConfig, "parse cni.dev/valid-attachments", err.Error())
	}
	err = c.detachAllBut(keep)
	d, failed := c.delegation()
	if failed != nil {
		return errors.Join(err, failed)
	}

	d.set("cni.dev/valid-attachments", keep)
	stdin, plugin, failed := d.call()
	if failed != nil {
		return errors.Join(err, failed)
	}
	return errors.Join(err, invoke.DelegateGC(context.Background(), plugin, stdin, nil))
}

// detachAllBut deletes the attachments to this network that are not in keep. If one
// cannot be deleted, it continues with the others, and returns all errors.
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

// detach calls the delegate with the configuration d to delete an attachment whose
// container is gone. If the delegate succeeds, detach removes the note.
func (a attachment) detach(d object) error {
	stdin, plugin, err := d.call()
	if err != nil {
		return err
	}
	paths := os.Getenv("CNI_PATH")
	path, err := invoke.FindInPath(plugin, filepath.SplitList(paths))
	if err != nil {
		return err
	}
	as := &invoke.Args{Command: "DEL", ContainerID: a.container, IfName: a.iface, Path: paths}
	if err := invoke.ExecPluginWithoutResult(context.Background(), path, stdin, as, nil); err != nil {
		return err
	}
	return a.remove()
}
