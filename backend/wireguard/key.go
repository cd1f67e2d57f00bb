// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/renameio/v2"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

const keyFile = "wgkey" // in the state directory

// flannelKeyFile is the path of upstream flannel's private key, unless WIREGUARD_KEY_FILE
// sets another.
const flannelKeyFile = "/run/flannel/wgkey"

// writtenFile lists, in the state directory, the private key files that flanneld has written because
// of WIREGUARD_KEY_FILE: a JSON object that maps the path of each file to the public key.
const writtenFile = "wgkey-written"

// keyStore stores the private key, so that it survives restarts and reboots.
type keyStore struct {
	path     string // empty if the key is not stored
	own      bool   // whether path is not that of an operator
	fallback string // path of the file to read if path does not exist; empty if there is none
	written  string // path of the list of written key files; empty if there is no list
	foreign  bool   // the key in path may belong to another host
}

// keyFileVariable is the environment variable with the path of the private key.
const keyFileVariable = "WIREGUARD_KEY_FILE"

// newKeyStore returns the store of a network's key. network is empty if the process serves only one.
func newKeyStore(stateDir, network string) keyStore {
	if path := os.Getenv(keyFileVariable); path != "" {
		s := keyStore{path: path}
		if stateDir != "" {
			s.written = filepath.Join(stateDir, writtenFile)
		}
		return s
	}

	name := keyFile
	s := keyStore{fallback: flannelKeyFile, own: true}
	if network != "" {
		name += "-" + network
		s.fallback = ""
	}
	if stateDir != "" {
		s.path = filepath.Join(stateDir, name)
	}
	return s
}

// key returns the stored private key, or else that of the existing device, or else a new one. The key
// is then in s.path, unless that is empty.
func (s keyStore) key(device wgtypes.Key) (wgtypes.Key, error) {
	for _, path := range []string{s.path, s.fallback} {
		if path == "" || path == s.path && s.foreign {
			continue
		}

		key, err := readKey(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil || path == s.path {
			return key, err
		}
		return key, s.save(key)
	}
	if device != (wgtypes.Key{}) {
		return device, s.save(device)
	}

	key, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		return key, fmt.Errorf("make a private key: %w", err)
	}
	return key, s.save(key)
}

func readKey(path string) (wgtypes.Key, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return wgtypes.Key{}, fmt.Errorf("read private key: %w", err)
	}
	key, err := wgtypes.ParseKey(strings.TrimSpace(string(raw)))
	if err != nil { // the error's text would contain the key
		return key, fmt.Errorf("private key file %s holds no key: want 32 bytes in base64; remove it and a new one will be made", path)
	}
	return key, nil
}

func (s keyStore) save(key wgtypes.Key) error {
	if s.path == "" {
		return nil
	}
	if s.written != "" {
		_ = s.addToWritten(key) // if this fails, the key is usable, but a cleanup does not find its file
	}
	if err := writeSecret(s.path, []byte(key.String())); err != nil {
		return fmt.Errorf("keep private key: %w", err)
	}
	return nil
}

func writeSecret(path string, text []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return renameio.WriteFile(path, text, 0o600, renameio.WithTempDir(dir), renameio.IgnoreUmask())
}

// addToWritten lists s.path in s.written. It replaces a list that cannot be read.
func (s keyStore) addToWritten(key wgtypes.Key) error {
	path, err := filepath.Abs(s.path)
	if err != nil {
		return err
	}
	list, err := readWritten(s.written)
	if err != nil || list == nil {
		list = map[string]string{}
	}
	list[path] = key.PublicKey().String()
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	return writeSecret(s.written, text)
}

// readWritten returns nil if the list does not exist.
func readWritten(path string) (list map[string]string, err error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil {
		return nil, fmt.Errorf("read list of private key files %s: %w", path, err)
	}
	return list, nil
}

// WrittenKeys returns the paths of the private key files that flanneld has written because of
// WIREGUARD_KEY_FILE, and that still contain the written key. The list of these files is in
// stateDir. It returns none if the list does not exist.
func WrittenKeys(stateDir string) ([]string, error) {
	list, err := readWritten(filepath.Join(stateDir, writtenFile))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, path := range slices.Sorted(maps.Keys(list)) {
		if key, err := readKey(path); err == nil && key.PublicKey().String() == list[path] {
			paths = append(paths, path)
		}
	}
	return paths, nil
}
