// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"
)

// etcdChild is the value of os.Args[0] with which RunChild runs the store.
const etcdChild = "flannel-lab-etcd"

// etcdConfig is the only argument of the store's process, as JSON.
type etcdConfig struct {
	Dir                             string
	URLs                            []string
	CertFile, KeyFile, ClientCAFile string `json:",omitempty"`
}

// RunChild must be the first call in main, or in TestMain, of every binary that builds
// labs. To run the store, the lab starts the same binary, or EtcdOptions.Program, a second
// time with another argument 0. In that process RunChild runs the store and does not
// return. In all others it returns at once.
func RunChild() {
	if os.Args[0] != etcdChild {
		return
	}
	if err := serveEtcd(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serveEtcd(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s: want one argument, got %d", etcdChild, len(args))
	}

	var c etcdConfig
	if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
		return fmt.Errorf("parse %s: %w", args[0], err)
	}

	cfg := embed.NewConfig()
	cfg.Dir = c.Dir
	cfg.LogLevel = "error"
	cfg.LogOutputs = []string{"stderr"}
	cfg.UnsafeNoFsync = true

	// Small, because etcd allocates a segment in advance, and on tmpfs it takes memory.
	wal.SegmentSizeBytes = 4 << 20

	// A single member waits for no other member, so a short election timeout makes it start
	// quickly. It also allows leases with a short TTL, because etcd derives the shortest
	// TTL from it. A shorter tick would make an idle etcd use more CPU time.
	cfg.TickMs = 100
	cfg.ElectionMs = 500
	cfg.BcryptCost = 4 // the minimum, so that a login takes less than a second even with the race detector

	cfg.ListenClientUrls = nil
	for _, text := range c.URLs {
		u, err := url.Parse(text)
		if err != nil {
			return err
		}
		cfg.ListenClientUrls = append(cfg.ListenClientUrls, *u)
	}

	cfg.AdvertiseClientUrls = cfg.ListenClientUrls
	cfg.ClientTLSInfo.CertFile = c.CertFile
	cfg.ClientTLSInfo.KeyFile = c.KeyFile
	cfg.ClientTLSInfo.TrustedCAFile = c.ClientCAFile
	cfg.ClientTLSInfo.ClientCertAuth = c.ClientCAFile != ""

	if c.CertFile != "" { // etcd would report bad files only after it has reported that it is ready
		if _, err := cfg.ClientTLSInfo.ServerConfig(); err != nil {
			return fmt.Errorf("load TLS files: %w", err)
		}
	}

	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	defer e.Close()

	select {
	case <-e.Server.ReadyNotify():
		if _, err := fmt.Fprintln(os.Stdout, "serving"); err != nil {
			return err
		}
	case err := <-e.Err():
		return err
	}
	return <-e.Err()
}
