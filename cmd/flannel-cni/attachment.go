// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/renameio/v2"
)

// firstInterface is the name that runtimes give the first interface of a container.
const firstInterface = "eth0"

// errDamaged means that a note exists but cannot be parsed.
var errDamaged = errors.New("damaged")

// attachment is one interface of a container. Its note is a file in dir with the configuration of the
// delegate that added the interface.
type attachment struct{ dir, container, iface string }

func (a attachment) path() string {
	// For the first interface this is the path that flannel's plugin uses, so that each plugin
	// can delete what the other has added. flannel's plugin has one note per container: that
	// of the interface it added last.
	name := a.container
	if a.iface != firstInterface {
		name += "@" + a.iface // a container id contains no "@", so the first "@" ends it
	}
	return filepath.Join(a.dir, name)
}

func attachments(dir string) ([]attachment, error) {
	files, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list attachments: %w", err)
	}

	var all []attachment
	for _, f := range files {
		container, iface, several := strings.Cut(f.Name(), "@")
		if !several {
			iface = firstInterface
		}
		temporary := strings.HasPrefix(container, ".")
		if f.Type().IsRegular() && !temporary {
			all = append(all, attachment{dir: dir, container: container, iface: iface})
		}
	}
	return all, nil
}

// kept reports whether GC must leave a, because an attachment in keep is a or needs the note of a.
func (a attachment) kept(keep []types.GCAttachment, all []attachment) bool {
	return slices.ContainsFunc(keep, func(k types.GCAttachment) bool {
		if k.ContainerID != a.container {
			return false
		}

		// The note of the first interface may be one that flannel's plugin has written for
		// another interface, which then has no note of its own.
		own := attachment{dir: a.dir, container: k.ContainerID, iface: k.IfName}
		return own == a || a.iface == firstInterface && !slices.Contains(all, own)
	})
}

// loadAny is load for an attachment to network that flannel's plugin may have added. The note may be
// shared, so the caller must remove only that of a. The error wraps fs.ErrNotExist if there is none
// for network.
func (a attachment) loadAny(network string) (object, error) {
	d, err := a.load()
	if !errors.Is(err, fs.ErrNotExist) || a.iface == firstInterface {
		return d, err
	}

	// flannel's plugin has one note for all interfaces of a container. If it never added a,
	// the delegate finds nothing to delete.
	shared, errShared := attachment{dir: a.dir, container: a.container, iface: firstInterface}.load()
	if name, _ := shared.text("name", ""); errShared == nil && name != network {
		return nil, err
	}
	return shared, errShared
}

// load returns the delegate's configuration. The error wraps fs.ErrNotExist or errDamaged.
func (a attachment) load() (object, error) {
	text, err := os.ReadFile(a.path())
	if err != nil {
		return nil, fmt.Errorf("read attachment: %w", err)
	}

	var d object
	if err := json.Unmarshal(text, &d); err != nil || d == nil {
		return nil, fmt.Errorf("attachment %s: %w", a.path(), errDamaged)
	}
	return d, nil
}

func (a attachment) save(d object) error {
	if err := os.MkdirAll(a.dir, 0o700); err != nil {
		return fmt.Errorf("create directory of attachments: %w", err)
	}
	if err := renameio.WriteFile(a.path(), raw(d), 0o600, renameio.WithTempDir(a.dir)); err != nil {
		return fmt.Errorf("write attachment: %w", err)
	}
	return nil
}

func (a attachment) remove() error {
	if err := os.Remove(a.path()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove attachment: %w", err)
	}
	return nil
}
