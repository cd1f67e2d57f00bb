package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

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
// the other has added. That one knows one interface for each container.
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
