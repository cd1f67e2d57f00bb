// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// socketLeftover is the path of a control socket.
type socketLeftover string

func (s socketLeftover) String() string { return "socket " + string(s) }

// Present implements backend.Leftover.
func (s socketLeftover) Present() (bool, error) {
	_, err := os.Lstat(string(s))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Remove implements backend.Leftover.
func (s socketLeftover) Remove(context.Context) error {
	err := os.Remove(string(s))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func socketPath(dir, device string) string { return filepath.Join(dir, device+".sock") }
