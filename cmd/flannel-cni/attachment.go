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

// firstInterface is what runtimes call a container's interface unless it has
// several.
const firstInterface = "eth0"

// errDamaged means that a note cannot be read.
var errDamaged = errors.New("damaged")

// attachment is the note of what a container was attached with: the
// delegate's configuration, in a file of the plugin's data directory.
type attachment struct{ dir, container, iface string }

// path is the name that flannel's plugin uses, so that either can delete what
// the other has added. That one has one note for each container, of whatever
// interface it added last.
func (a attachment) path() string {
	name := a.container
	if a.iface != firstInterface {
		name += "@" + a.iface // neither has one
	}
	return filepath.Join(a.dir, name)
}

// attachments returns all that there are notes of.
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
		if f.Type().IsRegular() && !strings.HasPrefix(container, ".") { // that would be a temporary file
			all = append(all, attachment{dir: dir, container: container, iface: iface})
		}
	}
	return all, nil
}

// kept reports whether a is among the attachments that must stay. The note of
// the first interface may be flannel's of any that has none of its own.
func (a attachment) kept(keep []types.GCAttachment, all []attachment) bool {
	return slices.ContainsFunc(keep, func(k types.GCAttachment) bool {
		if k.ContainerID != a.container {
			return false
		}
		own := attachment{dir: a.dir, container: k.ContainerID, iface: k.IfName}
		return own == a || a.iface == firstInterface && !slices.Contains(all, own)
	})
}

// loadAny is load for what flannel's plugin may have added to network: where a
// has no note it returns the container's. If that is of another interface the
// delegate finds nothing of a to delete. It is not to be removed with a, as the
// other interface needs it.
func (a attachment) loadAny(network string) (object, error) {
	d, err := a.load()
	if !errors.Is(err, fs.ErrNotExist) || a.iface == firstInterface {
		return d, err
	}
	shared, errShared := attachment{dir: a.dir, container: a.container, iface: firstInterface}.load()
	if name, _ := shared.text("name", ""); errShared == nil && name != network {
		return nil, err
	}
	return shared, errShared
}

// load returns fs.ErrNotExist, wrapped, if there is no note, and errDamaged if
// there is one that says nothing.
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
	text, err := json.Marshal(d)
	if err != nil {
		return fmt.Errorf("encode attachment: %w", err)
	}
	if err := os.MkdirAll(a.dir, 0o700); err != nil {
		return fmt.Errorf("create directory of attachments: %w", err)
	}
	if err := renameio.WriteFile(a.path(), text, 0o600, renameio.WithTempDir(a.dir)); err != nil {
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
