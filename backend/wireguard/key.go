package wireguard

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/renameio/v2"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// keyFile is the private key's name in the state directory.
const keyFile = "wgkey"

// flannelKeyFile is where the known flannel keeps its private key, unless told
// otherwise by WIREGUARD_KEY_FILE.
const flannelKeyFile = "/run/flannel/wgkey"

// keeper keeps the private key over restarts and reboots.
type keeper struct {
	path     string // empty: nowhere
	fallback string // is read where path is not there yet; may be empty
}

func newKeeper(stateDir string) keeper {
	if path, ok := os.LookupEnv("WIREGUARD_KEY_FILE"); ok && path != "" {
		return keeper{path: path}
	}
	if stateDir == "" {
		return keeper{fallback: flannelKeyFile}
	}
	return keeper{path: filepath.Join(stateDir, keyFile), fallback: flannelKeyFile}
}

// key returns the private key that is kept; else that of the device that is
// there, zero for none; else a new one. It is on disk when key returns.
func (k keeper) key(device wgtypes.Key) (wgtypes.Key, error) {
	for _, path := range []string{k.path, k.fallback} {
		if path == "" {
			continue
		}
		key, err := readKey(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return key, err
		}
		if path == k.path {
			return key, nil
		}
		return key, k.save(key)
	}
	if device != (wgtypes.Key{}) {
		return device, k.save(device)
	}
	key, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		return key, fmt.Errorf("make a private key: %w", err)
	}
	return key, k.save(key)
}

func readKey(path string) (wgtypes.Key, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return wgtypes.Key{}, fmt.Errorf("read private key: %w", err)
	}
	key, err := wgtypes.ParseKey(strings.TrimSpace(string(raw)))
	if err != nil { // whose text would show it
		return key, fmt.Errorf("private key file %s holds no key: want 32 bytes in base64; remove it and a new one will be made", path)
	}
	return key, nil
}

func (k keeper) save(key wgtypes.Key) error {
	if k.path == "" {
		return nil
	}
	dir := filepath.Dir(k.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("keep private key: %w", err)
	}
	if err := renameio.WriteFile(k.path, []byte(key.String()), 0o600, renameio.WithTempDir(dir), renameio.IgnoreUmask()); err != nil {
		return fmt.Errorf("keep private key: %w", err)
	}
	return nil
}
